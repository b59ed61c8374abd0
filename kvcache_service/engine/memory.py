"""The tensors that turns left behind: exact segments, sample bases, offsets and predictors of every slot.

Tensors lie in the host tier under keys that never name other bytes later; this module knows which key holds what, and tells
what outlives the process. Guarded by the engine's lock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.engine.durable import Durable, KnownGroup, KnownTemplate
from kvcache_service.engine.records import Base, FixedBase, Offsets, Place, Slot
from kvcache_service.errors import KVCacheError
from kvcache_service.geometry import Geometry
from kvcache_service.kernels import codec
from kvcache_service.kernels.codec import KV, Codec
from kvcache_service.predictor import RidgeStatistics, RunningMean
from kvcache_service.prompt import Template
from kvcache_service.tiers.host import HostTier, Pin

LAYER_ZERO_TOLERANCE = 0.02  # relative L2; agreeing tokens stay below rounding, a slip by one token gives about 1
LAYER_ZERO_CODED = 0.1  # against coded KV, whose rounding alone is up to 0.03
_LAYER_ZERO_ROWS = 8192


class LayerZero:
    """Layer 0 depends on token and position only, so position-free layer-0 KV of a token is always the same.

    Remembers it per token id (bounded) and tells when observed KV belongs to other tokens than it claims.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._table = torch.empty(_LAYER_ZERO_ROWS, 2, geometry.kv_heads, geometry.head_dim, dtype=geometry.dtype)
        self._rows: dict[int, int] = {}

    def error(self, token_ids: Sequence[int], kv: Tensor) -> float:
        """Largest relative L2 error over the tokens known so far; 0.0 when none is known. kv: canonical."""
        known = [(self._rows[t], i) for i, t in enumerate(token_ids) if t in self._rows]
        if not known:
            return 0.0
        rows, places = (list(side) for side in zip(*known, strict=True))
        expected = self._table[rows].flatten(1).float()
        found = kv[0][:, places].transpose(0, 1).flatten(1).float()
        return float(((found - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-6)).max())

    def learn(self, token_ids: Sequence[int], kv: Tensor) -> None:
        places = {token: i for i, token in enumerate(token_ids) if token not in self._rows}
        new = dict(islice(places.items(), _LAYER_ZERO_ROWS - len(self._rows)))
        first = len(self._rows)
        self._table[first : first + len(new)] = kv[0][:, list(new.values())].transpose(0, 1)
        self._rows |= {token: first + row for row, token in enumerate(new)}


class Memory:
    """Everything that is learned about one service's models and templates. coding: of KV that nobody promised to be exact."""

    def __init__(self, tier: HostTier, durable: Durable, coding: Codec | None) -> None:
        self.tier = tier
        self._coding = coding
        self._durable = durable
        self.statistics: dict[Slot, RidgeStatistics] = {}
        self.fixed: dict[Place, RunningMean] = {}
        self.fixed_bases: dict[Place, FixedBase] = {}
        self.anchors: dict[tuple[PoolKey, str], dict[str, Offsets]] = {}  # offsets by slot name
        self._bases: dict[tuple[Group, str], dict[str, Base]] = defaultdict(dict)
        self._prune_at = 1024
        self._norms: dict[Slot, deque[float]] = defaultdict(lambda: deque(maxlen=64))
        self._layer_zero: dict[Group, LayerZero] = {}

    def restore_group(self, group: Group, known: KnownGroup) -> None:
        """Take in what an earlier boot left."""
        for sample, base in known.bases:
            self._bases[group, sample][base.origin] = base
        self.anchors |= {key: dict(offsets) for key, offsets in known.offsets.items()}

    def restore_template(self, known: KnownTemplate) -> None:
        """Take in what an earlier boot left."""
        for slot, (statistics, norms) in known.predictors.items():
            self.statistics[slot] = statistics
            self._norms[slot].extend(norms)
        self.fixed |= known.means
        self.fixed_bases |= known.fixed_bases

    def layer_zero(self, tenant: str, geometry: Geometry) -> LayerZero:
        group = Group(tenant, geometry.model_id)
        if group not in self._layer_zero:
            self._layer_zero[group] = LayerZero(geometry)
        return self._layer_zero[group]

    def exact_key(self, group: Group, context: str, start: int) -> str:
        """KV of tokens [start, end) behind exactly the tokens before; `context` is the key of all tokens to `end`."""
        return f"{group.tag}:exact:{context}:{start}"

    def keep(self, key: str, kv: Tensor, pin: Pin = Pin.NONE) -> None:
        """Store a blob, on disk too, where there is one. Raises QUOTA."""
        self.tier.put(key, kv, pin)
        self._durable.offer(key, kv)

    def coded(self, kv: Tensor) -> Tensor:
        """A blob for KV that is approximated where it is used: bases and offsets. Takes time; needs no lock."""
        return codec.encode(kv, self._coding) if self._coding is not None else kv

    def kv(self, key: str, geometry: Geometry) -> KV | None:
        """Stored KV as kernels read it, marked as used; None is a miss."""
        blob = self.tier.get(key)
        return codec.opened(blob, geometry) if blob is not None else None

    def promote(self, keys: Iterable[str]) -> None:
        """Bring blobs that only the disk still has back into the host tier, and mark all of them as used: what is brought
        back must not push out what the same turn needs. Reads files: call it without a lock."""
        for key in keys:
            if self.tier.get(key) is None and (kv := self._durable.get(key)) is not None:
                try:
                    self.tier.put(key, kv)
                except KVCacheError:  # all of the tier is leased
                    return
                self.tier.get(key)

    def bases(self, group: Group, sample: str) -> list[Base]:
        """Bases of a sample whose tensors are still in host memory or on disk, oldest first, whatever placeholder they came
        from. Lost ones are forgotten."""
        known = self._bases.get((group, sample))
        if not known:
            return []
        for base in [b for b in known.values() if not self.tier.has(b.key) and not self._durable.has(b.key)]:
            del known[base.origin]
            self._durable.drop_base(group, sample, base)
        if not known:
            del self._bases[group, sample]
        return list(known.values())

    def known_bases(self, group: Group) -> list[tuple[str, Base]]:
        """All bases of a group with their samples."""
        samples = [sample for owner, sample in self._bases if owner == group]
        return [(sample, base) for sample in samples for base in self.bases(group, sample)]

    def copy(self, key: str) -> Tensor | None:
        """A copy of a blob from host memory, where it does not count as used, or from the disk; None is a miss."""
        blob = self.tier.peek(key)
        return blob.clone() if blob is not None else self._durable.get(key)

    def drop_base(self, group: Group, sample: str, base: Base) -> None:
        """Forget a base and its KV."""
        self._bases.get((group, sample), {}).pop(base.origin, None)
        self.tier.remove([base.key])
        self._durable.drop_base(group, sample, base)
        self._durable.drop_blobs([base.key])

    def forget(self, group: Group) -> int:
        """Drop everything of a group, here and on disk. Returns the host bytes. Leased blobs live until their leases end."""
        for slot in [s for s in {*self.statistics, *self._norms} if s.pool.group == group]:
            self.statistics.pop(slot, None)
            self._norms.pop(slot, None)
        for places in (self.fixed, self.fixed_bases):
            for place in [p for p in places if p.group == group]:
                del places[place]
        for anchor in [a for a in self.anchors if a[0].group == group]:
            del self.anchors[anchor]
        for known in [k for k in self._bases if k[0] == group]:
            del self._bases[known]
        self._layer_zero.pop(group, None)
        held, _ = self.tier.holdings(group.tenant, lambda: None)
        mine = [one for one in held if one.key.startswith(f"{group.tag}:")]
        self.tier.remove([one.key for one in mine])
        self._durable.forget(group)
        return sum(one.nbytes for one in mine)

    def add_base(self, group: Group, sample: str, base: Base) -> None:
        self._bases[group, sample][base.origin] = base
        self._durable.keep_base(group, sample, base)
        if len(self._bases) >= self._prune_at:
            for known in list(self._bases):
                self.bases(*known)
            self._prune_at = 2 * len(self._bases) + 1024

    def add_fixed_base(self, place: Place, base: FixedBase) -> None:
        """The first one stays: offsets were measured against it."""
        if place not in self.fixed_bases:
            self.fixed_bases[place] = base
            self._durable.keep_fixed(place, base)

    def add_anchor(self, slot: Slot, sample: str, offset: Tensor, following: Tensor | None, offsets: Offsets) -> None:
        """Keep full offsets, blobs, for the paper policy and for refits. Raises QUOTA."""
        self.keep(offsets.placeholder, offset)
        if following is not None and offsets.following is not None:
            self.keep(offsets.following, following)
        self.name_anchor(slot, sample, offsets)

    def name_anchor(self, slot: Slot, sample: str, offsets: Offsets) -> None:
        """Know offsets whose blobs are kept."""
        self.anchors.setdefault((slot.pool, sample), {})[slot.name] = offsets
        self._durable.keep_offsets(slot, sample, offsets)

    def drop_anchor(self, pool: PoolKey, sample: str) -> None:
        """The pruned anchor's tensors are freed when the last lease on them ends."""
        offsets = self.anchors.pop((pool, sample), {})
        owned = [key for held in offsets.values() for key in held.owned]
        self.tier.remove(owned)
        self._durable.drop_anchor(pool, sample, owned)

    def norm_in_band(self, slot: Slot, relative_norm: float) -> bool:
        """Within three times the 95 % quantile of what this slot has seen; anything goes for the first eight."""
        seen = self._norms.get(slot, ())
        return len(seen) < 8 or relative_norm <= 3.0 * sorted(seen)[int(0.95 * (len(seen) - 1))]

    def predictor(self, slot: Slot, relative_norm: float) -> RidgeStatistics:
        """The slot's statistics, to which a sample with this offset norm is about to be added."""
        self._norms[slot].append(relative_norm)
        return self.statistics.setdefault(slot, RidgeStatistics())

    def keep_predictor(self, slot: Slot) -> None:
        """The slot has learned."""
        self._durable.keep_predictor(slot, self.statistics[slot], list(self._norms[slot]))

    def norms(self, slot: Slot) -> list[float]:
        """The latest offset norms that the slot has seen."""
        return list(self._norms.get(slot, ()))

    def adopt_predictor(self, slot: Slot, statistics: RidgeStatistics, norms: Sequence[float]) -> bool:
        """Take a predictor that has learned elsewhere, where the slot has learned less; False where it has not."""
        if self.samples(slot) >= statistics.samples:
            return False
        self.statistics[slot] = statistics
        self._norms[slot].extend(norms)
        self.keep_predictor(slot)
        return True

    def samples(self, slot: Slot) -> int:
        """How many samples the slot has learned from."""
        found = self.statistics.get(slot)
        return found.samples if found is not None else 0

    def learn_fixed(self, place: Place, kv: Tensor) -> None:
        mean = self.fixed.setdefault(place, RunningMean())
        mean.add(kv)
        self._durable.keep_mean(place, mean)

    def adopt_mean(self, place: Place, mean: RunningMean) -> None:
        """Take a mean that has learned elsewhere, where this one has learned less."""
        if place not in self.fixed or self.fixed[place].samples < mean.samples:
            self.fixed[place] = mean
            self._durable.keep_mean(place, mean)

    def missing_fixed(self, group: Group, template: Template, exact_prefix: bool) -> list[int]:
        """Ordinals of fixed segments without any KV; a leading one has it when its prefix is stored."""
        fixed = [i for i, s in enumerate(template.segments) if not hasattr(s, "name")]
        return [i for i in fixed if not (exact_prefix if i == 0 else Place(group, template.template_id, i) in self.fixed)]

    @property
    def predictor_bytes(self) -> int:
        """What the guarded policy holds beside the samples themselves."""
        return sum(s.nbytes for s in self.statistics.values()) + sum(m.nbytes for m in self.fixed.values())

    @property
    def anchor_bytes(self) -> int:
        """What the paper policy holds: bases and full offsets of its anchors."""
        keys = {key for offsets in self.anchors.values() for held in offsets.values() for key in held.keys}
        return sum(self.tier.size(key) for key in keys) + sum(base.kv.nbytes for base in self.fixed_bases.values())


def relative_norm(base: Tensor, offset: Tensor) -> float:
    """‖offset‖ / ‖base‖ beyond layer 0."""
    return float(offset[1:].float().norm() / base[1:].float().norm().clamp_min(1e-6))
