"""Which host tensors lie on the device too: least recently used goes first, within a budget that counts all that is allocated."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

from torch import Tensor

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.kernels.cuda.runtime import DeviceFull, Memory, Runtime


class Resident:
    """Thread-safe. Host tensors that are kept here never change; a copy ends with its host tensor at the latest.

    budget: bytes. Evicted memory is free when the work that reads it has let go of it.
    """

    def __init__(self, runtime: Runtime, budget: int) -> None:
        self._runtime = runtime
        self.budget = budget
        self.evictions = 0
        self._lock = threading.Lock()
        self._copies: OrderedDict[int, Memory] = OrderedDict()  # by id of the host tensor
        self._used = 0
        # Finalizers may run anywhere, even within `take`: they must not need the lock.
        self._freed: deque[int] = deque()
        self._gone: deque[int] = deque()

    def take(self, size: int) -> Memory:
        """Memory for whoever holds it. Copies make room; raises QUOTA when nothing is left to go."""
        with self._lock:
            while True:
                self._collect()
                if self._used + size <= self.budget:
                    try:
                        memory = self._runtime.allocate(size)
                    except DeviceFull:
                        pass
                    else:
                        self._used += size
                        weakref.finalize(memory, self._freed.append, size).atexit = False
                        return memory
                if not self._copies:
                    raise KVCacheError(
                        Code.QUOTA,
                        f"{size} bytes do not fit onto the device beside {self._used} in use",
                        fix="raise device_bytes, or send fewer turns at once",
                    )
                self._copies.popitem(last=False)
                self.evictions += 1

    def copy(self, host: Tensor, size: int, upload: Callable[[Memory], None]) -> Memory:
        """The copy of a host tensor, made by `upload` unless it is there. `upload` must wait until it is complete."""
        with self._lock:
            self._collect()
            found = self._copies.get(id(host))
            if found is not None:
                self._copies.move_to_end(id(host))
                return found
        memory = self.take(size)
        upload(memory)
        with self._lock:
            self._collect()
            if id(host) not in self._copies:
                weakref.finalize(host, self._gone.append, id(host)).atexit = False
                self._copies[id(host)] = memory
            return self._copies[id(host)]

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._used

    def check(self) -> None:
        """Assert the invariants; for tests and post-mortems."""
        with self._lock:
            self._collect()
            assert sum(memory.size for memory in self._copies.values()) <= self._used <= self.budget

    def _collect(self) -> None:
        while self._gone:
            self._copies.pop(self._gone.popleft(), None)
        while self._freed:
            self._used -= self._freed.popleft()
