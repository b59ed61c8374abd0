"""For admins: what a service's pools hold, and what becomes of it."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import grpc
from kvcache_proto.v1 import codec, kvcache_pb2_grpc
from kvcache_proto.v1 import kvcache_pb2 as pb
from kvcache_proto.v1.tensors import frames

from kvcache_client.credentials import PLAIN, Credentials
from kvcache_client.errors import from_rpc

Reply = TypeVar("Reply")


class AdminClient:
    """Speaks with the Admin service of one service, on its `admin_listen`. Every call raises CacheError.

    model_id, template_id and sample may be given by their first characters; "" means any. timeout: seconds of one call.
    """

    def __init__(self, target: str, *, credentials: Credentials = PLAIN, timeout: float = 60.0) -> None:
        self._channel = credentials.channel(target, ())
        self._stub = kvcache_pb2_grpc.AdminStub(self._channel)
        self._export = self._channel.unary_stream(
            "/kvcache.v1.Admin/Export",
            request_serializer=pb.ExportRequest.SerializeToString,
            response_deserializer=codec.deserializer(pb.ExportReply),
        )
        self._import = self._channel.stream_unary(
            "/kvcache.v1.Admin/Import",
            request_serializer=codec.serialize,
            response_deserializer=pb.ImportReply.FromString,
        )
        self._timeout = timeout

    def anchors(self, **selection: str) -> Iterator[pb.PooledSample]:
        """Samples in pools; selection: model_id, template_id, placeholder, sample."""
        try:
            for batch in self._stub.ListAnchors(pb.ListAnchorsRequest(selection=pb.AnchorSelection(**selection))):
                yield from batch.samples
        except grpc.RpcError as error:
            raise from_rpc(error) from error

    def delete(self, **selection: str) -> pb.DeleteAnchorsReply:
        """Forget samples; see anchors."""
        return self._call(self._stub.DeleteAnchors, pb.DeleteAnchorsRequest(selection=pb.AnchorSelection(**selection)))

    def pin(self, pin: str, **selection: str) -> int:
        """Keep samples "none", "soft" (evicted last) or "hard" (never evicted) from now on; returns how many."""
        chosen = pb.AnchorSelection(**selection)
        reply: pb.PinAnchorsReply = self._call(
            self._stub.PinAnchors, pb.PinAnchorsRequest(selection=chosen, pin=f"PIN_{pin.upper()}")
        )
        return reply.samples

    def clear(self, model_id: str = "") -> pb.ClearReply:
        """Forget all that was stored and learned, of one model or of all."""
        return self._call(self._stub.Clear, pb.ClearRequest(model_id=model_id))

    def quotas(self) -> list[pb.TenantQuotas]:
        """What tenants hold and may hold: the caller's own, or all for an operator."""
        reply: pb.QuotasReply = self._call(self._stub.Quotas, pb.QuotasRequest())
        return list(reply.tenants)

    def drain(self) -> int:
        """End the service, an operator's call; returns the turns that are still open."""
        reply: pb.DrainReply = self._call(self._stub.Drain, pb.DrainRequest())
        return reply.open_turns

    def export(self, path: Path, model_id: str = "") -> Iterator[pb.RecordHeader]:
        """Write what was learned to a tar file of safetensors, record after record. The file is there when the last one is."""
        unfinished = path.with_name(f"{path.name}.part")
        try:
            with tarfile.open(unfinished, "w") as archive:
                for header, data in self._records(model_id):
                    entry = tarfile.TarInfo(header.name)
                    entry.size = len(data)
                    archive.addfile(entry, BytesIO(data))
                    yield header
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def import_(self, path: Path) -> Iterator[tuple[str, pb.ImportReply]]:
        """Give the records of an exported file to the service, each with what was new of it. Raises tarfile.ReadError too."""
        with tarfile.open(path) as archive:
            for entry in archive:
                file = archive.extractfile(entry)
                if file is not None:
                    yield entry.name, self._call(self._import, _requests(entry.name, file.read()))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _records(self, model_id: str) -> Iterator[tuple[pb.RecordHeader, bytearray]]:
        header, data = None, bytearray()
        try:
            for part in self._export(pb.ExportRequest(model_id=model_id)):
                if isinstance(part, codec.Frame):
                    data += part.data
                else:
                    header, data = part.header, bytearray()
                if header is not None and len(data) == header.bytes:
                    yield header, data
        except grpc.RpcError as error:
            raise from_rpc(error) from error

    def _call(self, rpc: Callable[..., Reply], request: Any) -> Reply:
        try:
            return rpc(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise from_rpc(error) from error


def _requests(name: str, data: bytes) -> Iterator[pb.ImportRequest | bytes]:
    yield pb.ImportRequest(header=pb.RecordHeader(name=name, bytes=len(data)))
    yield from frames(pb.ImportRequest, memoryview(data), [(0, len(data))])
