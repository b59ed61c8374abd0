"""When reuse is trusted: calibrations, audits and the slots that left the target. One object beside the engine."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache_service.catalog.keys import Group
from kvcache_service.catalog.store import Catalog
from kvcache_service.engine.durable import Durable
from kvcache_service.engine.plan import Mapped, Plan, Reason
from kvcache_service.engine.planning import Gate
from kvcache_service.engine.records import Slot
from kvcache_service.engine.sessions import Settlement, Turn, Verdict
from kvcache_service.errors import Code, KVCacheError, invalid
from kvcache_service.predictor import RidgeStatistics
from kvcache_service.prompt import Placeholder, Policy, Template
from kvcache_service.quality import MIN_AUDITS, Audit, Calibration, QualityBook, SlotQuality, Target, calibrate
from kvcache_service.telemetry import SlotReport, Telemetry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrustSettings:
    """target: of calibrations that name none; *_rate: shares of turns that workers are asked to audit;
    calibration_audits: after so many a template calibrates itself; residual_limit: where no calibration is required."""

    target: Target
    audit_rate: float
    trial_rate: float
    calibration_audits: int
    residual_limit: float


@dataclass(frozen=True)
class SlotStatus:
    slot: Slot
    samples: int
    error: float
    nbytes: int
    quality: SlotQuality


@dataclass(frozen=True)
class TemplateStatus:
    """One template, its slots with a predictor, and what is known of its quality. audits: usable for a calibration."""

    template: Template
    slots: tuple[SlotStatus, ...]
    calibration: Calibration | None
    audits: int


@dataclass(frozen=True)
class ProbeLimits:
    """Where the worker falls back: mean probe residual, and that over the residual of re-positioned KV."""

    residual: float
    ratio: float


class Trust:
    """Thread-safe. Templates are named by (tenant, template id)."""

    def __init__(
        self, settings: TrustSettings, catalog: Catalog, durable: Durable, telemetry: Telemetry, draw: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._durable = durable
        self._telemetry = telemetry
        self._draw = draw
        self._lock = threading.Lock()
        self._book = QualityBook()
        self._lessons: set[tuple[str, str]] = set()

    def load(self, tenant: str, template: Template, record: str | None) -> None:
        """What an earlier boot found; its key carries model and template, so that neither can have changed.

        record: what this node kept of it. The catalog's calibration is newer, where it has one; else it gets ours back.
        """
        key, group = (tenant, template.template_id), Group(tenant, template.model_id)
        text = self._catalog.calibration(group, template.template_id)
        try:
            with self._lock:
                if text is not None:
                    self._book.calibrations.setdefault(key, Calibration.from_json(text))
                if record is not None:
                    self._book.restore(key, record)
                known = self._book.calibrations.get(key)
        except (ValueError, KeyError, TypeError):
            log.warning("calibration of %s is not readable; calibrate again", template.template_id[:12])
            return
        if text is None and known is not None:
            try:
                self._catalog.put_calibration(group, template.template_id, known.to_json())
            except KVCacheError as error:
                log.warning("calibration not stored: %s", error)

    def dump(self, tenant: str, template: Template) -> str:
        """All that is known of a template, as JSON."""
        with self._lock:
            return self._book.dump((tenant, template.template_id))

    def adopt(self, tenant: str, template: Template, record: str) -> bool:
        """Take in the dump of another service, where nothing is known here yet; False where something is.

        Raises ValueError for a record that does not fit the template, CATALOG when its calibration could not be stored.
        """
        key = (tenant, template.template_id)
        found = QualityBook()
        try:
            found.restore(key, record)
        except (KeyError, TypeError) as error:
            raise ValueError(f"quality is of another layout: {error}") from error
        audited = {ordinal for _, _, ordinal in found.slots()} | found.off(key)
        if not audited <= {i for i, segment in enumerate(template.segments) if isinstance(segment, Placeholder)}:
            raise ValueError("quality names segments that are no placeholders of the template")
        with self._lock:
            if key in self._book.calibrations or self._book.audits(key) or not (found.audits(key) or found.calibrations):
                return False
        calibration = found.calibrations.get(key)
        if calibration is not None:
            self._catalog.put_calibration(Group(tenant, template.model_id), template.template_id, calibration.to_json())
        with self._lock:
            self._book.restore(key, record)
        self._keep(tenant, template)
        return True

    def forget(self, tenant: str, templates: Sequence[Template]) -> None:
        """Drop calibrations and audits of templates of one model. Raises CATALOG, and nothing has changed then."""
        for group in {Group(tenant, template.model_id) for template in templates}:
            self._catalog.drop_calibrations(group, [t.template_id for t in templates if t.model_id == group.model_id])
        with self._lock:
            for template in templates:
                self._book.forget((tenant, template.template_id))
                self._lessons.discard((tenant, template.template_id))

    def _keep(self, tenant: str, template: Template) -> None:
        self._durable.keep_quality(Group(tenant, template.model_id), template.template_id, self.dump(tenant, template))

    def gate(self, tenant: str, template_id: str) -> Gate:
        key = (tenant, template_id)
        with self._lock:
            return Gate(self._book.calibrations.get(key), self._book.off(key), key in self._lessons)

    def settled(self, turn: Turn, settlement: Settlement) -> None:
        """A turn that the probes refused makes the next one a lesson; any dense turn that taught is one."""
        key = (turn.tenant, turn.template.template_id)
        with self._lock:
            if settlement.verdict is Verdict.REJECTED and settlement.reason is Reason.RESIDUAL:
                self._lessons.add(key)
            elif settlement.verdict is Verdict.ACCEPTED and not turn.plan.approximated:
                self._lessons.discard(key)

    def probe_limits(self, turn: Turn) -> ProbeLimits:
        if turn.trial is not None:
            return ProbeLimits(math.inf, math.inf)
        calibration = self.gate(turn.tenant, turn.template.template_id).calibration
        if calibration is None:
            return ProbeLimits(self._settings.residual_limit, 1.0)
        return ProbeLimits(calibration.residual_limit, calibration.ratio_limit)

    def wants_audit(self, plan: Plan) -> bool:
        """A sample of reuse turns; and of dense turns that only wait for a verdict on their quality."""
        if plan.policy is not Policy.GUARDED:
            return False
        if plan.corrected:
            return self._draw() < self._settings.audit_rate
        return plan.reason in (Reason.UNCALIBRATED, Reason.QUALITY) and self._draw() < self._settings.trial_rate

    def audited(self, turn: Turn, settlement: Settlement) -> None:
        """Book a trial. The first calibration of a template follows by itself from enough of them."""
        plan, distance = turn.plan, settlement.distance
        if distance is None or plan.policy not in (Policy.GUARDED, Policy.REPOSITION) or not plan.approximated:
            return
        key = (turn.tenant, turn.template.template_id)
        audit = Audit(
            distance.kl,
            distance.top1,
            _signals(plan, settlement),
            reposition=plan.policy is Policy.REPOSITION,
            slots=tuple(s.span.ordinal for s in plan.corrected),
            samples=min((s.anchors for s in plan.corrected), default=0),
        )
        with self._lock:
            self._book.add(key, audit)
            first = key not in self._book.calibrations
            enough = self._book.usable_audits(key) >= max(MIN_AUDITS, self._settings.calibration_audits)
        self._keep(turn.tenant, turn.template)
        self._telemetry.audited(plan.policy.value, distance.kl, distance.top1)
        if first and enough:
            try:
                self.calibrate(turn.tenant, turn.template, None, None)
            except KVCacheError as error:
                log.warning("calibration not stored: %s", error)

    def calibrate(self, tenant: str, template: Template, kl: float | None, top1: float | None) -> Calibration:
        """Fit the template's thresholds to a target, from the audits so far, and keep them in the catalog.

        Raises STATE with too few audits and CATALOG when the record could not be stored; reuse stays as it was then.
        """
        default, key = self._settings.target, (tenant, template.template_id)
        target = Target(default.kl if kl is None else kl, default.top1 if top1 is None else top1)
        if not (0 < target.kl < math.inf):
            raise invalid("target_kl", f"{target.kl}", "send a positive number of nats")
        if not 0 < target.top1 <= 1:
            raise invalid("target_top1", f"{target.top1}", "send a share between 0 and 1")
        with self._lock:
            audits = self._book.audits(key)
        try:
            fitted = calibrate(audits, target)
        except ValueError as error:
            raise KVCacheError(
                Code.STATE,
                str(error),
                field="template_id",
                fix="run trials of this template, each settled as AUDITED; `kvcache calibrate` does it",
            ) from error
        self._catalog.put_calibration(Group(tenant, template.model_id), template.template_id, fitted.to_json())
        with self._lock:
            self._book.calibrations[key] = fitted
        self._keep(tenant, template)
        log.info("calibrated %s: usable=%s, %d audits", template.template_id[:12], fitted.usable, fitted.audits)
        return fitted

    # Views

    def status(self, tenant: str, template: Template, statistics: dict[Slot, RidgeStatistics]) -> TemplateStatus:
        """statistics: of every slot; those of this template are shown."""
        key = (tenant, template.template_id)
        with self._lock:
            slots = [
                SlotStatus(slot, found.samples, found.error, found.nbytes, self._book.slot(key, slot.ordinal))
                for slot, found in sorted(statistics.items())
                if slot.template_id == template.template_id and slot.pool.group.tenant == tenant
            ]
            return TemplateStatus(template, tuple(slots), self._book.calibrations.get(key), self._book.usable_audits(key))

    def audited_slots(self, template: Callable[[str, str], Template]) -> list[SlotReport]:
        """Quality of every slot that was audited, one row per template and placeholder."""
        rows = []
        with self._lock:
            for tenant, template_id, ordinal in self._book.slots():
                found = self._book.slot((tenant, template_id), ordinal)
                segment = template(tenant, template_id).segments[ordinal]
                assert isinstance(segment, Placeholder)
                name = f"{ordinal}:{segment.name}"
                rows.append(SlotReport(template_id[:12], name, found.audits, found.kl_mean, found.top1, float(found.off)))
        return rows

    def gauges(self) -> dict[str, float]:
        with self._lock:
            return {
                "kvcache_slots_off": self._book.slots_off,
                "kvcache_templates_calibrated": sum(c.usable for c in self._book.calibrations.values()),
            }


def _signals(plan: Plan, settlement: Settlement) -> dict[str, float]:
    """What could be known of the turn before its answer, by name."""
    probes = settlement.probes
    residual = sum(p.corrected for p in probes) / len(probes) if probes else 0.0
    unaided = sum(p.repositioned for p in probes) / len(probes) if probes else 0.0
    corrected = plan.corrected
    return {
        "residual": residual,
        "ratio": residual / unaided if unaided > 0 else 0.0,
        "novelty": max((s.novelty for s in corrected), default=0.0),
        "error": max((s.source.map.error for s in corrected if isinstance(s.source, Mapped)), default=0.0),
        "entropy": max((s.entropy for s in corrected), default=0.0),
    }
