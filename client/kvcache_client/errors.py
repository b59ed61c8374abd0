"""What the client raises: one exception, with the service's own code, field and fix."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from kvcache_proto.v1 import kvcache_pb2 as pb

_DETAIL_KEY, _RETRY_KEY = "kvcache-error-bin", "retry-after-ms"


class CacheError(Exception):
    """A cache fault. Adapters turn it into a dense prefill; it never has to end an inference.

    code: name from the ErrorCode enum, or the gRPC status when the service did not answer.
    retry: the same call may succeed later; otherwise prefill. retry_after: seconds, where the service knows when.
    """

    def __init__(
        self, code: str, message: str, *, field: str = "", fix: str = "", retry: bool = False, retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.fix = fix
        self.retry = retry
        self.retry_after = retry_after

    @property
    def silent(self) -> bool:
        """True when the service did not answer at all."""
        return self.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def from_rpc(error: grpc.RpcError) -> CacheError:
    """The service's ErrorDetail where it sent one."""
    pairs: Iterable[tuple[str, bytes | str]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    metadata = dict(pairs)
    status = error.code().name
    if _DETAIL_KEY in metadata:
        detail = pb.ErrorDetail.FromString(metadata[_DETAIL_KEY])  # type: ignore[arg-type]
        name = pb.ErrorCode.Name(detail.code).removeprefix("ERROR_CODE_")
        wait = int(metadata.get(_RETRY_KEY, 0)) / 1000
        return CacheError(name, error.details() or name, field=detail.field, fix=detail.fix, retry=detail.retry, retry_after=wait)
    return CacheError(status, error.details() or status, fix="prefill; check that the service runs", retry=True)
