"""Metrics with a `tenant` label: of a bounded number of tenants by name, of all others together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

OTHERS = "_others"  # no tenant can be named so
QUOTAS = ("sessions", "turns", "templates", "models", "host_bytes")
# name -> (help, which of QUOTAS)
TENANT_GAUGES = {
    "kvcache_tenant_sessions": ("Attached sessions of a tenant", "sessions"),
    "kvcache_tenant_open_turns": ("Open turns of a tenant", "turns"),
    "kvcache_tenant_host_bytes": ("Host tier bytes of a tenant", "host_bytes"),
}
_COUNTERS = {  # the fields of _Series
    "calls": "Calls of a tenant",
    "refused": "Calls of a tenant that were refused",
    "prompt_tokens": "Prompt tokens of a tenant's settled turns",
    "reused_tokens": "Of these, what no worker had to compute",
}
QUOTA_GAUGE = "kvcache_tenant_quota_share"


@dataclass(frozen=True)
class TenantReport:
    """What a tenant holds of each of QUOTAS, and what share of it that is; 0.0 where there is no limit."""

    tenant: str
    held: Mapping[str, int]
    shares: Mapping[str, float]


class _Series(NamedTuple):
    """The counters of one label."""

    label: str
    calls: Counter
    refused: Counter
    prompt_tokens: Counter
    reused_tokens: Counter


class TenantMetrics:
    """Thread-safe. most: tenants that are named; whoever comes after them is one of the others."""

    def __init__(self, registry: CollectorRegistry, most: int) -> None:
        self._registry = registry
        self._most = most
        self._lock = threading.Lock()
        self._counters = [
            Counter(f"kvcache_tenant_{name}", text, ["tenant"], registry=registry) for name, text in _COUNTERS.items()
        ]
        self._others = self._begin(OTHERS)
        self._named: dict[str, _Series] = {}

    def name(self, tenants: Iterable[str]) -> None:
        """Tenants that are known before their first call; their series stand at zero."""
        for tenant in sorted(tenants):
            self._of(tenant)

    def call(self, tenant: str) -> None:
        self._of(tenant).calls.inc()

    def refused(self, tenant: str) -> None:
        self._of(tenant).refused.inc()

    def turn(self, tenant: str, prompt_tokens: int, reused_tokens: int) -> None:
        series = self._of(tenant)
        series.prompt_tokens.inc(prompt_tokens)
        series.reused_tokens.inc(reused_tokens)

    def watch(self, read: Callable[[], Iterable[TenantReport]]) -> None:
        """Serve TENANT_GAUGES and QUOTA_GAUGE from `read`, called at every scrape."""
        self._registry.register(_Holdings(lambda: self._folded(read())))

    def _of(self, tenant: str) -> _Series:
        found = self._named.get(tenant)
        if found is not None:
            return found
        with self._lock:
            if tenant not in self._named and len(self._named) < self._most:
                self._named[tenant] = self._begin(tenant)
            return self._named.get(tenant, self._others)

    def _begin(self, label: str) -> _Series:
        return _Series(label, *(counter.labels(label) for counter in self._counters))

    def _folded(self, reports: Iterable[TenantReport]) -> list[TenantReport]:
        """One for every label: sums of the others, and the largest of their shares."""
        labelled = [(self._of(report.tenant).label, report) for report in reports]
        with self._lock:
            none = dict.fromkeys(QUOTAS, 0), dict.fromkeys(QUOTAS, 0.0)
            found = {label: TenantReport(label, *none) for label in (*sorted(self._named), OTHERS)}
        for label, report in labelled:
            sofar = found[label]
            found[label] = TenantReport(
                label,
                {quota: count + report.held[quota] for quota, count in sofar.held.items()},
                {quota: max(share, report.shares[quota]) for quota, share in sofar.shares.items()},
            )
        return list(found.values())


class _Holdings(Collector):
    def __init__(self, read: Callable[[], list[TenantReport]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        reports = self._read()
        for name, (text, quota) in TENANT_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["tenant"])
            for report in reports:
                family.add_metric([report.tenant], report.held[quota])
            yield family
        shares = GaugeMetricFamily(QUOTA_GAUGE, "Share of a quota that is in use; 0 without a limit", labels=["tenant", "quota"])
        for report in reports:
            for quota, share in report.shares.items():
                shares.add_metric([report.tenant, quota], share)
        yield shares
