"""What the client raises: one exception, with the service's own code, field and fix."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from kvcache_proto.v1 import kvcache_pb2 as pb

_DETAIL_KEY = "kvcache-error-bin"


class CacheError(Exception):
    """A cache fault. Adapters turn it into a dense prefill; it never has to end an inference.

    code: name from the ErrorCode enum, or the gRPC status when the service did not answer.
    retry: the same call may succeed later; otherwise prefill.
    """

    def __init__(self, code: str, message: str, *, field: str = "", fix: str = "", retry: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.fix = fix
        self.retry = retry

    @property
    def silent(self) -> bool:
        """True when the service did not answer at all."""
        return self.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def from_rpc(error: grpc.RpcError) -> CacheError:
    """The service's ErrorDetail where it sent one."""
    metadata: Iterable[tuple[str, bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in metadata:
        if key == _DETAIL_KEY:
            detail = pb.ErrorDetail.FromString(value)
            name = pb.ErrorCode.Name(detail.code).removeprefix("ERROR_CODE_")
            return CacheError(name, error.details() or name, field=detail.field, fix=detail.fix, retry=detail.retry)
    status = error.code().name
    return CacheError(status, error.details() or status, fix="prefill; check that the service runs", retry=True)
