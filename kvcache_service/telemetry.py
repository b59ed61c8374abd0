"""Every metric of the service, on one registry. Documented in docs/metrics.md; a test compares both. Spans go along with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache_service import logs
from kvcache_service.tenants import TenantMetrics
from kvcache_service.tracing import Tracing

OUTCOMES = ("reuse", "partial", "dense", "aborted")
_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_KL = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0)
_TTFT = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)

# Gauges are read from the live objects at scrape time: name -> help.
GAUGES = {
    "kvcache_sessions": "Attached sessions",
    "kvcache_open_turns": "Turns neither settled nor released",
    "kvcache_leases": "Leases on host tensors",
    "kvcache_leased_bytes": "Host bytes pinned by leases",
    "kvcache_host_used_bytes": "Host tier bytes in use, what is being received included",
    "kvcache_host_budget_bytes": "Host tier budget",
    "kvcache_host_pinned_bytes": "Host tier bytes under soft and hard pins",
    "kvcache_host_largest_free_bytes": "Largest free block of the host tier",
    "kvcache_host_evictions": "Tensors evicted from the host tier since start",
    "kvcache_device_used_bytes": "GPU memory in use; 0 without a GPU",
    "kvcache_device_budget_bytes": "GPU memory budget; 0 without a GPU",
    "kvcache_device_evictions": "Tensors evicted from the GPU since start",
    "kvcache_pageable_bytes": "Host memory that the GPU copies from and to, but that the system would not pin",
    "kvcache_disk_used_bytes": "Disk tier bytes in use",
    "kvcache_disk_budget_bytes": "Disk tier budget; 0 without a disk tier",
    "kvcache_disk_pending_bytes": "Bytes that wait to be written to disk",
    "kvcache_disk_pending_writes": "Blobs and records that wait to be written to disk",
    "kvcache_disk_refused": "Blobs and records that the disk has not taken since start",
    "kvcache_disk_damaged": "Damaged files that the disk tier has dropped since start",
    "kvcache_buffer_bytes": "Session buffer bytes, shared memory and private",
    "kvcache_pools": "Anchor pools",
    "kvcache_anchors": "Anchors over all pools",
    "kvcache_slots": "Slots with an offset predictor",
    "kvcache_slots_off": "Slots that their audits switched to dense",
    "kvcache_templates_calibrated": "Templates whose calibration allows reuse",
    "kvcache_predictor_bytes": "Bytes of predictors and fixed-segment means (guarded)",
    "kvcache_anchor_bytes": "Bytes of anchors: bases and full offsets (paper)",
    "kvcache_catalog_up": "1 when the last metadata call succeeded",
}


# Audited quality by slot: name -> (help, field of SlotReport).
SLOT_GAUGES = {
    "kvcache_slot_audits": ("Audits in the window of a slot", "audits"),
    "kvcache_slot_audit_kl": ("Mean KL to dense over the window of a slot, nats", "kl"),
    "kvcache_slot_audit_top1": ("Mean top-1 agreement over the window of a slot", "top1"),
    "kvcache_slot_off": ("1 when audits switched the slot to dense", "off"),
}
MAX_SLOTS = 256


@dataclass(frozen=True)
class SlotReport:
    """One slot's audits. template: the first characters of its id."""

    template: str
    placeholder: str
    audits: float
    kl: float
    top1: float
    off: float


@dataclass(frozen=True)
class TurnReport:
    """One finished turn, attributed to exactly one outcome."""

    tenant: str
    outcome: str
    policy: str
    reason: str  # "none" when nothing fell back
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    ttft: float


class Telemetry:
    """Counters and histograms; all series exist at zero before the first turn."""

    def __init__(
        self,
        reasons: Iterable[str],
        policies: Iterable[str],
        codes: Iterable[str],
        *,
        tenants: int,
        tracing: Tracing | None = None,
    ) -> None:
        """tenants: how many of them metrics name."""
        self.tracing = tracing or Tracing()
        self.registry = CollectorRegistry()
        self.tenants = TenantMetrics(self.registry, tenants)
        registry = self.registry
        policies = tuple(policies)
        self._turns = Counter("kvcache_turns", "Finished turns by outcome", ["outcome", "policy"], registry=registry)
        self._fallbacks = Counter(
            "kvcache_fallbacks", "Finished turns with a dense segment, by reason", ["reason"], registry=registry
        )
        self._prompt = Counter("kvcache_prompt_tokens", "Prompt tokens of settled turns", registry=registry)
        self._reused = Counter("kvcache_reused_tokens", "Prompt tokens that no worker had to compute", registry=registry)
        self._recomputed = Counter(
            "kvcache_recomputed_tokens", "Tokens of reused segments that were recomputed", registry=registry
        )
        self._ttft = Histogram(
            "kvcache_ttft_seconds", "TTFT as workers measured it", ["outcome"], buckets=_TTFT, registry=registry
        )
        self.match = Histogram("kvcache_match_seconds", "Plan and anchor match of one turn", buckets=_FAST, registry=registry)
        self.assembly = Histogram("kvcache_assembly_seconds", "Align and approximate one turn", buckets=_FAST, registry=registry)
        self.fetch = Histogram(
            "kvcache_fetch_seconds", "Fetch of one turn as workers measured it", buckets=_FAST, registry=registry
        )
        self.settle = Histogram("kvcache_settle_seconds", "Verify and update of one turn", buckets=_FAST, registry=registry)
        self.candidates = Counter("kvcache_candidates", "Candidate anchors by result", ["result"], registry=registry)
        self.commit_failures = Counter("kvcache_catalog_commit_failures", "Turns whose pool changes were lost", registry=registry)
        self.errors = Counter("kvcache_errors", "Refused calls by error code", ["code"], registry=registry)
        self._audit_kl = Histogram(
            "kvcache_audit_kl", "Mean KL to dense of audited turns, nats", ["policy"], buckets=_KL, registry=registry
        )
        self._audit_top1 = Counter(
            "kvcache_audit_top1", "Sum of the top-1 agreement of audited turns", ["policy"], registry=registry
        )
        for policy in ("guarded", "reposition"):
            self._audit_kl.labels(policy)
            self._audit_top1.labels(policy)
        for outcome in OUTCOMES:
            self._ttft.labels(outcome)
            for policy in policies:
                self._turns.labels(outcome, policy)
        for reason in reasons:
            self._fallbacks.labels(reason)
        for result in ("accepted", "duplicate", "refused"):
            self.candidates.labels(result)
        for code in codes:
            self.errors.labels(code)

    def turn(self, report: TurnReport) -> None:
        self.tracing.note(
            outcome=report.outcome,
            reason=report.reason,
            reused_tokens=report.reused_tokens,
            recomputed_tokens=report.recomputed_tokens,
        )
        self._turns.labels(report.outcome, report.policy).inc()
        if report.reason != "none":
            self._fallbacks.labels(report.reason).inc()
        if report.outcome == "aborted":
            return
        self._prompt.inc(report.prompt_tokens)
        self._reused.inc(report.reused_tokens)
        self._recomputed.inc(report.recomputed_tokens)
        self.tenants.turn(report.tenant, report.prompt_tokens, report.reused_tokens)
        if report.ttft > 0:
            self._ttft.labels(report.outcome).observe(report.ttft)

    def about(self, *, method: str = "", tenant: str = "", session_id: str = "", turn_id: str = "") -> None:
        """What the current call is about, for its log lines and its span."""
        logs.about(method=method, tenant=tenant, session_id=session_id, turn_id=turn_id)
        if self.tracing.on:
            self.tracing.note(**logs.known())

    def audited(self, policy: str, kl: float, top1: float) -> None:
        """One trial beside dense."""
        self._audit_kl.labels(policy).observe(kl)
        self._audit_top1.labels(policy).inc(top1)

    def watch(self, read: Callable[[], dict[str, float]]) -> None:
        """Serve GAUGES from `read`, called at every scrape."""
        self.registry.register(_Gauges(read))

    def watch_slots(self, read: Callable[[], Sequence[SlotReport]]) -> None:
        """Serve SLOT_GAUGES from `read`, called at every scrape; at most MAX_SLOTS slots, so that cardinality is bounded."""
        self.registry.register(_SlotGauges(read))


class _Gauges(Collector):
    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        values = self._read()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=values[name])


class _SlotGauges(Collector):
    def __init__(self, read: Callable[[], Sequence[SlotReport]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        slots = self._read()[:MAX_SLOTS]
        for name, (text, field) in SLOT_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["template", "placeholder"])
            for slot in slots:
                family.add_metric([slot.template, slot.placeholder], getattr(slot, field))
            yield family
