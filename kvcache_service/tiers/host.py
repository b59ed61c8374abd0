"""Host tier: immutable KV tensors under a byte budget, least recently used first out, pinned while leased."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable

from torch import Tensor

from kvcache_service.errors import Code, KVCacheError


class Lease:
    """Pins exactly the blobs named at its birth, until released. Releasing twice is harmless."""

    def __init__(self, tier: HostTier, keys: frozenset[str], number: int) -> None:
        self._tier = tier
        self.keys = keys
        self.number = number

    def release(self) -> None:
        self._tier.release(self)


class HostTier:
    """Thread-safe. A blob never changes; a removed or evicted blob stays readable for whoever leased it.

    budget: bytes. Blobs under a lease are never evicted; a put that cannot fit raises QUOTA and changes nothing.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._blobs: OrderedDict[str, Tensor] = OrderedDict()
        self._condemned: dict[str, Tensor] = {}  # removed while leased: readable until the last lease ends
        self._pins: Counter[str] = Counter()
        self._leases: dict[int, Lease] = {}
        self._numbers = itertools.count()
        self._used = 0
        self.evictions = 0

    def put(self, key: str, blob: Tensor) -> None:
        """Store or replace. The old bytes of a replaced key stay with their leases."""
        with self._lock:
            self._make_room(blob.nbytes)
            if key in self._blobs:
                self._drop(key)
            self._blobs[key] = blob
            self._used += blob.nbytes

    def get(self, key: str) -> Tensor | None:
        """The blob, marked as recently used; None is a miss."""
        with self._lock:
            blob = self._blobs.get(key)
            if blob is not None:
                self._blobs.move_to_end(key)
            return blob

    def has(self, key: str) -> bool:
        with self._lock:
            return key in self._blobs

    def size(self, key: str) -> int:
        """Bytes under the key; 0 when it is absent."""
        with self._lock:
            blob = self._blobs.get(key)
            return blob.nbytes if blob is not None else 0

    def lease(self, keys: Iterable[str]) -> Lease:
        """Pin all of `keys`, or raise MISS and pin none."""
        wanted = frozenset(keys)
        with self._lock:
            absent = sorted(wanted - self._blobs.keys())
            if absent:
                raise KVCacheError(Code.MISS, f"{len(absent)} tensors are gone", fix="prefill, or open the turn again")
            for key in wanted:
                self._pins[key] += 1
                self._blobs.move_to_end(key)
            lease = Lease(self, wanted, next(self._numbers))
            self._leases[lease.number] = lease
            return lease

    def release(self, lease: Lease) -> None:
        with self._lock:
            if self._leases.pop(lease.number, None) is None:
                return
            for key in lease.keys:
                self._pins[key] -= 1
                if not self._pins[key]:
                    del self._pins[key]
                    blob = self._condemned.pop(key, None)
                    if blob is not None:
                        self._used -= blob.nbytes

    def remove(self, keys: Iterable[str]) -> None:
        """Forget blobs; their memory is freed when the last lease ends. Unknown keys are ignored."""
        with self._lock:
            for key in keys:
                if key in self._blobs:
                    self._drop(key)

    def _drop(self, key: str) -> None:
        blob = self._blobs.pop(key)
        if self._pins.get(key) and key not in self._condemned:
            self._condemned[key] = blob
        else:
            self._used -= blob.nbytes

    def _make_room(self, size: int) -> None:
        free = self.budget - self._used
        victims = []
        if size > free:
            for key, blob in self._blobs.items():
                if not self._pins.get(key):
                    victims.append(key)
                    free += blob.nbytes
                    if size <= free:
                        break
        if size > free:
            raise KVCacheError(
                Code.QUOTA, f"{size} bytes do not fit into the host tier", fix="raise host_bytes or end turns that hold leases"
            )
        for key in victims:
            self._drop(key)
        self.evictions += len(victims)

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def leased_bytes(self) -> int:
        with self._lock:
            return sum(self._blob(key).nbytes for key in self._pins)

    @property
    def leases(self) -> int:
        return len(self._leases)

    def _blob(self, key: str) -> Tensor:
        return self._condemned[key] if key in self._condemned else self._blobs[key]

    def check(self) -> None:
        """Assert the invariants; for tests and post-mortems."""
        with self._lock:
            assert self._used == sum(b.nbytes for b in [*self._blobs.values(), *self._condemned.values()])
            assert self._used <= self.budget
            assert +self._pins == Counter(k for lease in self._leases.values() for k in lease.keys)
            assert self._condemned.keys() <= self._pins.keys()
