"""The service for admins: pools, what was learned, quotas, the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import grpc
import torch
from kvcache_proto.v1 import codec
from kvcache_proto.v1 import kvcache_pb2 as pb
from kvcache_proto.v1.tensors import frames

from kvcache_service.engine.engine import Engine
from kvcache_service.errors import invalid
from kvcache_service.rpc import convert
from kvcache_service.rpc.callers import Caller
from kvcache_service.rpc.servicers import Servicer, first
from kvcache_service.telemetry import Telemetry
from kvcache_service.tenants import TenantReport

_BATCH = 512  # samples of one message

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(Servicer):
    """drain: begins the end of the process, as SIGTERM does."""

    def __init__(self, engine: Engine, telemetry: Telemetry, executor: Executor, drain: Callable[[], None]) -> None:
        super().__init__(engine, telemetry, executor)
        self._drain = drain

    async def ListAnchors(
        self, request: pb.ListAnchorsRequest, context: Context, caller: Caller
    ) -> AsyncIterator[pb.ListAnchorsReply]:
        async with self._translated(context):
            found = await self._run(self._engine.pools.select, caller.tenant, convert.selection(request.selection))
            for start in range(0, len(found), _BATCH):
                yield pb.ListAnchorsReply(samples=map(convert.pooled_sample, found[start : start + _BATCH]))

    async def DeleteAnchors(self, request: pb.DeleteAnchorsRequest, context: Context, caller: Caller) -> pb.DeleteAnchorsReply:
        async with self._translated(context):
            gone = await self._run(self._engine.pools.delete, caller.tenant, convert.selection(request.selection))
            return pb.DeleteAnchorsReply(samples=len(gone), host_bytes=sum(holding.nbytes for holding in gone))

    async def PinAnchors(self, request: pb.PinAnchorsRequest, context: Context, caller: Caller) -> pb.PinAnchorsReply:
        async with self._translated(context):
            pin = convert.pin(request.pin)
            if pin is None:
                raise invalid("pin", "not said", "send NONE, SOFT or HARD")
            return pb.PinAnchorsReply(
                samples=await self._run(self._engine.pools.pin, caller.tenant, convert.selection(request.selection), pin)
            )

    async def Clear(self, request: pb.ClearRequest, context: Context, caller: Caller) -> pb.ClearReply:
        async with self._translated(context):
            models, freed = await self._run(self._engine.pools.clear, caller.tenant, request.model_id)
            return pb.ClearReply(models=models, host_bytes=freed)

    async def Export(self, request: pb.ExportRequest, context: Context, caller: Caller) -> AsyncIterator[pb.ExportReply | bytes]:
        async with self._translated(context):
            records = await self._run(self._engine.archive.records, caller.tenant, request.model_id)
            for record in records:
                data = await self._run(record.read)
                if not data:
                    continue
                yield pb.ExportReply(header=pb.RecordHeader(name=record.name, bytes=len(data), records=len(records)))
                async for frame in self._ahead(frames(pb.ExportReply, memoryview(data), [(0, len(data))])):
                    yield frame

    async def Import(
        self, requests: AsyncIterator[pb.ImportRequest | codec.Frame], context: Context, caller: Caller
    ) -> pb.ImportReply:
        async with self._translated(context):
            header = (await first(requests)).header
            received = await self._received(requests, (header.bytes,), torch.uint8)
            taken = await self._run(lambda: self._engine.archive.take(caller.tenant, received.numpy().tobytes()))
            return pb.ImportReply(**taken, known=not taken)

    async def Quotas(self, request: pb.QuotasRequest, context: Context, caller: Caller) -> pb.QuotasReply:
        async with self._translated(context):
            limits = self._engine.limits()
            reports = {report.tenant: report for report in await self._run(self._engine.tenants)}
            reports.setdefault(caller.tenant, TenantReport(caller.tenant, dict.fromkeys(limits, 0), {}))
            shown = [name for name in sorted(reports) if caller.operator or name == caller.tenant]
            return pb.QuotasReply(tenants=[convert.tenant_quotas(reports[name], limits) for name in shown])

    async def Drain(self, request: pb.DrainRequest, context: Context, caller: Caller) -> pb.DrainReply:
        async with self._translated(context):
            self._drain()
            return pb.DrainReply(open_turns=self._engine.open_turns)
