"""What one tenant may hold at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.tenants import TenantReport
from kvcache_service.tiers.host import HostTier

_RETRY_SECONDS = 1.0  # what is full may have room by then


@dataclass(frozen=True)
class Quotas:
    """None: no limit."""

    sessions: int | None = None
    turns: int | None = None
    templates: int | None = None
    models: int | None = None


def limits(quotas: Quotas, tier: HostTier) -> dict[str, int | None]:
    """What one tenant may hold, by the names of QUOTAS."""
    return {name: getattr(quotas, name) for name in ("sessions", "turns", "templates", "models")} | {"host_bytes": tier.share}


def reports(
    quotas: Quotas, tier: HostTier, sessions: Iterable[str], turns: Iterable[str], templates: Iterable[str], models: Iterable[str]
) -> list[TenantReport]:
    """What every tenant holds. sessions, turns, templates, models: the owner of each."""
    held = {"sessions": Counter(sessions), "turns": Counter(turns), "templates": Counter(templates), "models": Counter(models)}
    held["host_bytes"] = Counter(tier.owned())
    most = {name: limit for name, limit in limits(quotas, tier).items() if limit}
    return [
        TenantReport(
            tenant,
            {name: count[tenant] for name, count in held.items()},
            {name: count[tenant] / most[name] if name in most else 0.0 for name, count in held.items()},
        )
        for tenant in set[str]().union(*held.values())
    ]


def refuse_more(quota: str, limit: int | None, mine: Iterable[bool], what: str, fix: str) -> None:
    """Raises BUSY when as many of `mine` are true as the limit allows. Without a limit nothing is counted."""
    held = sum(mine) if limit is not None else 0
    if limit is not None and held >= limit:
        raise KVCacheError(Code.BUSY, f"{held} {what} of {limit}", fix=f"{fix}; or raise {quota}", retry_after=_RETRY_SECONDS)
