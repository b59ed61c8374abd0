"""Host tier: immutable KV tensors in one arena, by segmented LRU, pinned while leased.

What has been used since it was stored is protected: tensors that nobody asks for again pass by it. Eviction takes the least
recently used that was never used, as long as those hold their share or more; then the least recently used of the protected ones;
then soft pins. Hard pins stay.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.tiers.arena import Arena

Mark = TypeVar("Mark")
PROTECTED = 0.8  # share of what is not pinned; the rest is for what has still to prove its use
HARD = 0.5  # share of the budget that hard pins may take


class Pin(enum.Enum):
    """NONE: by use; SOFT: evicted last; HARD: never evicted."""

    NONE = enum.auto()
    SOFT = enum.auto()
    HARD = enum.auto()


class Held(NamedTuple):
    """What is told of a blob. Not the blob: whoever kept it would keep its memory from being used again."""

    key: str
    shape: torch.Size
    nbytes: int


class Lease:
    """Holds exactly the blobs named at its birth, until released. Releasing twice is harmless."""

    def __init__(self, tier: HostTier, blobs: dict[int, Tensor]) -> None:
        self._tier = tier
        self.blobs = blobs  # by address

    def release(self) -> None:
        self._tier.release(self)


@dataclass(eq=False)
class _Entry:
    blob: Tensor
    used_at: float


class _Segment(OrderedDict[str, _Entry]):
    """Least recently used first. bytes: of all its blobs."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def add(self, key: str, entry: _Entry) -> None:
        self[key] = entry
        self.bytes += entry.blob.nbytes

    def take(self, key: str) -> _Entry | None:
        entry = self.pop(key, None)
        if entry is not None:
            self.bytes -= entry.blob.nbytes
        return entry


class HostTier:
    """Thread-safe. A blob never changes; a removed or evicted blob stays readable for whoever leased it.

    budget: bytes of the arena, which holds blobs and what is being received alike. owner: whose a key is; share: bytes that one
    owner's blobs may hold, whose own are evicted beyond it; None: no limit. idle_seconds: what was not used for so
    long goes; None: never. touch: take all pages of the arena from the system at once. A put that cannot fit raises QUOTA and
    changes nothing.
    """

    def __init__(
        self,
        budget: int,
        *,
        owner: Callable[[str], str] = lambda key: "",
        share: int | None = None,
        idle_seconds: float | None = None,
        touch: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = Arena(budget, touch=touch)
        self._owner = owner
        self._share = share
        self._owned: Counter[str] = Counter()  # owner -> bytes of his blobs
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._fresh, self._protected = _Segment(), _Segment()  # not used, and used, since they were stored
        self._pinned = {Pin.SOFT: _Segment(), Pin.HARD: _Segment()}
        self._segments = (self._fresh, self._protected, *self._pinned.values())
        self._leases: set[Lease] = set()
        self._held: Counter[int] = Counter()  # address of a leased blob -> leases
        self._leased_bytes = 0
        self._on_change: Callable[[Held, bool], None] = lambda held, gone: None
        self.evictions = 0

    @property
    def budget(self) -> int:
        return self._arena.size

    @property
    def share(self) -> int | None:
        """Bytes that one owner's blobs may hold; None: no limit."""
        return self._share

    def owned(self) -> dict[str, int]:
        """Bytes of every owner's blobs."""
        with self._lock:
            return dict(self._owned)

    @property
    def memory(self) -> Tensor:
        """The arena, uint8."""
        return self._arena.memory

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the tier, contents undefined; room is made for it. It is free again when its last tensor has gone."""
        with self._lock:
            return self._empty(shape, dtype)

    def put(self, key: str, blob: Tensor, pin: Pin = Pin.NONE) -> None:
        """Store or replace. The old bytes of a replaced key stay with their leases. A blob from elsewhere is copied in."""
        with self._lock:
            if pin is Pin.HARD:
                self._refuse_hard(key, blob.nbytes)
            self._make_share(key, blob.nbytes)
            mine = blob
            if not self._arena.owns(blob):
                mine = self._empty(blob.shape, blob.dtype)
                mine.copy_(blob)
            replaced = self._drop(key) is not None
            self._add(key, _Entry(mine, self._clock()), pin)
            if not replaced:
                self._on_change(_held(key, mine), False)

    def get(self, key: str) -> Tensor | None:
        """The blob, marked as used; None is a miss."""
        with self._lock:
            entry = self._use(key)
            return entry.blob if entry is not None else None

    def peek(self, key: str) -> Tensor | None:
        """The blob, not marked as used; None is a miss."""
        with self._lock:
            entry = self._find(key)
            return entry.blob if entry is not None else None

    def has(self, key: str) -> bool:
        with self._lock:
            return self._find(key) is not None

    def pinned(self, key: str) -> Pin:
        """How the blob is kept; NONE where it is absent."""
        with self._lock:
            return next((kind for kind, held in self._pinned.items() if key in held), Pin.NONE)

    def size(self, key: str) -> int:
        """Bytes under the key; 0 when it is absent."""
        with self._lock:
            return self._stored(key)

    def pin(self, key: str, pin: Pin, *, weaken: bool = True) -> bool:
        """Change how a blob is kept; False when it is absent. weaken: also where it is pinned harder already.

        Raises QUOTA for too many hard pins.
        """
        with self._lock:
            entry = self._find(key)
            if entry is None:
                return False
            if not weaken and any(key in held for kind, held in self._pinned.items() if kind.value > pin.value):
                return True
            if pin is Pin.HARD:
                self._refuse_hard(key, entry.blob.nbytes)
            self._drop(key)
            self._add(key, entry, pin)
            return True

    def lease(self, keys: Iterable[str]) -> Lease:
        """Hold all of `keys`, or raise MISS and hold none."""
        with self._lock:
            entries = [self._use(key) for key in frozenset(keys)]
            absent = entries.count(None)
            if absent:
                raise KVCacheError(Code.MISS, f"{absent} tensors are gone", fix="prefill, or open the turn again")
            blobs = {entry.blob.data_ptr(): entry.blob for entry in entries if entry is not None}
            self._leased_bytes += sum(blob.nbytes for address, blob in blobs.items() if not self._held[address])
            self._held.update(blobs.keys())
            lease = Lease(self, blobs)
            self._leases.add(lease)
            return lease

    def release(self, lease: Lease) -> None:
        with self._lock:
            if lease not in self._leases:
                return
            self._leases.remove(lease)
            self._held.subtract(lease.blobs.keys())
            for address, blob in lease.blobs.items():
                if not self._held[address]:
                    del self._held[address]
                    self._leased_bytes -= blob.nbytes
            lease.blobs = {}

    def remove(self, keys: Iterable[str]) -> None:
        """Forget blobs; their memory is freed when the last lease ends. Unknown keys are ignored."""
        with self._lock:
            for key in keys:
                self._forget(key)

    def holdings(self, owner: str, mark: Callable[[], Mark]) -> tuple[list[Held], Mark]:
        """All that an owner has here, and what mark() gives while nothing can change."""
        with self._lock:
            mine = [(key, entry) for segment in self._segments for key, entry in segment.items() if self._owner(key) == owner]
            return [_held(key, entry.blob) for key, entry in mine], mark()

    def watch(self, on_change: Callable[[Held, bool], None]) -> None:
        """Be told of every blob that comes or, True, goes, under the tier's lock: on_change must be quick and not call back."""
        self._on_change = on_change

    def expire(self) -> None:
        """Drop what was not used for `idle_seconds`, but for pins and leases."""
        if self._idle_seconds is None:
            return
        with self._lock:
            before = self._clock() - self._idle_seconds
            for segment in (self._fresh, self._protected):
                for key in [k for k, entry in segment.items() if entry.used_at <= before and not self._leased(entry)]:
                    self._forget(key)

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena in use: blobs, and what is being received."""
        return self._arena.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._arena.largest_free_bytes

    @property
    def leased_bytes(self) -> int:
        return self._leased_bytes

    @property
    def pinned_bytes(self) -> int:
        with self._lock:
            return sum(segment.bytes for segment in self._pinned.values())

    @property
    def leases(self) -> int:
        return len(self._leases)

    def check(self) -> None:
        """Assert the invariants; for tests and post-mortems."""
        self._arena.check()
        with self._lock:
            keys = [key for segment in self._segments for key in segment]
            assert len(keys) == len(set(keys))
            stored = {e.blob.data_ptr(): e.blob for segment in self._segments for e in segment.values()}
            leased = {address: blob for lease in self._leases for address, blob in lease.blobs.items()}
            assert all(self._arena.owns(blob) for blob in (stored | leased).values())
            assert sum(blob.nbytes for blob in (stored | leased).values()) <= self._arena.used_bytes
            assert all(segment.bytes == sum(entry.blob.nbytes for entry in segment.values()) for segment in self._segments)
            held = Counter[str]()
            for segment in self._segments:
                for key, entry in segment.items():
                    held[self._owner(key)] += entry.blob.nbytes
            assert held == self._owned
            assert self._held == Counter(address for lease in self._leases for address in lease.blobs)
            assert self._leased_bytes == sum(blob.nbytes for blob in leased.values())

    def _find(self, key: str) -> _Entry | None:
        return next((segment[key] for segment in self._segments if key in segment), None)

    def _stored(self, key: str) -> int:
        entry = self._find(key)
        return entry.blob.nbytes if entry is not None else 0

    def _add(self, key: str, entry: _Entry, pin: Pin) -> None:
        segment = self._fresh if pin is Pin.NONE else self._pinned[pin]
        segment.add(key, entry)
        self._owned[self._owner(key)] += entry.blob.nbytes

    def _use(self, key: str) -> _Entry | None:
        """Its first use protects a blob; the least recently used of the protected ones makes room."""
        entry = self._fresh.take(key)
        if entry is not None:
            self._protected.add(key, entry)
        for segment in self._segments[1:]:
            if key in segment:
                segment.move_to_end(key)
                entry = segment[key]
        if entry is not None:
            entry.used_at = self._clock()
        return entry

    def _drop(self, key: str) -> _Entry | None:
        for segment in self._segments:
            entry = segment.take(key)
            if entry is not None:
                self._owned[self._owner(key)] -= entry.blob.nbytes
                return entry
        return None

    def _forget(self, key: str) -> None:
        entry = self._drop(key)
        if entry is not None:
            self._on_change(_held(key, entry.blob), True)

    def _leased(self, entry: _Entry) -> bool:
        return entry.blob.data_ptr() in self._held

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        block = self._arena.take(size)
        if block is None:
            self._refuse_hopeless(size)
        while block is None:
            victim = next(self._evictable(), None)
            if victim is None:
                raise _full(size)
            self._forget(victim)
            self.evictions += 1
            block = self._arena.take(size)
        return block.view(dtype).view(*shape)

    def _make_share(self, key: str, size: int) -> None:
        """Evict the owner's own blobs until one more of `size` bytes is within his share. Raises QUOTA before any has gone."""
        if self._share is None:
            return
        owner = self._owner(key)
        beyond = self._owned[owner] + size - self._stored(key) - self._share
        victims = []
        for victim in self._evictable():
            if beyond <= 0:
                break
            if victim != key and self._owner(victim) == owner:
                victims.append(victim)
                beyond -= self._stored(victim)
        if beyond > 0:
            raise KVCacheError(
                Code.QUOTA,
                f"the tenant would hold {self._share + beyond} bytes of {self._share}",
                fix="end turns that hold leases, unpin, or raise quota_host_bytes",
            )
        for victim in victims:
            self._forget(victim)
            self.evictions += 1

    def _evictable(self) -> Iterator[str]:
        """What may go, first what goes first."""
        ordered = [self._fresh, self._protected]
        if self._fresh.bytes < (1 - PROTECTED) * (self._fresh.bytes + self._protected.bytes):
            ordered.reverse()
        segments = (*ordered, self._pinned[Pin.SOFT])
        return (key for segment in segments for key, entry in segment.items() if not self._leased(entry))

    def _refuse_hopeless(self, size: int) -> None:
        """Evict nothing for what cannot fit."""
        hard = sum(entry.blob.nbytes for entry in self._pinned[Pin.HARD].values() if not self._leased(entry))
        if size > self.budget - hard - self._leased_bytes:
            raise _full(size)

    def _refuse_hard(self, key: str, size: int) -> None:
        hard = self._pinned[Pin.HARD]
        held = sum(entry.blob.nbytes for other, entry in hard.items() if other != key)
        if held + size > HARD * self.budget:
            raise KVCacheError(
                Code.QUOTA,
                f"hard pins would hold {held + size} bytes of {self.budget}",
                field="pin",
                fix=f"pin softly, or unpin: hard pins may take {HARD:.0%} of the host tier",
            )


def _held(key: str, blob: Tensor) -> Held:
    return Held(key, blob.shape, blob.nbytes)


def _full(size: int) -> KVCacheError:
    return KVCacheError(
        Code.QUOTA, f"{size} bytes do not fit into the host tier", fix="raise host_bytes or end turns that hold leases"
    )
