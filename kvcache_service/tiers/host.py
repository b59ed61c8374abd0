"""Host tier: immutable KV tensors under a byte budget, evicted by S3-FIFO, pinned while leased."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.tiers.admission import Admission


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
        self._blobs: dict[str, Tensor] = {}
        self._admission = Admission(budget)
        self._condemned: dict[str, Tensor] = {}  # removed while leased: readable until the last lease ends
        self._pins: Counter[str] = Counter()
        self._leases: dict[int, Lease] = {}
        self._numbers = itertools.count()
        self._used = 0
        self._pinned = 0  # bytes that no put can have
        self.evictions = 0

    def put(self, key: str, blob: Tensor) -> None:
        """Store or replace. The old bytes of a replaced key stay with their leases."""
        with self._lock:
            self._make_room(blob.nbytes)
            if key in self._blobs:
                self._drop(key)
            self._blobs[key] = blob
            self._admission.add(key, blob.nbytes)
            self._used += blob.nbytes
            self._pinned += blob.nbytes if self._pins.get(key) else 0

    def get(self, key: str) -> Tensor | None:
        """The blob, counted as used; None is a miss."""
        with self._lock:
            blob = self._blobs.get(key)
            if blob is not None:
                self._admission.hit(key)
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
                self._admission.hit(key)
                self._pinned += self._blobs[key].nbytes if self._pins[key] == 1 else 0
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
                    if key in self._blobs:
                        self._pinned -= self._blobs[key].nbytes
                    condemned = self._condemned.pop(key, None)
                    if condemned is not None:
                        self._used -= condemned.nbytes
                        self._pinned -= condemned.nbytes

    def remove(self, keys: Iterable[str]) -> None:
        """Forget blobs; their memory is freed when the last lease ends. Unknown keys are ignored."""
        with self._lock:
            for key in keys:
                if key in self._blobs:
                    self._drop(key)

    def _drop(self, key: str) -> None:
        self._admission.remove(key)
        blob = self._blobs.pop(key)
        if self._pins.get(key) and key not in self._condemned:
            self._condemned[key] = blob
        else:
            self._used -= blob.nbytes
            self._pinned -= blob.nbytes if self._pins.get(key) else 0

    def _make_room(self, size: int) -> None:
        if size > self.budget - self._pinned:
            raise KVCacheError(
                Code.QUOTA, f"{size} bytes do not fit into the host tier", fix="raise host_bytes or end turns that hold leases"
            )
        while size > self.budget - self._used:
            blob = self._blobs.pop(self._admission.victim(self._pins))
            self._used -= blob.nbytes
            self.evictions += 1

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
            held = [*self._condemned.values(), *(b for key, b in self._blobs.items() if self._pins.get(key))]
            assert self._pinned == sum(b.nbytes for b in held)
            assert +self._pins == Counter(k for lease in self._leases.values() for k in lease.keys)
            assert self._condemned.keys() <= self._pins.keys()
