"""One agent call as the worker sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

import grpc
from kvcache_proto.v1 import codec
from kvcache_proto.v1 import kvcache_pb2 as pb
from kvcache_proto.v1.tensors import FrameError, FrameWriter, frames, ranges

from kvcache_client import tracing
from kvcache_client.buffers import Buffers
from kvcache_client.errors import CacheError, from_rpc
from kvcache_client.stubs import KVCacheStub, TurnsStub

Reply = TypeVar("Reply")


class Turn:
    """An open turn: its plan, its buffer, and the calls that follow. Leave it with settle() or release().

    buffer: [layers, 2 (K, V), plan.buffer_tokens, kv_heads, head_dim] as bytes. Columns: the prompt, then the reserve
    for decoded tokens, then the probe columns. The worker writes its own KV into the same buffer.
    """

    def __init__(
        self,
        stub: TurnsStub,
        kvcache: KVCacheStub,
        plan: pb.OpenTurnReply,
        buffers: Buffers,
        *,
        planes: int,
        row_bytes: int,
        reserve: int,
        dtype: pb.DType,
        timeout: float,
        lost: Callable[[CacheError], None],
    ) -> None:
        self._stub = stub
        self._kvcache = kvcache
        self._buffers = buffers
        self._planes = planes
        self._row = row_bytes
        self._reserve = reserve
        self._dtype = dtype
        self._timeout = timeout
        self._lost = lost
        self._over = False
        self._private: bytearray | None = None
        self.plan = plan
        self.fetch_seconds = 0.0
        size = planes * plan.buffer_tokens * row_bytes
        if plan.buffer_path:
            try:
                self.buffer = buffers.map(plan.buffer_path, plan.buffer_bytes)[:size]
            except CacheError:
                self.release()
                raise
        else:
            self._private = buffers.take(size)
            self.buffer = memoryview(self._private)[:size]

    @property
    def fresh(self) -> list[int]:
        """Prompt positions that the worker computes, ascending."""
        return [p for s in self.plan.segments for p in s.fresh]

    @property
    def reuses(self) -> bool:
        """True when the service has KV for this turn."""
        return len(self.fresh) < self.plan.prompt_tokens

    def fetch(self, on_layers: Callable[[int], None] | None = None) -> None:
        """Bring the assembled KV into `buffer`, lowest layers first. Raises CacheError; the caller prefills then.

        on_layers: told on this thread how many layers are complete, whenever more are, so that an engine may begin to compute.
        """
        if self.plan.HasField("fetched"):
            self.fetch_seconds = self.plan.fetched.assembly_seconds
            if on_layers is not None:
                on_layers(self._planes // 2)
            return
        started = time.perf_counter()
        wire = self._fetch_wire()
        writer = FrameWriter(self.buffer, wire)
        layer_bytes = 2 * sum(length for _, length in wire) // self._planes
        summary = None
        complete = 0

        def progress(layers: int) -> None:
            nonlocal complete
            if on_layers is not None and layers > complete:
                complete = layers
                on_layers(layers)

        def read() -> None:
            nonlocal summary
            request = pb.FetchTurnRequest(turn_id=self.plan.turn_id)
            for reply in self._stub.FetchTurn(request, timeout=self._timeout, metadata=tracing.metadata()):
                if isinstance(reply, codec.Frame) or reply.WhichOneof("part") == "frame":
                    writer.write(reply if isinstance(reply, codec.Frame) else reply.frame)
                    progress(writer.received // layer_bytes)
                elif reply.WhichOneof("part") == "layers":
                    progress(reply.layers)
                else:
                    summary = reply.summary
            if self._private is not None:
                writer.finish()

        self._call("kvcache.fetch", read)
        if summary is None:
            raise CacheError("MISS", "the service ended the stream early", fix="prefill")
        self.fetch_seconds = time.perf_counter() - started

    def observe(self, start: int, tokens: int) -> None:
        """Hand over KV that the worker computed at positions [start, start + tokens)."""
        header = pb.ObserveHeader(turn_id=self.plan.turn_id, start=start, tokens=tokens, dtype=self._dtype)

        def requests() -> Iterator[pb.ObserveRequest | bytes]:
            yield pb.ObserveRequest(header=header)
            if self._private is not None:
                yield from frames(pb.ObserveRequest, self.buffer, self._wire([(start, start + tokens)]))

        self._call("kvcache.observe", lambda: self._stub.Observe(requests(), timeout=self._timeout, metadata=tracing.metadata()))

    def settle(
        self,
        verdict: pb.Verdict,
        *,
        reason: pb.Reason = pb.REASON_UNSPECIFIED,
        finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED,
        output_token_ids: Sequence[int] = (),
        output_kv_tokens: int = 0,
        probes: Iterable[pb.ProbeResidual] = (),
        ttft_seconds: float = 0.0,
        first_forward_seconds: float = 0.0,
        distance: pb.Distance | None = None,
        observed: tuple[int, int] | None = None,
    ) -> pb.SettleTurnReply:
        """Verdict and measurements; the service commits once, however often this is repeated.

        observed: as observe(*observed) just before, without a call of its own where memory is shared.
        """
        start, tokens = observed or (0, 0)
        if tokens and self._private is not None:
            self.observe(start, tokens)
            start = tokens = 0
        request = pb.SettleTurnRequest(
            turn_id=self.plan.turn_id,
            verdict=verdict,
            reason=reason,
            finish_reason=finish_reason,
            output_token_ids=output_token_ids,
            output_kv_tokens=output_kv_tokens,
            probes=probes,
            timing=pb.Timing(
                ttft_seconds=ttft_seconds, first_forward_seconds=first_forward_seconds, fetch_seconds=self.fetch_seconds
            ),
            distance=distance,
            observe_start=start,
            observe_tokens=tokens,
        )
        reply = self._call(
            "kvcache.settle", lambda: self._stub.SettleTurn(request, timeout=self._timeout, metadata=tracing.metadata())
        )
        self._close()
        return reply

    def release(self) -> None:
        """Give the turn up; never raises. A service that is gone has nothing left to free."""
        if not self._over:
            request = pb.ReleaseRequest(turn_id=self.plan.turn_id)
            with contextlib.suppress(CacheError):
                self._call(
                    "kvcache.release", lambda: self._kvcache.Release(request, timeout=self._timeout, metadata=tracing.metadata())
                )
            self._close()

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _close(self) -> None:
        if not self._over and self._private is not None:
            self._buffers.give_back(self._private)
        self._over = True

    def _fetch_wire(self) -> list[tuple[int, int]]:
        cached = [(s.start, s.start + s.tokens) for s in self.plan.segments if s.action != pb.ACTION_DENSE]
        return self._wire([*cached, (self.plan.prompt_tokens + self._reserve, self.plan.buffer_tokens)])

    def _wire(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return ranges(range(self._planes), self.plan.buffer_tokens, self._row, spans)

    def _call(self, name: str, rpc: Callable[[], Reply]) -> Reply:
        """name: of its span."""
        with tracing.step(name, call=True):
            tracing.note(turn_id=self.plan.turn_id)
            return self._answer(rpc)

    def _answer(self, rpc: Callable[[], Reply]) -> Reply:
        try:
            return rpc()
        except grpc.RpcError as error:
            translated = from_rpc(error)
            if translated.silent:
                # The session went with the service, and the turn with the session: nothing is left to release.
                self._close()
                self._lost(translated)
            raise translated from error
        except FrameError as error:
            raise CacheError("CHECKSUM", str(error), fix="prefill") from error
