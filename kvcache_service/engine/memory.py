"""The tensors that turns left behind: exact segments, sample bases, offsets and predictors of every slot.

Tensors lie in the host tier under content keys; this module knows which key holds what. Guarded by the engine's lock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.errors import KVCacheError
from kvcache_service.geometry import Geometry
from kvcache_service.predictor import RidgeStatistics, RunningMean
from kvcache_service.prompt import Template
from kvcache_service.tiers.disk import DiskTier
from kvcache_service.tiers.host import HostTier, Pin

LAYER_ZERO_TOLERANCE = 0.02  # relative L2; agreeing tokens stay below rounding, a slip by one token gives about 1
_LAYER_ZERO_ROWS = 8192


@dataclass(frozen=True)
class Base:
    """Position-free KV of a sample in its origin context, where it began at `start`. covered: leading tokens with KV.

    produced: the placeholder that an answer was said for; "" for text that was read first.
    """

    origin: str
    start: int
    covered: int
    taint: int
    key: str
    produced: str = ""


@dataclass(frozen=True, order=True)
class Slot:
    """Where a sample is consumed: the ordinal of a placeholder in a template, for one origin of its base."""

    pool: PoolKey
    template_id: str
    ordinal: int

    @property
    def name(self) -> str:
        return f"{self.template_id}:{self.ordinal}"


@dataclass
class AnchorTensors:
    """One anchor: the blob key of its base, and what it holds per slot name."""

    base: str
    offsets: dict[str, Offsets] = field(default_factory=dict)

    def keys(self) -> Iterator[str]:
        for offsets in self.offsets.values():
            yield from offsets.keys()


@dataclass(frozen=True)
class Offsets:
    """Blob keys of the offsets of a placeholder, which began at `start`, and of the fixed segment after it."""

    placeholder: str
    following: str | None
    start: int

    def keys(self) -> tuple[str, ...]:
        return (self.placeholder, self.following) if self.following else (self.placeholder,)


@dataclass(frozen=True)
class FixedBase:
    """Canonical KV of a fixed segment in its first dense context, where it began at `start`."""

    kv: Tensor
    start: int


class LayerZero:
    """Layer 0 depends on token and position only, so position-free layer-0 KV of a token is always the same.

    Remembers it per token id (bounded) and tells when observed KV belongs to other tokens than it claims.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._table = torch.empty(_LAYER_ZERO_ROWS, 2, geometry.kv_heads, geometry.head_dim)
        self._rows: dict[int, int] = {}

    def error(self, token_ids: Sequence[int], kv: Tensor) -> float:
        """Largest relative L2 error over the tokens known so far; 0.0 when none is known. kv: canonical."""
        known = [(self._rows[t], i) for i, t in enumerate(token_ids) if t in self._rows]
        if not known:
            return 0.0
        rows, places = (list(side) for side in zip(*known, strict=True))
        expected = self._table[rows].flatten(1)
        found = kv[0][:, places].transpose(0, 1).flatten(1).float()
        return float(((found - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-6)).max())

    def learn(self, token_ids: Sequence[int], kv: Tensor) -> None:
        places = {token: i for i, token in enumerate(token_ids) if token not in self._rows}
        new = dict(islice(places.items(), _LAYER_ZERO_ROWS - len(self._rows)))
        first = len(self._rows)
        self._table[first : first + len(new)] = kv[0][:, list(new.values())].transpose(0, 1).float()
        self._rows |= {token: first + row for row, token in enumerate(new)}


class Memory:
    """Everything that is learned about one service's models and templates."""

    def __init__(self, tier: HostTier, disk: DiskTier | None = None) -> None:
        self.tier = tier
        self._disk = disk
        self.statistics: dict[Slot, RidgeStatistics] = {}
        self.fixed: dict[tuple[str, str, int], RunningMean] = {}
        self.fixed_bases: dict[tuple[str, str, int], FixedBase] = {}
        self.anchors: dict[tuple[PoolKey, str], AnchorTensors] = {}
        self._bases: dict[tuple[Group, str], dict[str, Base]] = defaultdict(dict)
        self._prune_at = 1024
        self._norms: dict[Slot, deque[float]] = {}
        self._layer_zero: dict[Group, LayerZero] = {}

    def layer_zero(self, tenant: str, geometry: Geometry) -> LayerZero:
        group = Group(tenant, geometry.model_id)
        if group not in self._layer_zero:
            self._layer_zero[group] = LayerZero(geometry)
        return self._layer_zero[group]

    def exact_key(self, group: Group, context: str, start: int) -> str:
        """KV of tokens [start, end) behind exactly the tokens before; `context` is the key of all tokens to `end`."""
        return f"{group.tag}:exact:{context}:{start}"

    def keep_exact(self, key: str, kv: Tensor, pin: Pin = Pin.NONE) -> None:
        """Store exact KV; on disk too, where there is one: its key says all that is needed to use it after a restart."""
        self.tier.put(key, kv, pin)
        if self._disk is not None:
            self._disk.offer(key, kv)

    def promote(self, keys: Iterable[str]) -> None:
        """Bring exact KV that only the disk still has back into the host tier. Reads files: call it without a lock."""
        if self._disk is None:
            return
        for key in keys:
            if not self.tier.has(key) and (kv := self._disk.get(key)) is not None:
                try:
                    self.tier.put(key, kv)
                except KVCacheError:  # all of the tier is leased
                    return

    def bases(self, group: Group, sample: str) -> list[Base]:
        """Bases of a sample whose tensors are still here, oldest first, whatever placeholder they came from. Lost ones are
        forgotten."""
        known = self._bases.get((group, sample))
        if not known:
            return []
        for origin in [o for o, base in known.items() if not self.tier.has(base.key)]:
            del known[origin]
        if not known:
            del self._bases[group, sample]
        return list(known.values())

    def add_base(self, group: Group, sample: str, base: Base) -> None:
        self._bases[group, sample][base.origin] = base
        if len(self._bases) >= self._prune_at:
            for known in list(self._bases):
                self.bases(*known)
            self._prune_at = 2 * len(self._bases) + 1024

    def base_key(self, group: Group, placeholder: str, sample: str, origin: str) -> str:
        return f"{group.tag}:base:{origin}:{placeholder}:{sample}"

    def fixed_mean(self, tenant: str, template_id: str, ordinal: int) -> RunningMean | None:
        return self.fixed.get((tenant, template_id, ordinal))

    def add_anchor(self, slot: Slot, sample: str, base_key: str, offset: Tensor, following: Tensor | None, start: int) -> None:
        """Keep full offsets, for the paper policy and for refits."""
        stem = f"{slot.pool.key}:offset:{sample}:{slot.name}"
        placeholder_key, following_key = f"{stem}:placeholder", f"{stem}:following" if following is not None else None
        self.tier.put(placeholder_key, offset)
        if following is not None and following_key is not None:
            self.tier.put(following_key, following)
        tensors = self.anchors.setdefault((slot.pool, sample), AnchorTensors(base_key))
        tensors.offsets[slot.name] = Offsets(placeholder_key, following_key, start)

    def drop_anchor(self, pool: PoolKey, sample: str) -> None:
        """The pruned anchor's tensors are freed when the last lease on them ends."""
        tensors = self.anchors.pop((pool, sample), None)
        if tensors is not None:
            self.tier.remove(tensors.keys())

    def norm_in_band(self, slot: Slot, relative_norm: float) -> bool:
        """Within three times the 95 % quantile of what this slot has seen; anything goes for the first eight."""
        seen = self._norms.get(slot, ())
        return len(seen) < 8 or relative_norm <= 3.0 * sorted(seen)[int(0.95 * (len(seen) - 1))]

    def predictor(self, slot: Slot, relative_norm: float) -> RidgeStatistics:
        """The slot's statistics, to which a sample with this offset norm is about to be added."""
        self._norms.setdefault(slot, deque(maxlen=64)).append(relative_norm)
        return self.statistics.setdefault(slot, RidgeStatistics())

    def samples(self, slot: Slot) -> int:
        """How many samples the slot has learned from."""
        found = self.statistics.get(slot)
        return found.samples if found is not None else 0

    def learn_fixed(self, tenant: str, template_id: str, ordinal: int, kv: Tensor) -> None:
        self.fixed.setdefault((tenant, template_id, ordinal), RunningMean()).add(kv)

    def missing_fixed(self, tenant: str, template: Template, exact_prefix: bool) -> list[int]:
        """Ordinals of fixed segments without any KV; a leading one has it when its prefix is stored."""
        fixed = [i for i, s in enumerate(template.segments) if not hasattr(s, "name")]
        return [i for i in fixed if not (exact_prefix if i == 0 else (tenant, template.template_id, i) in self.fixed)]

    @property
    def predictor_bytes(self) -> int:
        """What the guarded policy holds beside the samples themselves."""
        return sum(s.nbytes for s in self.statistics.values()) + sum(m.nbytes for m in self.fixed.values())

    @property
    def anchor_bytes(self) -> int:
        """What the paper policy holds: bases and full offsets of its anchors."""
        keys = {key for tensors in self.anchors.values() for key in (tensors.base, *tensors.keys())}
        return sum(self.tier.size(key) for key in keys) + sum(base.kv.nbytes for base in self.fixed_bases.values())


def relative_norm(base: Tensor, offset: Tensor) -> float:
    """‖offset‖ / ‖base‖ beyond layer 0."""
    return float(offset[1:].float().norm() / base[1:].float().norm().clamp_min(1e-6))
