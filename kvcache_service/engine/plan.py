"""Values of one turn: what was decided per segment, and where its KV comes from."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache_service.catalog.keys import PoolKey
from kvcache_service.kernels.codec import KV
from kvcache_service.predictor import LinearMap
from kvcache_service.prompt import CHUNK, Policy, Span


class Action(enum.Enum):
    """Names equal the protocol's."""

    EXACT = enum.auto()
    REUSE = enum.auto()
    DENSE = enum.auto()


class Reason(enum.Enum):
    """Why a segment or a turn is dense. Names equal the protocol's; NONE is its UNSPECIFIED."""

    NONE = enum.auto()
    POLICY_OFF = enum.auto()
    ROLE = enum.auto()
    MISS = enum.auto()
    WARMING = enum.auto()
    LENGTH = enum.auto()
    ENTROPY = enum.auto()
    TAINT = enum.auto()
    QUALITY = enum.auto()
    RESIDUAL = enum.auto()
    COST = enum.auto()
    SERVICE = enum.auto()
    UNCALIBRATED = enum.auto()
    NOVELTY = enum.auto()


@dataclass(frozen=True)
class Blending:
    """Variations of the paper policy, for comparison; the defaults are the service's own.

    max_anchors: oldest first, 0 for all. reference_weights, absolute_frame: as the reference code has them.
    """

    gamma: float | None = None
    max_anchors: int = 0
    reference_weights: bool = False
    absolute_frame: bool = False
    rotation: bool = True
    placeholder_offsets: bool = True
    following_offsets: bool = True


@dataclass(frozen=True)
class Trial:
    """A turn that measures: planned as if calibrated, and nothing is learned from it.

    boundary, trailing: recomputed tokens, where they differ from the settings. ignore_exact: exact KV behind the role
    prompt counts as absent, so that a turn can be audited after it has been settled.
    """

    boundary: int | None = None
    trailing: int | None = None
    ignore_exact: bool = False
    blending: Blending = Blending()


@dataclass(frozen=True)
class Repositioned:
    """base rotated into place, nothing added. Exact where the base was computed behind this very prefix."""

    base: KV


@dataclass(frozen=True)
class Blended:
    """base + Σ w·offset (paper)."""

    base: KV
    offsets: tuple[KV, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Mapped:
    """base + linear map of base (guarded)."""

    base: KV
    map: LinearMap


Source = Repositioned | Blended | Mapped


@dataclass(frozen=True)
class SegmentPlan:
    """One segment of one turn.

    source: None for a dense segment; it may cover fewer leading tokens than the span (the rest is fresh).
    fresh: absolute positions that the worker computes; probe: those of them whose residual is judged.
    keys: blobs that the source reads; uses: anchors that carried weight in it.
    """

    span: Span
    action: Action
    reason: Reason = Reason.NONE
    source: Source | None = None
    fresh: tuple[int, ...] = ()
    probe: tuple[int, ...] = ()
    anchors: int = 0
    taint: int = 0
    novelty: float = 0.0  # of the sample to the slot's predictor
    entropy: float = 0.0  # of the paper's weights relative to log|A|; trials only
    keys: frozenset[str] = frozenset()
    uses: tuple[tuple[PoolKey, str], ...] = ()

    @property
    def corrected(self) -> bool:
        return isinstance(self.source, Mapped)


@dataclass(frozen=True)
class Plan:
    """What a turn may take from the cache."""

    policy: Policy
    segments: tuple[SegmentPlan, ...]
    predicted_reuse: float = 0.0
    predicted_dense: float = 0.0
    contexts: Sequence[str] = field(default=())

    @property
    def keys(self) -> frozenset[str]:
        """The blobs to lease: exactly those that assembly will read."""
        return frozenset().union(*(s.keys for s in self.segments))

    @property
    def uses(self) -> tuple[tuple[PoolKey, str], ...]:
        """The anchors that carried weight."""
        return tuple(use for s in self.segments for use in s.uses)

    @property
    def prompt_tokens(self) -> int:
        return self.segments[-1].span.end

    @property
    def fresh(self) -> list[int]:
        return [p for s in self.segments for p in s.fresh]

    @property
    def probe(self) -> list[int]:
        return [p for s in self.segments for p in s.probe]

    @property
    def claimable_prefix(self) -> int:
        """Leading tokens that nobody has to compute, for engines that can only skip a prefix."""
        return min(self.fresh, default=self.prompt_tokens)

    @property
    def approximated(self) -> bool:
        return any(s.action is Action.REUSE for s in self.segments)

    @property
    def corrected(self) -> tuple[SegmentPlan, ...]:
        """Placeholders whose base a predictor corrects."""
        return tuple(s for s in self.segments if s.corrected)

    @property
    def reason(self) -> Reason:
        """The first reason for a dense segment; a turn is counted under one."""
        return next((s.reason for s in self.segments if s.action is Action.DENSE), Reason.NONE)

    @property
    def taint(self) -> int:
        """Taint depth of KV computed on top of this plan: 0 on exact and dense KV only."""
        return 1 + max(s.taint for s in self.segments) if self.approximated else 0

    def new_chunks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Exact policy: whole chunks of prompt and answer within columns [start, end) that are not stored yet."""
        stored = {s.span.start for s in self.segments if s.action is Action.EXACT}
        first = -(-start // CHUNK) * CHUNK
        return [(at, at + CHUNK) for at in range(first, end - CHUNK + 1, CHUNK) if at not in stored]

    def pure(self) -> list[SegmentPlan]:
        """Dense segments with nothing approximated before them: their observed KV is true dense KV."""
        out = []
        for segment in self.segments:
            if segment.action is Action.REUSE:
                break
            if segment.action is Action.DENSE:
                out.append(segment)
        return out
