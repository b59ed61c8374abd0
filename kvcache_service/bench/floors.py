"""What no cache can beat on this machine: a copy of the bytes, a plain gRPC stream of them, an empty call."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from types import TracebackType

import grpc
import numpy as np
from kvcache_client.stubs import KVCacheStub
from kvcache_proto.v1 import kvcache_pb2 as pb
from kvcache_proto.v1.tensors import FRAME_BYTES

from kvcache_service.bench.rows import Timer, seconds

_LIMITS = [("grpc.max_receive_message_length", 4 << 20), ("grpc.max_send_message_length", 4 << 20)]


def copy(size: int) -> Timer:
    """One copy of `size` bytes between two resident buffers."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return lambda: seconds(lambda: np.copyto(target, source))


class EmptyCall:
    """Hello on a channel of its own."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._stub = KVCacheStub(self._channel)
        self._request = pb.HelloRequest(protocol_min=1, protocol_max=1)

    def __call__(self) -> float:
        return seconds(lambda: self._stub.Hello(self._request))

    def __enter__(self) -> EmptyCall:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._channel.close()


def both(first: Timer, second: Timer) -> Timer:
    """The sum of two floors."""
    return lambda: first() + second()


class PlainStream:
    """A gRPC server in a process of its own that sends and takes raw frames; no protobuf, no checksum, no cache."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{mine.recv()}", options=_LIMITS)
        self._down = self._channel.unary_stream("/plain/Down", bytes, bytes)
        self._up = self._channel.stream_unary("/plain/Up", bytes, bytes)

    def down(self, size: int) -> Timer:
        """The server sends `size` bytes, which are copied into one buffer."""
        target = bytearray(size)

        def read() -> None:
            at = 0
            for frame in self._down(size.to_bytes(8)):
                target[at : at + len(frame)] = frame
                at += len(frame)

        return lambda: seconds(read)

    def up(self, size: int) -> Timer:
        """The client sends `size` bytes."""
        source = memoryview(bytearray(size))

        return lambda: seconds(lambda: self._up(_pieces(source)))

    def __enter__(self) -> PlainStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._channel.close()
        self._process.terminate()
        self._process.join()


def _pieces(source: memoryview) -> Iterator[bytes]:
    for at in range(0, len(source), FRAME_BYTES):
        yield bytes(source[at : at + FRAME_BYTES])


def _serve(ready: Connection) -> None:
    asyncio.run(_plain_server(ready))


async def _plain_server(ready: Connection) -> None:
    async def down(request: bytes, _context: object) -> AsyncIterator[bytes]:
        for piece in _pieces(memoryview(bytearray(int.from_bytes(request)))):
            yield piece

    async def up(requests: AsyncIterator[bytes], _context: object) -> bytes:
        target, at = bytearray(FRAME_BYTES), 0
        async for frame in requests:
            target[: len(frame)] = frame
            at += len(frame)
        return at.to_bytes(8)

    server = grpc.aio.server(options=_LIMITS)
    methods = {"Down": grpc.unary_stream_rpc_method_handler(down), "Up": grpc.stream_unary_rpc_method_handler(up)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plain", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready.send(port)
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(1.0)
