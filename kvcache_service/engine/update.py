"""Verify and update: turn what Observe staged into candidates, check them, and apply those that the commit accepts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.catalog.store import Commit, Insert
from kvcache_service.engine.memory import LAYER_ZERO_CODED, LAYER_ZERO_TOLERANCE, Memory, relative_norm
from kvcache_service.engine.plan import Reason, SegmentPlan
from kvcache_service.engine.records import Base, FixedBase, Offsets, Place, Slot
from kvcache_service.engine.sessions import Settlement, Turn, Verdict
from kvcache_service.errors import KVCacheError, invalid
from kvcache_service.kernels import cpu
from kvcache_service.kernels.codec import Coded
from kvcache_service.prompt import CHUNK, Policy, Span, check_tokens, chunked, context_keys, tokens_key


@dataclass(frozen=True)
class _Offset:
    """One candidate anchor. following: dense KV, base and ordinal of the fixed segment after the placeholder."""

    slot: Slot
    sample: str
    base_key: str
    base: Tensor
    offset: Tensor
    start: int
    following: tuple[Span, Tensor] | None


@dataclass(frozen=True)
class _NewBase:
    sample: str
    base: Base
    kv: Tensor | None  # None: it is stored as an exact segment already
    blob: Tensor | None = None  # what is stored for it


class Update:
    """One turn's update. Three writers are told apart: a planned dense turn may propose anchors and bases, an
    emergency dense turn (rejected) proposes nothing, a reuse turn proposes usage counts and the KV it decoded."""

    def __init__(self, turn: Turn, settlement: Settlement, memory: Memory, max_taint: int) -> None:
        self._turn = turn
        self._settlement = settlement
        self._memory = memory
        self._max_taint = max_taint
        self._group = Group(turn.tenant, turn.geometry.model_id)
        self._offsets: list[_Offset] = []
        self._bases: list[_NewBase] = []
        self._exact: list[tuple[str, Span, Tensor]] = []
        self.refused: list[str] = []
        self.accepted: Sequence[Insert] = ()

    @property
    def candidates(self) -> int:
        return len(self._offsets)

    def counts(self) -> dict[str, int]:
        """Candidates by what became of them, after the commit."""
        accepted = len(self.accepted)
        return {"accepted": accepted, "duplicate": self.candidates - accepted, "refused": len(self.refused)}

    def validate(self) -> None:
        """Raises INVALID when the settlement contradicts the turn; nothing has changed then."""
        settlement, turn = self._settlement, self._turn
        check_tokens(settlement.output_token_ids, turn.geometry.vocab_size, "output_token_ids")
        trial, audited = turn.trial is not None, settlement.verdict is Verdict.AUDITED
        if trial and settlement.verdict not in (Verdict.AUDITED, Verdict.ABORTED):
            raise invalid("verdict", "a trial teaches nothing", "send AUDITED with a distance, or release the turn")
        if audited and not trial:
            raise invalid("verdict", "only a trial can be audited", "open the turn with `trial`")
        if audited and (settlement.distance is None or not settlement.distance.sound):
            raise invalid("distance", "absent, or not finite and within bounds", "send kl >= 0, 0 <= top1 <= 1 and tokens > 0")
        if settlement.verdict is Verdict.ACCEPTED and not settlement.finished:
            raise invalid("finish_reason", "an accepted turn has none", "send STOP or LENGTH")
        if settlement.verdict is Verdict.REJECTED and settlement.reason is Reason.NONE:
            raise invalid("reason", "a rejected turn has none", "say why the turn fell back")
        observed = max(0, turn.observed - turn.plan.prompt_tokens)
        if settlement.output_kv_tokens > min(observed, len(settlement.output_token_ids)):
            raise invalid(
                "output_kv_tokens",
                f"{settlement.output_kv_tokens} of {len(settlement.output_token_ids)} tokens, {observed} observed",
                "observe the decoded KV first and count only output tokens that have KV",
            )

    def collect(self) -> None:
        """Build and check the candidates."""
        if self._settlement.verdict is not Verdict.ACCEPTED:
            return
        if self._turn.plan.policy is Policy.EXACT:
            self._collect_chunks()
            return
        pure = {s.span.ordinal: s for s in self._turn.plan.pure() if s.span.start in self._turn.staged and s.span.token_ids}
        runs: list[tuple[Sequence[int], Tensor]] = [(s.span.token_ids, self._turn.staged[s.span.start]) for s in pure.values()]
        output = self._turn.staged.get(self._turn.plan.prompt_tokens)
        if output is not None:
            count = self._settlement.output_kv_tokens
            runs.append((self._settlement.output_token_ids[:count], output[:, :, :count]))
        if not self._agree_with_layer_zero(runs):
            self.refused.append("layer0")
            return
        for ordinal, segment in pure.items():
            kv = self._turn.staged[segment.span.start]
            key = self._memory.exact_key(self._group, self._turn.plan.contexts[ordinal], segment.span.start)
            self._exact.append((key, segment.span, kv))
            if segment.span.placeholder:
                self._collect_placeholder(segment.span, kv, key, pure.get(ordinal + 1))
        self._collect_output()

    def _collect_chunks(self) -> None:
        """Whole chunks of prompt and answer, each under the key of all tokens up to its end."""
        settlement, plan = self._settlement, self._turn.plan
        prompt = [t for s in plan.segments for t in s.span.token_ids]
        spans = chunked([*prompt, *settlement.output_token_ids[: settlement.output_kv_tokens]])
        whole = [(s, c) for s, c in zip(spans, context_keys(spans), strict=True) if len(s.token_ids) == CHUNK]
        found = [(span, context, self._turn.staged[span.start]) for span, context in whole if span.start in self._turn.staged]
        if not self._agree_with_layer_zero((span.token_ids, kv) for span, _, kv in found):
            self.refused.append("layer0")
            return
        self._exact = [(self._memory.exact_key(self._group, context, span.start), span, kv) for span, context, kv in found]

    def _agree_with_layer_zero(self, runs: Iterable[tuple[Sequence[int], Tensor]]) -> bool:
        zero = self._memory.layer_zero(self._turn.tenant, self._turn.geometry)
        return all(zero.error(token_ids, kv) <= LAYER_ZERO_TOLERANCE for token_ids, kv in runs)

    def _collect_placeholder(self, span: Span, kv: Tensor, key: str, following: SegmentPlan | None) -> None:
        sample = tokens_key(span.token_ids)
        bases = self._memory.bases(self._group, sample)
        if not bases:
            base = Base(f"{self._turn.template.template_id}:{span.ordinal}", span.start, len(span.token_ids), 0, key)
            self._bases.append(_NewBase(sample, base, None))
        elif not self._turn.holdout:
            # Agents that say the same give a sample several bases. Each pair of agents would be a slot of its own: the one that
            # the placeholder is meant for is enough.
            base = max(bases, key=lambda b: (b.produced == span.placeholder, self._memory.samples(self._slot(span, b))))
            if base.key != key:  # the base of an overlapping turn with this very prefix: no offset to learn from
                self._collect_offset(span, kv, base, sample, following)

    def _slot(self, span: Span, base: Base) -> Slot:
        return Slot(PoolKey(self._group, span.placeholder, base.origin), self._turn.template.template_id, span.ordinal)

    def _collect_offset(self, span: Span, kv: Tensor, base: Base, sample: str, following: SegmentPlan | None) -> None:
        stored = self._memory.kv(base.key, self._turn.geometry)
        if stored is None or base.taint > self._max_taint:
            self.refused.append("taint" if stored is not None else "evicted")
            return
        tensor = cpu.decoded(stored)  # what assembly will add the offset to
        offset = kv[:, :, : base.covered] - tensor
        slot = self._slot(span, base)
        tolerance = LAYER_ZERO_CODED if isinstance(stored, Coded) else LAYER_ZERO_TOLERANCE
        if float(offset[0].float().norm() / tensor[0].float().norm()) > tolerance:
            self.refused.append("layer0")
        elif not self._memory.norm_in_band(slot, relative_norm(tensor, offset)):
            self.refused.append("norm")
        else:
            after = None
            if following is not None and not following.span.placeholder:
                after = (following.span, self._turn.staged[following.span.start])
            self._offsets.append(_Offset(slot, sample, base.key, tensor, offset, span.start, after))

    def _collect_output(self) -> None:
        """Decoded KV is the base of the sample that the answer becomes in other agents' prompts (T - 1 rule)."""
        count, produces = self._settlement.output_kv_tokens, self._turn.template.produces
        if not produces or not count:
            return
        taint = self._turn.plan.taint
        if taint > self._max_taint:
            self.refused.append("taint")
            return
        sample = tokens_key(self._settlement.output_token_ids)
        origin = f"{self._turn.template.template_id}:output"
        kv = self._turn.staged[self._turn.plan.prompt_tokens][:, :, :count].contiguous()
        key = f"{self._group.tag}:base:{origin}:{produces}:{sample}:{self._turn.turn_id}"
        if any(b.origin == origin and b.taint <= taint for b in self._memory.bases(self._group, sample)):
            return
        self._bases.append(_NewBase(sample, Base(origin, self._turn.plan.prompt_tokens, count, taint, key, produces), kv))

    def commit(self) -> Commit | None:
        """What the catalog has to write in one step; None when the turn changes no pool."""
        uses = self._turn.plan.uses if self._settlement.verdict is Verdict.ACCEPTED else ()
        if not self._offsets and not uses:
            return None
        inserts = [Insert(o.slot.pool, o.sample, o.offset.shape[2], o.slot.name) for o in self._offsets]
        return Commit(self._group, self._turn.turn_id, uses, inserts)

    def pack(self) -> None:
        """Make the blobs of new bases. Takes time; needs no lock."""
        self._bases = [n if n.kv is None else replace(n, blob=self._memory.coded(n.kv)) for n in self._bases]

    def keep_local(self) -> None:
        """Store what belongs to this node alone. A full host tier refuses single tensors, never the turn."""
        zero = self._memory.layer_zero(self._turn.tenant, self._turn.geometry)
        for key, span, kv in self._exact:
            if self._kept(key, kv):
                zero.learn(span.token_ids, kv)
                if _follows(span):
                    place = self._place(span)
                    name = f"{self._group.tag}:fixed:{place.template_id}:{place.ordinal}:{self._turn.turn_id}"
                    self._memory.add_fixed_base(place, FixedBase(kv, span.start, name))
        for new in self._bases:
            if new.blob is None or self._kept(new.base.key, new.blob):
                self._memory.add_base(self._group, new.sample, new.base)
                if new.kv is not None:
                    zero.learn(self._settlement.output_token_ids[: new.base.covered], new.kv)

    def _place(self, span: Span) -> Place:
        return Place(self._group, self._turn.template.template_id, span.ordinal)

    def learn(self, lock: threading.RLock) -> None:
        """Add the accepted candidates to pools and predictors. `lock` guards memory; sums are solved outside it."""
        accepted = {(i.pool, i.sample, i.slot) for i in self.accepted}
        if accepted:
            with lock:
                for _, span, kv in self._exact:
                    if _follows(span):
                        self._memory.learn_fixed(self._place(span), kv)
        for offset in self._offsets:
            if (offset.slot.pool, offset.sample, offset.slot.name) not in accepted:
                continue
            with lock:
                predictor = self._memory.predictor(offset.slot, relative_norm(offset.base, offset.offset))
            predictor.add(offset.base, offset.offset)
            anchor = self._anchor(offset)
            with lock:
                self._add_anchor(offset, *anchor)
                self._memory.keep_predictor(offset.slot)

    def _anchor(self, offset: _Offset) -> tuple[Offsets, Tensor, Tensor | None]:
        """What an accepted candidate leaves: its record, the blob of its offset and that of the fixed segment after it."""
        stem = f"{offset.slot.pool.key}:offset:{offset.sample}:{offset.slot.name}:{self._turn.turn_id}"
        following = fixed = None
        if offset.following is not None:
            span, kv = offset.following
            fixed = self._memory.fixed_bases.get(self._place(span))
            following = self._memory.coded(kv - fixed.kv) if fixed is not None else None
        kept = Offsets(
            base=offset.base_key,
            placeholder=f"{stem}:placeholder",
            following=f"{stem}:following" if fixed is not None else None,
            fixed=fixed.key if fixed is not None else None,
            start=offset.start,
            length=offset.offset.shape[2],
        )
        return kept, self._memory.coded(offset.offset), following

    def _add_anchor(self, offset: _Offset, kept: Offsets, blob: Tensor, following: Tensor | None) -> None:
        try:
            self._memory.add_anchor(offset.slot, offset.sample, blob, following, kept)
        except KVCacheError:
            self.refused.append("host tier full")

    def _kept(self, key: str, kv: Tensor) -> bool:
        try:
            self._memory.keep(key, kv)
        except KVCacheError:
            self.refused.append("host tier full")
            return False
        return True


def _follows(span: Span) -> bool:
    """A fixed segment behind a placeholder. The leading one is exact or computed, never approximated: it needs no mean."""
    return not span.placeholder and span.ordinal > 0
