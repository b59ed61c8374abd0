"""A plain KV store: whole prompts go in and come out by the policy `exact`, new bytes every time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
from kvcache_client import KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.bench import floors, scene
from kvcache_service.bench.rows import WARMUP, Row, Track, row, seconds
from kvcache_service.evaluation.service import ServiceProcess

SIZES = scene.SIZES[-2:]  # a chunk of 64 tokens is the least that is kept


def run(track: Track[int], rounds: int, sizes: tuple[int, ...] = SIZES, clients: tuple[int, ...] = (1, 8)) -> Iterator[Row]:
    with ServiceProcess(**scene.SETTLED) as service, floors.PlainStream() as plain, floors.EmptyCall(service.target) as empty:
        prompts = scene.Prompts()
        for size in sizes:
            copied = floors.both(floors.copy(size), empty)
            for transport, floor, beneath in (
                ("shared_memory", "one copy and an empty call", (copied, copied)),
                ("stream", "plain gRPC stream", (plain.up(size), plain.down(size))),
            ):
                for count in clients:
                    case = f"{scene.named(size)}, {transport.replace('_', ' ')}, {count} client{'s' * (count > 1)}"
                    times: list[list[float]] = [[], [], [], []]
                    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as threads:
                        workers = [stack.enter_context(Worker(service.target, transport, prompts, size)) for _ in range(count)]
                        for number in track(range(rounds + WARMUP), rounds + WARMUP, f"store: {case}"):
                            puts = list(threads.map(Worker.put, workers))
                            gets = list(threads.map(Worker.get, workers))
                            if number >= WARMUP:
                                for kept, new in zip(times, (puts, gets, [beneath[0]()], [beneath[1]()]), strict=True):
                                    kept += new
                    yield row("store", f"store {case}", floor, times[0], times[2], size=size, clients=count)
                    yield row("store", f"retrieve {case}", floor, times[1], times[3], size=size, clients=count)


class Worker:
    """One client that stores a new prompt and reads it back. Its KV lies where an inference worker has it: in the turn's
    buffer, which is written before the clock starts."""

    def __init__(self, target: str, transport: str, prompts: scene.Prompts, size: int, shape: scene.Shape = scene.USUAL) -> None:
        self._client = KVCacheClient(target, transport=transport, timeout=60.0)
        self._template = scene.plain_template(self._client, shape)
        self._prompts = prompts
        self._tokens = size // shape.token_bytes
        self._kv = np.frombuffer(scene.memory(scene.noise(self._tokens, shape)), np.uint8)
        self._prompt: list[int] = []

    def put(self) -> float:
        self._prompt = self._prompts.take(self._tokens)
        started = time.perf_counter()
        turn = self._client.open_turn(self._template, {"prompt": self._prompt}, reserve_tokens=0)
        opened = time.perf_counter() - started
        np.copyto(np.frombuffer(turn.buffer, np.uint8), self._kv)

        def hand_over() -> None:
            turn.settle(pb.VERDICT_ACCEPTED, finish_reason=pb.FINISH_REASON_LENGTH, observed=(0, self._tokens))

        return opened + seconds(hand_over)

    def get(self) -> float:
        """The last token is computed by the worker, whatever is stored: its chunk stays behind."""

        def retrieve() -> None:
            with self._client.open_turn(self._template, {"prompt": self._prompt}, reserve_tokens=0, fetch=True) as turn:
                assert len(turn.fresh) <= scene.CHUNK, "what was stored must be there"
                turn.fetch()

        return seconds(retrieve)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.close()
