"""One table from domain codes to gRPC, one context manager that translates."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
from grpc import StatusCode
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.telemetry import Telemetry

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)
_MAX_TEXT = 300  # characters of an error's texts: trailing metadata beyond 8 KiB would not arrive

DETAIL_KEY, RETRY_KEY = "kvcache-error-bin", "retry-after-ms"

# code -> (gRPC status, may the same call succeed later?). False means: prefill.
STATUS: dict[Code, tuple[StatusCode, bool]] = {
    Code.INVALID: (StatusCode.INVALID_ARGUMENT, False),
    Code.MISS: (StatusCode.NOT_FOUND, False),
    Code.LEASE_EXPIRED: (StatusCode.FAILED_PRECONDITION, False),
    Code.STALE_BOOT: (StatusCode.FAILED_PRECONDITION, True),
    Code.FINGERPRINT_MISMATCH: (StatusCode.FAILED_PRECONDITION, False),
    Code.CHECKSUM: (StatusCode.DATA_LOSS, True),
    Code.QUOTA: (StatusCode.RESOURCE_EXHAUSTED, True),
    Code.BUSY: (StatusCode.RESOURCE_EXHAUSTED, True),
    Code.UNSUPPORTED_ROPE: (StatusCode.UNIMPLEMENTED, False),
    Code.UNSUPPORTED_MODEL: (StatusCode.UNIMPLEMENTED, False),
    Code.UNKNOWN_MODEL: (StatusCode.FAILED_PRECONDITION, True),
    Code.UNKNOWN_TEMPLATE: (StatusCode.FAILED_PRECONDITION, True),
    Code.UNKNOWN_TURN: (StatusCode.NOT_FOUND, False),
    Code.TEMPLATE_MISMATCH: (StatusCode.INVALID_ARGUMENT, False),
    Code.CONFLICT: (StatusCode.ALREADY_EXISTS, False),
    Code.STATE: (StatusCode.FAILED_PRECONDITION, False),
    Code.CATALOG: (StatusCode.UNAVAILABLE, True),
    Code.INTERNAL: (StatusCode.INTERNAL, False),
    Code.UNAUTHENTICATED: (StatusCode.UNAUTHENTICATED, False),
    Code.PERMISSION: (StatusCode.PERMISSION_DENIED, False),
    Code.DRAINING: (StatusCode.UNAVAILABLE, True),
}

# What spans show as errors; others are the caller's.
_FAULTS = frozenset({StatusCode.INTERNAL, StatusCode.UNAVAILABLE, StatusCode.UNIMPLEMENTED, StatusCode.DATA_LOSS})


@asynccontextmanager
async def translated(context: Context, telemetry: Telemetry) -> AsyncIterator[None]:
    """Domain errors become a status with an ErrorDetail; anything else is logged, counted and INTERNAL."""
    try:
        yield
    except KVCacheError as error:
        _let_go(error)
        await _abort(context, telemetry, error)
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except asyncio.CancelledError as error:
        _let_go(error)
        raise
    except Exception as error:
        log.exception("unexpected failure in a call")
        _let_go(error)
        await _abort(context, telemetry, KVCacheError(Code.INTERNAL, "internal error", fix="prefill; see the service's log"))


def _let_go(error: BaseException | None) -> None:
    """The frames of a failure would hold received KV until the garbage collector comes by."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


async def _abort(context: Context, telemetry: Telemetry, error: KVCacheError) -> None:
    code = error.code.name.lower()
    telemetry.errors.labels(code).inc()
    log.debug("refused: %s", code, extra={"code": code})
    status, retry = STATUS[error.code]
    telemetry.tracing.refused(code, status.value[0], fault=status in _FAULTS)
    detail = pb.ErrorDetail(
        code=f"ERROR_CODE_{error.code.name}", field=error.field[:_MAX_TEXT], fix=error.fix[:_MAX_TEXT], retry=retry
    )
    trailing: list[tuple[str, str | bytes]] = [(DETAIL_KEY, detail.SerializeToString())]
    if error.retry_after:
        trailing.append((RETRY_KEY, str(math.ceil(1000 * error.retry_after))))
    await context.abort(status, str(error)[:_MAX_TEXT], tuple(trailing))
