"""Decide per segment what a turn may reuse. Reads memory and the catalog snapshot; changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvcache_service import matching
from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.catalog.store import Anchor
from kvcache_service.engine.memory import Base, Memory, Slot
from kvcache_service.engine.plan import Action, Blended, Mapped, Plan, Reason, Repositioned, SegmentPlan
from kvcache_service.predictor import LinearMap
from kvcache_service.prompt import Policy, Role, Span, Template, context_keys, tokens_key


@dataclass(frozen=True)
class PlanSettings:
    """min_samples: verified samples before a slot is used; boundary: leading tokens of every corrected placeholder that
    are recomputed and probed; trailing: tokens of the last segment that are recomputed; max_taint: cap on the taint depth of a
    base; max_error: held-out error of a predictor, relative to re-position only; gamma: the paper's gate."""

    min_samples: int = 12
    boundary: int = 4
    trailing: int = 16
    max_taint: int = 4
    max_error: float = 1.0
    gamma: float = matching.GAMMA


class Planner:
    """One turn's planning; built per turn, holds no state beyond it."""

    def __init__(
        self,
        settings: PlanSettings,
        memory: Memory,
        anchors: Callable[[PoolKey, str], Sequence[Anchor]],
        group: Group,
        template: Template,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._anchors = anchors
        self._group = group
        self._template = template
        self._template_id = template.template_id

    def plan(self, spans: Sequence[Span], policy: Policy) -> Plan:
        contexts = context_keys(spans)
        if policy is Policy.OFF:
            segments = [_dense(span, Reason.POLICY_OFF) for span in spans]
        else:
            segments = [self._exact(span, context) for span, context in zip(spans, contexts, strict=True)]
            if self._template.role is Role.DENSE:
                segments = _all_dense(segments, Reason.ROLE)
            elif policy is Policy.PAPER:
                segments = self._paper(segments)
            else:
                segments = self._guarded(segments)
        segments = _compute_last(segments)
        return Plan(policy, tuple(segments), contexts=contexts)

    def _exact(self, span: Span, context: str) -> SegmentPlan:
        """EXACT where the KV of these tokens behind this very prefix is stored; undecided (DENSE, MISS) elsewhere."""
        if not span.token_ids:
            return SegmentPlan(span, Action.EXACT)
        key = self._memory.exact_key(self._group, context, span.start)
        base = self._memory.tier.get(key)
        if base is None:
            return _dense(span, Reason.MISS)
        return SegmentPlan(span, Action.EXACT, source=Repositioned(base), keys=frozenset({key}))

    def _guarded(self, segments: list[SegmentPlan]) -> list[SegmentPlan]:
        out, pure = [], True
        for segment in segments:
            if segment.action is not Action.EXACT:
                if segment.span.placeholder:
                    segment = self._guarded_placeholder(segment.span)
                elif not pure:
                    segment = self._guarded_fixed(segment.span)
            pure = pure and segment.action is not Action.REUSE
            out.append(segment)
        blocker = next((s.reason for s in out if s.reason in (Reason.WARMING, Reason.QUALITY)), None)
        if blocker:
            return _all_dense(segments, blocker)  # a whole dense turn is also what the pools learn from
        return [self._recompute(s, last=s is out[-1]) for s in out]

    def _guarded_placeholder(self, span: Span) -> SegmentPlan:
        sample = tokens_key(span.token_ids)
        bases = self._memory.bases(self._group, span.placeholder, sample)
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
        tensor = self._memory.tier.get(base.key)
        if tensor is None:
            return _dense(span, Reason.MISS)
        source = Mapped(tensor, best)
        return SegmentPlan(span, Action.REUSE, source=source, anchors=best.samples, taint=base.taint, keys=frozenset({base.key}))

    def _map(self, span: Span, base: Base) -> LinearMap | None:
        pool = PoolKey(self._group, span.placeholder, base.origin)
        statistics = self._memory.statistics.get(Slot(pool, self._template_id, span.ordinal))
        if statistics is None or statistics.map is None or statistics.samples < self._settings.min_samples:
            return None
        return statistics.map

    def _guarded_fixed(self, span: Span) -> SegmentPlan:
        mean = self._memory.fixed_mean(self._group.tenant, self._template_id, span.ordinal)
        if mean is None or mean.samples < self._settings.min_samples:
            return _dense(span, Reason.WARMING)
        return SegmentPlan(span, Action.REUSE, source=Repositioned(mean.mean()), anchors=mean.samples)

    def _recompute(self, segment: SegmentPlan, *, last: bool) -> SegmentPlan:
        """Boundary recompute: leading tokens act as attention sinks; the trailing segment decides the first token."""
        if segment.action is not Action.REUSE or segment.source is None:
            return segment
        span = segment.span
        covered = span.start + _covered(segment)
        boundary = self._settings.boundary if isinstance(segment.source, Mapped) else 0
        lead = range(span.start, min(span.start + boundary, covered))
        tail = range(max(span.start, span.end - self._settings.trailing) if last and not span.placeholder else covered, span.end)
        fresh = tuple(sorted({*lead, *tail, *range(covered, span.end)}))
        return replace(segment, fresh=fresh, probe=tuple(lead))

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
        for base in self._memory.bases(self._group, span.placeholder, sample):
            if base.taint > self._settings.max_taint or not base.covered:
                found = (_dense(span, Reason.TAINT), None)
                continue
            found = self._blend(span, sample, base)
            if found[0].action is Action.REUSE:
                break
        return found

    def _blend(self, span: Span, sample: str, base: Base) -> tuple[SegmentPlan, SegmentPlan | None]:
        tier, slot = self._memory.tier, Slot(PoolKey(self._group, span.placeholder, base.origin), self._template_id, span.ordinal)
        held = [
            (anchor, tensors)
            for anchor in self._anchors(slot.pool, slot.name)
            if (tensors := self._memory.anchors.get((slot.pool, anchor.sample)))
            and slot.name in tensors.offsets
            and tier.has(tensors.base)
            and all(tier.has(key) for key in tensors.offsets[slot.name] if key)
        ]
        if not held:
            return _dense(span, Reason.WARMING), None
        longer = [pair for pair in held if pair[0].length >= base.covered]
        if not longer:
            return _dense(span, Reason.LENGTH), None
        same = [pair for pair in longer if pair[0].sample == sample]
        chosen = same or longer
        own = tier.get(base.key)
        blobs = [tier.get(tensors.base) for _, tensors in chosen]
        if own is None or any(blob is None for blob in blobs):
            return _dense(span, Reason.MISS), None
        if same:
            weights: tuple[float, ...] = (1.0,)
        else:
            distance = matching.distances(own, [b for b in blobs if b is not None])
            match = matching.match(distance, own.numel(), self._settings.gamma)
            if not match.decisive:
                return _dense(span, Reason.ENTROPY), None
            weights = match.weights
        offset_keys = [tensors.offsets[slot.name] for _, tensors in chosen]
        placeholder = replace(
            self._blended(span, own, [first for first, _ in offset_keys], weights, base.taint),
            fresh=tuple(range(span.start + base.covered, span.end)),  # T - 1 rule: decoded last, never run
            keys=frozenset({base.key, *(first for first, _ in offset_keys)}),
            uses=tuple((slot.pool, a.sample) for (a, _), w in zip(chosen, weights, strict=True) if w * len(weights) >= 1.0),
        )
        following_base = self._memory.fixed_bases.get((self._group.tenant, self._template_id, span.ordinal + 1))
        following_keys = [second for _, second in offset_keys if second]
        if following_base is None or len(following_keys) != len(chosen):
            return placeholder, None
        return placeholder, self._blended(span, following_base, following_keys, weights, 0)

    def _blended(self, span: Span, base: Tensor, keys: Sequence[str], weights: tuple[float, ...], taint: int) -> SegmentPlan:
        offsets = tuple(t for key in keys if (t := self._memory.tier.get(key)) is not None)
        source = Blended(base, offsets, weights)
        return SegmentPlan(span, Action.REUSE, source=source, anchors=len(keys), taint=taint, keys=frozenset(keys))


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
