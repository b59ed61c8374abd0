"""What one tenant may hold at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache_service.errors import Code, KVCacheError

_RETRY_SECONDS = 1.0  # what is full may have room by then


@dataclass(frozen=True)
class Quotas:
    """None: no limit."""

    sessions: int | None = None
    turns: int | None = None
    templates: int | None = None
    models: int | None = None


def refuse_more(quota: str, limit: int | None, mine: Iterable[bool], what: str, fix: str) -> None:
    """Raises BUSY when as many of `mine` are true as the limit allows. Without a limit nothing is counted."""
    held = sum(mine) if limit is not None else 0
    if limit is not None and held >= limit:
        raise KVCacheError(Code.BUSY, f"{held} {what} of {limit}", fix=f"{fix}; or raise {quota}", retry_after=_RETRY_SECONDS)
