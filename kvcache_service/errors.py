"""Domain errors: one exception type with a code; rpc/errors.py maps codes to gRPC in one table."""

from __future__ import annotations

import enum


class Code(enum.Enum):
    """What went wrong. Names equal the ErrorCode enum of the protocol."""

    INVALID = enum.auto()
    MISS = enum.auto()
    LEASE_EXPIRED = enum.auto()
    STALE_BOOT = enum.auto()
    FINGERPRINT_MISMATCH = enum.auto()
    CHECKSUM = enum.auto()
    QUOTA = enum.auto()
    BUSY = enum.auto()
    UNSUPPORTED_ROPE = enum.auto()
    UNSUPPORTED_MODEL = enum.auto()
    UNKNOWN_MODEL = enum.auto()
    UNKNOWN_TEMPLATE = enum.auto()
    UNKNOWN_TURN = enum.auto()
    TEMPLATE_MISMATCH = enum.auto()
    CONFLICT = enum.auto()
    STATE = enum.auto()
    CATALOG = enum.auto()
    INTERNAL = enum.auto()
    UNAUTHENTICATED = enum.auto()
    PERMISSION = enum.auto()
    DRAINING = enum.auto()


class KVCacheError(Exception):
    """A refused request.

    field: the request field at fault ("" when none is); fix: what the caller can do. retry_after: seconds until the same call
    may succeed, where that is known.
    Whatever raises it has changed nothing.
    """

    def __init__(self, code: Code, message: str, *, field: str = "", fix: str = "", retry_after: float = 0.0) -> None:
        super().__init__(f"{message}{f' ({field})' if field else ''}{f'; {fix}' if fix else ''}")
        self.code = code
        self.field = field
        self.fix = fix
        self.retry_after = retry_after


def invalid(field: str, message: str, fix: str) -> KVCacheError:
    """The commonest refusal: a bad value in `field`."""
    return KVCacheError(Code.INVALID, message, field=field, fix=fix)
