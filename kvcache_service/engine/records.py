"""What the memory knows of its blobs: plain values, on disk and in memory alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvcache_service.catalog.keys import Group, PoolKey


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


class Place(NamedTuple):
    """A fixed segment: its ordinal in a template."""

    group: Group
    template_id: str
    ordinal: int


@dataclass(frozen=True)
class FixedBase:
    """Canonical KV of a fixed segment in its first dense context, where it began at `start`. key: names these very bytes."""

    kv: Tensor
    start: int
    key: str


@dataclass(frozen=True)
class Offsets:
    """What one anchor holds for one slot: blob keys of the base that its offset was measured against, and of the offset.

    The placeholder began at `start`; its first `length` tokens have offsets. following: the offset of the fixed segment after
    it, against the FixedBase `fixed`.
    """

    base: str
    placeholder: str
    following: str | None
    fixed: str | None
    start: int
    length: int

    @property
    def owned(self) -> tuple[str, ...]:
        """Blobs that nobody else needs."""
        return (self.placeholder, self.following) if self.following else (self.placeholder,)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.base, *self.owned)
