"""The services of kvcache.v1. Tensor and metadata work runs in a thread pool, never on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import torch
from kvcache_proto.v1 import codec
from kvcache_proto.v1 import kvcache_pb2 as pb
from kvcache_proto.v1.tensors import FRAME_BYTES, FrameError, FrameWriter, frames, ranges
from torch import Tensor

from kvcache_service.engine import assembly
from kvcache_service.engine.engine import Engine, Opened
from kvcache_service.engine.sessions import Turn
from kvcache_service.errors import Code, KVCacheError, invalid
from kvcache_service.rpc import convert, events
from kvcache_service.rpc.callers import Caller
from kvcache_service.rpc.errors import translated
from kvcache_service.rpc.limits import refuse_oversized
from kvcache_service.telemetry import Telemetry

log = logging.getLogger(__name__)
PROTOCOL = 1
# Of layers that a worker hears of together. Through a stream, the next band is assembled while the last one travels.
_SHARED_BAND_BYTES, _STREAM_BAND_BYTES = 8 << 20, 2 << 20

Result = TypeVar("Result")

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class Servicer:
    """What all services share."""

    def __init__(self, engine: Engine, telemetry: Telemetry, executor: Executor) -> None:
        self._engine = engine
        self._telemetry = telemetry
        self._executor = executor

    async def _run(self, call: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        return await _within(self._executor, partial(call, *args, **kwargs))

    async def _ahead(self, work: Iterator[Result]) -> AsyncIterator[Result]:
        """The items of `work`, made by the thread pool; the next one is made while the last one is used."""
        upcoming = asyncio.ensure_future(self._run(next, work, None))
        try:
            while (item := await upcoming) is not None:
                upcoming = asyncio.ensure_future(self._run(next, work, None))
                yield item
        finally:
            upcoming.cancel()

    async def _received(
        self,
        requests: AsyncIterator[pb.PutRequest | codec.Frame]
        | AsyncIterator[pb.ObserveRequest | codec.Frame]
        | AsyncIterator[pb.ImportRequest | codec.Frame],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """The KV whose frames follow a header, in memory of the host tier. Damaged or ill-fitting frames end the call."""
        kv = await self._run(self._engine.room, shape, dtype)
        writer = FrameWriter(_memory(kv), ranges(range(1), 1, kv.nbytes, [(0, 1)]))
        try:
            async for request in requests:
                writer.write(request if isinstance(request, codec.Frame) else request.frame)
            writer.finish()
        except FrameError as error:
            raise KVCacheError(
                Code.CHECKSUM if error.checksum else Code.INVALID, str(error), field="frame", fix="send the announced bytes again"
            ) from error
        return kv

    def _translated(self, context: Context) -> AbstractAsyncContextManager[None]:
        return translated(context, self._telemetry)


class KVCacheServicer(Servicer):
    """Sessions, registration and exact prefixes."""

    def __init__(
        self, engine: Engine, telemetry: Telemetry, executor: Executor, *, host_id: str, shared_memory_dir: Path
    ) -> None:
        super().__init__(engine, telemetry, executor)
        self._host_id = host_id
        self._shared_memory_dir = shared_memory_dir
        self._over = asyncio.Event()

    def end_sessions(self) -> None:
        """Every attached worker's stream ends, as if it had left, and every reader's of events."""
        self._over.set()

    async def Hello(self, request: pb.HelloRequest, context: Context, caller: Caller) -> pb.HelloReply:
        async with self._translated(context):
            if not request.protocol_min <= PROTOCOL <= request.protocol_max:
                raise invalid(
                    "protocol_min",
                    f"client speaks {request.protocol_min} to {request.protocol_max}, this server {PROTOCOL}",
                    "update the older side",
                )
            transports = [pb.TRANSPORT_STREAM]
            if request.host_id == self._host_id:
                transports.insert(0, pb.TRANSPORT_SHARED_MEMORY)
            return pb.HelloReply(
                protocol=PROTOCOL,
                boot_id=self._engine.boot_id,
                version=version("kvcache-service"),
                device=self._engine.device,
                transports=transports,
                frame_bytes=FRAME_BYTES,
                session_bytes=self._engine.settings.session_bytes,
                max_prompt_tokens=self._engine.settings.max_prompt_tokens,
                shared_memory_dir=str(self._shared_memory_dir),
            )

    async def Attach(
        self, requests: AsyncIterator[pb.Heartbeat], context: Context, caller: Caller
    ) -> AsyncIterator[pb.SessionEvent]:
        async with self._translated(context):
            session_id = await self._run(self._engine.open_session, caller.tenant)
            self._telemetry.about(session_id=session_id)
            log.debug("attached")
        try:
            yield pb.SessionEvent(session_id=session_id, boot_id=self._engine.boot_id)
            leaving = asyncio.ensure_future(_exhausted(requests))
            over = asyncio.ensure_future(self._over.wait())
            try:
                await asyncio.wait((leaving, over), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                over.cancel()
        finally:
            # Shielded: a cancelled call must free its session too.
            await asyncio.shield(self._run(self._engine.close_session, session_id))

    async def RegisterModel(self, request: pb.RegisterModelRequest, context: Context, caller: Caller) -> pb.RegisterModelReply:
        async with self._translated(context):
            return pb.RegisterModelReply(
                model_id=await self._run(self._engine.register_model, caller.tenant, convert.geometry(request))
            )

    async def RegisterTemplate(
        self, request: pb.RegisterTemplateRequest, context: Context, caller: Caller
    ) -> pb.RegisterTemplateReply:
        async with self._translated(context):
            template_id, missing = await self._run(self._engine.register_template, caller.tenant, convert.template(request))
            return pb.RegisterTemplateReply(template_id=template_id, missing=missing)

    async def Put(self, requests: AsyncIterator[pb.PutRequest | codec.Frame], context: Context, caller: Caller) -> pb.PutReply:
        async with self._translated(context):
            header = (await first(requests)).header
            shape = tuple(header.shape)
            await self._run(self._engine.check_put, caller.tenant, header.model_id, len(header.token_ids), shape)
            pin, dtype = convert.pin(header.pin), convert.dtype(header.dtype)
            key, existed = await self._run(
                self._engine.put_prefix,
                caller.tenant,
                header.model_id,
                tuple(header.token_ids),
                await self._received(requests, shape, dtype),
                pin,
            )
            return pb.PutReply(key=key, existed=existed)

    async def Release(self, request: pb.ReleaseRequest, context: Context, caller: Caller) -> pb.ReleaseReply:
        async with self._translated(context):
            return pb.ReleaseReply(released=await self._run(self._engine.release, caller.tenant, request.turn_id))

    async def Events(self, request: pb.EventsRequest, context: Context, caller: Caller) -> AsyncIterator[pb.EventBatch]:
        async with self._translated(context):
            async for batch in events.follow(self._engine.events, caller.tenant, request, self._over, self._run):
                yield batch


async def _exhausted(requests: AsyncIterator[pb.Heartbeat]) -> None:
    async for _ in requests:
        pass


class TurnsServicer(Servicer):
    """One turn: open, fetch, observe, settle. Settling has threads of its own: a slow metadata store stops no other call."""

    def __init__(self, engine: Engine, telemetry: Telemetry, executor: Executor, settling: Executor) -> None:
        super().__init__(engine, telemetry, executor)
        self._settling = settling
        self._tracing = telemetry.tracing

    async def OpenTurn(self, request: pb.OpenTurnRequest, context: Context, caller: Caller) -> pb.OpenTurnReply:
        async with self._translated(context):
            if not request.request_id:
                raise invalid("request_id", "empty", "send a unique id, so that the call can be repeated")
            if request.transport not in (pb.TRANSPORT_SHARED_MEMORY, pb.TRANSPORT_STREAM):
                raise invalid("transport", f"{request.transport}", "send SHARED_MEMORY or STREAM")
            share = request.transport == pb.TRANSPORT_SHARED_MEMORY
            opening = self._run(
                self._open,
                share and request.fetch,
                caller.tenant,
                request.session_id,
                request.request_id,
                request.template_id,
                convert.samples(request),
                reserve=request.reserve_tokens,
                share=share,
                policy=convert.policy(request.policy),
                trial=convert.trial(request),
            )
            opened = await self._or_release(caller.tenant, asyncio.ensure_future(opening))
            self._telemetry.about(turn_id=opened.turn.turn_id)
            log.debug("opened")
            return convert.opened(opened, self._engine.settings.lease_seconds)

    def _open(self, fetch: bool, tenant: str, *args: Any, **kwargs: Any) -> Opened:
        """Open a turn; with `fetch`, what it reuses lies in its buffer afterwards."""
        with self._tracing.span("kvcache.plan"):
            opened = self._engine.open_turn(tenant, *args, **kwargs)
            self._telemetry.about(turn_id=opened.turn.turn_id)
            if self._tracing.on:
                self._tracing.note(**_planned(opened.turn))
        if fetch:
            try:
                for _ in self._assembled(opened.turn, opened.turn.buffer.capacity):
                    pass
            except BaseException:
                self._engine.release(tenant, opened.turn.turn_id)
                raise
        return opened

    def _assembled(self, turn: Turn, band_bytes: int) -> Iterator[range]:
        reused = assembly.fetched_tokens(turn.plan)
        with self._tracing.aside("kvcache.assemble", turn_id=turn.turn_id, bytes=reused * turn.geometry.token_bytes):
            yield from self._engine.assemble(turn, band_bytes)

    def _traced(self, name: str, call: Callable[..., Result], *args: object) -> Result:
        with self._tracing.span(name):
            return call(*args)

    async def _or_release(self, tenant: str, opening: asyncio.Future[Opened]) -> Opened:
        """A client that went away while its turn was opened will never name it: give it up here."""
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opened = await opening
            await self._run(self._engine.release, tenant, opened.turn.turn_id)
            raise

    async def FetchTurn(
        self, request: pb.FetchTurnRequest, context: Context, caller: Caller
    ) -> AsyncIterator[pb.FetchTurnReply | bytes]:
        async with self._translated(context):
            turn = await self._run(self._engine.turn, caller.tenant, request.turn_id)
            sent, band_bytes = 0, _SHARED_BAND_BYTES if turn.buffer.path else _STREAM_BAND_BYTES
            async for layers in self._ahead(self._assembled(turn, band_bytes)):
                if turn.buffer.path:
                    yield pb.FetchTurnReply(layers=layers.stop)
                    continue
                wire = _wire(turn, layers)
                sent += sum(length for _, length in wire)
                async for message in self._ahead(frames(pb.FetchTurnReply, _memory(turn.buffer.bytes), wire)):
                    yield message
            self._tracing.note(bytes=sent)
            yield pb.FetchTurnReply(summary=pb.FetchSummary(assembly_seconds=turn.assembly_seconds, bytes=sent))

    async def Observe(
        self, requests: AsyncIterator[pb.ObserveRequest | codec.Frame], context: Context, caller: Caller
    ) -> pb.ObserveReply:
        async with self._translated(context):
            header = (await first(requests)).header
            self._telemetry.about(turn_id=header.turn_id)
            turn = await self._run(
                self._engine.check_observation,
                caller.tenant,
                header.turn_id,
                header.start,
                header.tokens,
                convert.dtype(header.dtype),
            )
            # Into memory of its own: by the time the last frame is here, the turn's buffer may serve another turn.
            shape = turn.geometry.shape(header.tokens)
            staged = await self._run(
                self._traced,
                "kvcache.observe",
                self._engine.observe,
                turn,
                header.start,
                header.tokens,
                None if turn.buffer.path else await self._received(requests, shape, turn.geometry.dtype),
            )
            self._tracing.note(tokens=header.tokens, bytes=staged)
            return pb.ObserveReply(bytes=staged)

    async def SettleTurn(self, request: pb.SettleTurnRequest, context: Context, caller: Caller) -> pb.SettleTurnReply:
        async with self._translated(context):
            observed = (request.observe_start, request.observe_tokens) if request.observe_tokens else None
            settlement = convert.settlement(request)
            settle = partial(self._engine.settle, caller.tenant, request.turn_id, settlement, observed)
            settled = await _within(self._settling, partial(self._traced, "kvcache.settle", settle))
            self._tracing.note(verdict=settlement.verdict.name.lower(), candidates=settled.candidates, accepted=settled.accepted)
            log.debug("settled: %s, %d of %d candidates", settlement.verdict.name.lower(), settled.accepted, settled.candidates)
            return pb.SettleTurnReply(
                repeated=settled.repeated,
                candidates=settled.candidates,
                accepted=settled.accepted,
                refused=settled.refused,
                committed=settled.committed,
            )


class QualityServicer(Servicer):
    """Calibration and audited quality."""

    async def Calibrate(self, request: pb.CalibrateRequest, context: Context, caller: Caller) -> pb.CalibrateReply:
        async with self._translated(context):
            fitted = await self._run(
                self._engine.calibrate,
                caller.tenant,
                request.template_id,
                request.target_kl if request.HasField("target_kl") else None,
                request.target_top1 if request.HasField("target_top1") else None,
            )
            return pb.CalibrateReply(calibration=convert.calibration(fitted))

    async def Status(self, request: pb.StatusRequest, context: Context, caller: Caller) -> pb.StatusReply:
        async with self._translated(context):
            templates = await self._run(self._engine.status, caller.tenant)
            models = await self._run(self._engine.models, caller.tenant)
            return pb.StatusReply(
                boot_id=self._engine.boot_id,
                uptime_seconds=self._engine.uptime(),
                templates=[convert.template_status(t) for t in templates],
                models=[convert.model_status(m) for m in models],
            )


async def _within(executor: Executor, call: Callable[[], Result]) -> Result:
    """Run `call` on a thread, in a copy of this task's context: log lines there are about this call too."""
    return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, call)


def _memory(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data.cast("B")


def _planned(turn: Turn) -> dict[str, str | int | bool]:
    """What a plan's span says of it."""
    plan = turn.plan
    return {
        "template": turn.template.template_id,
        "policy": plan.policy.value,
        "reason": plan.reason.name.lower(),
        "prompt_tokens": plan.prompt_tokens,
        "fresh_tokens": len(plan.fresh),
        "trial": turn.trial is not None,
    }


def _wire(turn: Turn, layers: range) -> list[tuple[int, int]]:
    geometry = turn.geometry
    row = geometry.kv_heads * geometry.head_dim * geometry.dtype.itemsize
    return ranges(range(2 * layers.start, 2 * layers.stop), turn.columns, row, convert.fetch_ranges(turn))


async def first(requests: AsyncIterator[Result | codec.Frame]) -> Result:
    """The header that a stream begins with, or the next part of it. Raises INVALID for anything else."""
    async for request in requests:
        if isinstance(request, codec.Frame) or request.WhichOneof("part") != "header":  # type: ignore[attr-defined]
            break
        refuse_oversized(request)  # type: ignore[arg-type]
        return request
    raise invalid("header", "the stream does not begin with one", "send the header first")
