"""Decide per segment what a turn may reuse. Reads memory and the catalog snapshot; changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvcache_service import matching
from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.catalog.store import Anchor
from kvcache_service.engine.memory import Memory
from kvcache_service.engine.plan import Action, Blended, Blending, Mapped, Plan, Reason, Repositioned, SegmentPlan, Trial
from kvcache_service.engine.records import Base, Offsets, Place, Slot
from kvcache_service.geometry import Geometry
from kvcache_service.kernels import codec, cpu
from kvcache_service.kernels.backend import Backend
from kvcache_service.kernels.codec import KV
from kvcache_service.predictor import LinearMap
from kvcache_service.prompt import Policy, Role, Span, Template, tokens_key
from kvcache_service.quality import Calibration


@dataclass(frozen=True)
class PlanSettings:
    """min_samples: verified samples before a slot is used; boundary: tokens of every placeholder that
    are recomputed and probed; trailing: tokens of the last segment that are recomputed; max_taint: cap on the taint depth of a
    base; max_error: held-out error of a predictor, relative to re-position only; gamma: the paper's gate;
    require_calibration: the guarded policy reuses nothing before its template is calibrated."""

    min_samples: int
    boundary: int
    trailing: int
    max_taint: int
    max_error: float
    gamma: float
    require_calibration: bool


@dataclass(frozen=True)
class Gate:
    """What is known of a template's quality. off: ordinals of slots that their audits switched to dense.

    lesson: probes have refused a turn, which taught nothing; the next one is planned dense, so that the pools can follow.
    """

    calibration: Calibration | None = None
    off: frozenset[int] = frozenset()
    lesson: bool = False


class Planner:
    """One turn's planning; built per turn, holds no state beyond it."""

    def __init__(
        self,
        settings: PlanSettings,
        memory: Memory,
        anchors: Callable[[PoolKey, str], Sequence[Anchor]],
        geometry: Geometry,
        tenant: str,
        template: Template,
        gate: Gate,
        backend: Backend,
        trial: Trial | None = None,
    ) -> None:
        self._backend = backend
        boundary = settings.boundary if trial is None or trial.boundary is None else trial.boundary
        trailing = settings.trailing if trial is None or trial.trailing is None else trial.trailing
        self._settings = replace(settings, boundary=boundary, trailing=max(1, trailing))
        self._memory = memory
        self._anchors = anchors
        self._geometry = geometry
        self._group = Group(tenant, template.model_id)
        self._template = template
        self._template_id = template.template_id
        self._gate = gate
        self._trial = trial
        self._blending = trial.blending if trial is not None else Blending()

    def plan(self, spans: Sequence[Span], contexts: Sequence[str], policy: Policy) -> Plan:
        """contexts: context_keys of the spans."""
        if policy is Policy.OFF:
            segments = [_dense(span, Reason.POLICY_OFF) for span in spans]
        else:
            segments = self._exact(spans, contexts)
            if self._template.role is Role.DENSE and self._trial is None:
                segments = _all_dense(segments, Reason.ROLE)
            elif policy is Policy.PAPER:
                segments = self._paper(segments)
            elif policy is Policy.REPOSITION:
                segments = self._repositioned(segments)
            elif policy is Policy.GUARDED:
                segments = self._guarded(segments)
        segments = _compute_last(segments)
        return Plan(policy, tuple(segments), contexts=contexts)

    def sources(self, spans: Sequence[Span], contexts: Sequence[str], policy: Policy) -> Iterator[str]:
        """Keys of all blobs that a plan, or what is learned from its turn, may read."""
        for span, context in zip(spans, contexts, strict=True):
            yield self._memory.exact_key(self._group, context, span.start)
            if not span.placeholder or policy is Policy.EXACT:
                continue
            for base in self._bases(span):
                yield base.key
                if policy is Policy.PAPER or self._trial is not None:
                    for held in self._known(self._slot(span, base)):
                        yield from held.offsets.keys

    def _exact(self, spans: Sequence[Span], contexts: Sequence[str]) -> list[SegmentPlan]:
        """EXACT where the KV of these tokens behind this very prefix is stored; undecided (DENSE, MISS) elsewhere."""
        first = next((s.ordinal for s in spans if s.placeholder), len(spans))
        hidden = first if self._trial is not None and self._trial.ignore_exact else len(spans)
        return [
            self._exact_segment(span, context) if span.ordinal < hidden or not span.token_ids else _dense(span, Reason.MISS)
            for span, context in zip(spans, contexts, strict=True)
        ]

    def _exact_segment(self, span: Span, context: str) -> SegmentPlan:
        if not span.token_ids:
            return SegmentPlan(span, Action.EXACT)
        key = self._memory.exact_key(self._group, context, span.start)
        base = self._kv(key)
        if base is None or base.shape[2] != len(span.token_ids):
            return _dense(span, Reason.MISS)
        return SegmentPlan(span, Action.EXACT, source=Repositioned(base), keys=frozenset({key}))

    # guarded

    def _guarded(self, segments: list[SegmentPlan]) -> list[SegmentPlan]:
        out = _decide(segments, self._guarded_placeholder, self._guarded_fixed)
        blocker = next((s.reason for s in out if s.reason in _BLOCKERS), None)
        if blocker is None and not self._vouched and any(s.action is Action.REUSE for s in out):
            calibration = self._gate.calibration
            blocker = Reason.UNCALIBRATED if calibration is None else Reason.QUALITY
        if blocker is None and self._gate.lesson and self._trial is None and any(s.corrected for s in out):
            blocker = Reason.RESIDUAL
        if blocker:
            return _all_dense(segments, blocker)  # a whole dense turn is also what the pools learn from
        return [self._recompute(s, last=s is out[-1]) for s in out]

    @property
    def _vouched(self) -> bool:
        """A calibration stands behind reuse, or nobody has to."""
        calibration = self._gate.calibration
        if self._trial is not None:
            return True
        return calibration.usable if calibration is not None else not self._settings.require_calibration

    @property
    def _mature(self) -> int:
        """Samples that a predictor needs: below what calibration has judged, nobody knows how good it is."""
        calibration, needed = self._gate.calibration, self._settings.min_samples
        return needed if self._trial is not None or calibration is None else max(needed, calibration.min_samples)

    def _guarded_placeholder(self, span: Span) -> SegmentPlan:
        if self._trial is None and span.ordinal in self._gate.off:
            return _dense(span, Reason.QUALITY)
        bases = self._bases(span)
        if not bases:
            return _dense(span, Reason.MISS)
        clean = [b for b in bases if b.taint <= self._settings.max_taint and b.covered]
        if not clean:
            return _dense(span, Reason.TAINT)
        ready = [(self._map(span, base), base) for base in clean]
        usable = [(m, b) for m, b in ready if m is not None]
        if not usable:
            return _dense(span, Reason.WARMING)
        best, base = min(usable, key=lambda pair: pair[0].error)
        if best.error > self._settings.max_error:
            return _dense(span, Reason.QUALITY)
        kv = self._kv(base.key)
        if kv is None:
            return _dense(span, Reason.MISS)
        return self._correct_or_move(span, base, kv, best)

    def _correct_or_move(self, span: Span, base: Base, kv: KV, best: LinearMap) -> SegmentPlan:
        """Correct what resembles the learned samples; a novel one is moved only, where calibration found that good enough."""
        novelty, calibration = best.novelty(_middle(kv, best)), self._gate.calibration
        plan = SegmentPlan(
            span,
            Action.REUSE,
            source=Mapped(kv, best),
            anchors=best.samples,
            taint=base.taint,
            keys=frozenset({base.key}),
            novelty=novelty,
            entropy=self._entropy(span, base, kv) if self._trial is not None else 0.0,
        )
        if self._trial is not None or calibration is None or not calibration.usable or novelty <= calibration.novelty_limit:
            return plan
        return replace(plan, source=Repositioned(kv)) if calibration.reposition else _dense(span, Reason.NOVELTY)

    def _map(self, span: Span, base: Base) -> LinearMap | None:
        statistics = self._memory.statistics.get(self._slot(span, base))
        return statistics.map if statistics is not None and statistics.samples >= self._mature else None

    def _bases(self, span: Span) -> list[Base]:
        """Of the span's sample. A base that claims more tokens than there are was imported, and is none."""
        found = self._memory.bases(self._group, tokens_key(span.token_ids))
        return [base for base in found if base.covered <= len(span.token_ids)]

    def _slot(self, span: Span, base: Base) -> Slot:
        return Slot(PoolKey(self._group, span.placeholder, base.origin), self._template_id, span.ordinal)

    def _place(self, ordinal: int) -> Place:
        return Place(self._group, self._template_id, ordinal)

    def _guarded_fixed(self, span: Span) -> SegmentPlan:
        mean = self._memory.fixed.get(self._place(span.ordinal))
        if mean is None or mean.samples < self._settings.min_samples:
            return _dense(span, Reason.WARMING)
        return SegmentPlan(span, Action.REUSE, source=Repositioned(mean.mean()), anchors=mean.samples)

    def _recompute(self, segment: SegmentPlan, *, last: bool) -> SegmentPlan:
        """Recompute the tokens that the correction changes most, the leading ones where nothing is corrected, the first of
        fixed text, which acts as an attention sink, and the last segment, which decides the first output token."""
        if segment.action is not Action.REUSE or segment.source is None:
            return segment
        span, source = segment.span, segment.source
        covered = span.start + _covered(segment)
        count = min(self._settings.boundary, covered - span.start)
        chosen = list(range(count if span.placeholder else min(count, 1)))
        if isinstance(source, Mapped):
            chosen = sorted(source.map.change(_middle(source.base, source.map)).topk(count).indices.tolist())
        probe = tuple(span.start + place for place in chosen)
        tail = range(max(span.start, span.end - self._settings.trailing) if last else covered, span.end)
        fresh = tuple(sorted({*probe, *tail, *range(covered, span.end)}))
        return replace(segment, fresh=fresh, probe=probe if segment.corrected else ())

    # reposition

    def _repositioned(self, segments: list[SegmentPlan]) -> list[SegmentPlan]:
        """No offsets: every sample from its origin, fixed segments from their first dense context."""
        out = _decide(segments, self._repositioned_placeholder, self._repositioned_fixed)
        return [self._recompute(s, last=s is out[-1]) for s in out]

    def _repositioned_placeholder(self, span: Span) -> SegmentPlan:
        for base in self._bases(span):
            kv = self._kv(base.key)
            if kv is not None and base.covered and base.taint <= self._settings.max_taint:
                keys = frozenset({base.key})
                return SegmentPlan(span, Action.REUSE, source=Repositioned(kv), taint=base.taint, keys=keys)
        return _dense(span, Reason.MISS)

    def _repositioned_fixed(self, span: Span) -> SegmentPlan:
        base = self._memory.fixed_bases.get(self._place(span.ordinal))
        return SegmentPlan(span, Action.REUSE, source=Repositioned(base.kv)) if base else _dense(span, Reason.WARMING)

    # paper

    def _paper(self, segments: list[SegmentPlan]) -> list[SegmentPlan]:
        """KVCOMM: all placeholders must match, else the whole turn is dense and becomes an anchor."""
        out: list[SegmentPlan] = []
        following: SegmentPlan | None = None
        for segment in segments:
            before, following = following, None  # it belongs to the very next segment or to none
            if before is not None and not segment.span.placeholder and segment.action is not Action.EXACT:
                segment = replace(before, span=segment.span)
            elif segment.span.placeholder and segment.action is not Action.EXACT:
                segment, following = self._paper_placeholder(segment.span)
                if segment.action is Action.DENSE:
                    return _all_dense(segments, segment.reason)
            out.append(segment)
        return out

    def _paper_placeholder(self, span: Span) -> tuple[SegmentPlan, SegmentPlan | None]:
        """The placeholder's plan and, with the same weights in the same frame, that of the fixed segment after it."""
        sample = tokens_key(span.token_ids)
        found: tuple[SegmentPlan, SegmentPlan | None] = (_dense(span, Reason.MISS), None)
        for base in self._bases(span):
            if base.taint > self._settings.max_taint or not base.covered:
                found = (_dense(span, Reason.TAINT), None)
                continue
            found = self._blend(span, sample, base)
            if found[0].action is Action.REUSE:
                break
        return found

    def _known(self, slot: Slot) -> Iterator[_Held]:
        """Anchors of the slot, oldest first."""
        for anchor in self._anchors(slot.pool, slot.name):
            offsets = self._memory.anchors.get((slot.pool, anchor.sample), {}).get(slot.name)
            if offsets:
                yield _Held(anchor, offsets)

    def _held(self, slot: Slot) -> list[_Held]:
        """Those whose tensors are all in host memory."""
        out = [held for held in self._known(slot) if all(map(self._memory.tier.has, held.offsets.keys))]
        return out[: self._blending.max_anchors or None]

    def _blend(self, span: Span, sample: str, base: Base) -> tuple[SegmentPlan, SegmentPlan | None]:
        options = self._blending
        slot = self._slot(span, base)
        held = self._held(slot)
        if not held:
            return _dense(span, Reason.WARMING), None
        longer = [h for h in held if h.offsets.length >= base.covered]
        if not longer:
            return _dense(span, Reason.LENGTH), None
        same = [h for h in longer if h.anchor.sample == sample]
        chosen = same or longer
        own = self._kv(base.key)
        others = self._bases_of(chosen)
        if own is None or len(others) != len(chosen):
            return _dense(span, Reason.MISS), None
        weights: tuple[float, ...] = (1.0,)
        if not same:
            distances, entries = self._backend.distances(own, others), own.shape.numel()
            match = matching.match(distances, entries, options.gamma or self._settings.gamma)
            if not match.decisive:
                return _dense(span, Reason.ENTROPY), None
            weights = match.weights
            if options.reference_weights:
                decoded = [cpu.decoded(other) for other in others]
                weights = tuple((-matching.absolute_distances(cpu.decoded(own), decoded)).softmax(0).tolist())
        shifts = [h.offsets.start - span.start if options.absolute_frame else 0 for h in chosen]
        keys = [h.offsets.placeholder for h in chosen] if options.placeholder_offsets else []
        placeholder = replace(
            self._blended(span, self._placed(own, base.start - span.start), keys, weights, shifts, base.taint),
            fresh=tuple(range(span.start + base.covered, span.end)),  # T - 1 rule: decoded last, never run
            keys=frozenset({base.key, *keys}),
            uses=tuple((slot.pool, h.anchor.sample) for h, w in zip(chosen, weights, strict=True) if w * len(weights) >= 1.0),
        )
        fixed = self._memory.fixed_bases.get(self._place(span.ordinal + 1))
        following = [h.offsets.following for h in chosen if h.offsets.following and fixed and h.offsets.fixed == fixed.key]
        if fixed is None or len(following) != len(chosen):
            return placeholder, None
        if options.absolute_frame:
            shifts = [s + h.offsets.length - base.covered for h, s in zip(chosen, shifts, strict=True)]
        moved = self._placed(fixed.kv, fixed.start - span.end)
        return placeholder, self._blended(span, moved, following if options.following_offsets else [], weights, shifts, 0)

    def _kv(self, key: str) -> KV | None:
        return self._memory.kv(key, self._geometry)

    def _bases_of(self, held: Sequence[_Held]) -> list[KV]:
        """Bases that are still there, to measure distances."""
        return [kv for h in held if (kv := self._kv(h.offsets.base)) is not None]

    def _placed(self, base: KV, shift: int) -> KV:
        """Without rotation, keys keep the positions of their origin: `shift` away from where they are written."""
        return base if self._blending.rotation else self._shifted(base, shift)

    def _shifted(self, kv: KV, shift: int) -> KV:
        return cpu.shift(cpu.decoded(kv), shift, self._geometry.rope) if shift else kv

    def _blended(
        self, span: Span, base: KV, keys: Sequence[str], weights: Sequence[float], shifts: Sequence[int], taint: int
    ) -> SegmentPlan:
        found = [(kv, shift) for key, shift in zip(keys, shifts, strict=False) if (kv := self._kv(key)) is not None]
        offsets = tuple(self._shifted(kv, shift) for kv, shift in found)
        source = Blended(base, offsets, tuple(weights[: len(offsets)]))
        return SegmentPlan(span, Action.REUSE, source=source, anchors=len(weights), taint=taint, keys=frozenset(keys))

    def _entropy(self, span: Span, base: Base, own: KV) -> float:
        """The paper's gate signal, relative to its bound log|A|, to compete with the others; 1.0 where it cannot match."""
        slot = self._slot(span, base)
        held = [h for h in self._held(slot) if h.offsets.length >= base.covered]
        others = self._bases_of(held)
        if len(others) < 2:
            return 1.0
        return matching.match(self._backend.distances(own, others), own.shape.numel()).entropy / math.log(len(others))


@dataclass(frozen=True)
class _Held:
    anchor: Anchor
    offsets: Offsets


# Reasons for which a guarded turn is dense as a whole.
_BLOCKERS = (Reason.WARMING, Reason.QUALITY, Reason.NOVELTY)


def _middle(kv: KV, map: LinearMap) -> Tensor:
    return cpu.decoded(codec.layer(kv, map.middle))[0]


def _decide(
    segments: Sequence[SegmentPlan], placeholder: Callable[[Span], SegmentPlan], fixed: Callable[[Span], SegmentPlan]
) -> list[SegmentPlan]:
    """Decide what is not exact. A fixed segment with nothing approximated before it is computed: it will be exact next time."""
    out: list[SegmentPlan] = []
    pure = True
    for segment in segments:
        if segment.action is not Action.EXACT:
            if segment.span.placeholder:
                segment = placeholder(segment.span)
            elif not pure:
                segment = fixed(segment.span)
        pure = pure and segment.action is not Action.REUSE
        out.append(segment)
    return out


def _dense(span: Span, reason: Reason) -> SegmentPlan:
    return SegmentPlan(span, Action.DENSE, reason, fresh=tuple(range(span.start, span.end)))


def _all_dense(segments: Sequence[SegmentPlan], reason: Reason) -> list[SegmentPlan]:
    """Everything that is not exact."""
    return [s if s.action is Action.EXACT else _dense(s.span, reason) for s in segments]


def _covered(segment: SegmentPlan) -> int:
    """Leading tokens of the span that the source has KV for."""
    return segment.source.base.shape[2] if segment.source is not None else 0


def _compute_last(segments: Sequence[SegmentPlan]) -> list[SegmentPlan]:
    """The last prompt token is always computed: its logits give the first output token."""
    out = list(segments)
    for index in reversed(range(len(out))):
        span = out[index].span
        if span.token_ids:
            if span.end - 1 not in out[index].fresh:
                out[index] = replace(out[index], fresh=(*out[index].fresh, span.end - 1))
            break
    return out


def bypass(plan: Plan, reason: Reason) -> Plan:
    """The same turn without approximation."""
    return replace(plan, segments=tuple(_compute_last(_all_dense(plan.segments, reason))))
