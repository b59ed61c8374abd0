"""One region of memory that tensors are cut from. Freed blocks keep their pages: writing into them again costs no page fault."""

from __future__ import annotations

import bisect
import mmap
import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

ALIGN = 64  # bytes: a cache line


class Arena:
    """Thread-safe. A block lives as long as any tensor on it, whoever holds that tensor; then it is free again.

    size: bytes. Best fit, lowest address first; free neighbours merge at once, so that free space does not crumble.
    touch: take all pages from the system now rather than at their first use.
    """

    def __init__(self, size: int, *, touch: bool = False) -> None:
        self.size = size // ALIGN * ALIGN
        mapped = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_HUGEPAGE)  # a page fault per 2 MiB instead of one per 4 KiB
        self._region = np.frombuffer(mapped, np.uint8)
        if touch:
            self._region.fill(0)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(self.size, 0)]  # (bytes, start), sorted
        self._starts: dict[int, int] = {0: self.size}  # of free blocks: start -> bytes
        self._ends: dict[int, int] = {self.size: 0}  # of free blocks: end -> start
        # Blocks whose last tensor has gone. A finalizer may run anywhere, even within `take`: it must not need the lock.
        self._returned: deque[tuple[int, int]] = deque()
        self._used = 0

    def take(self, size: int) -> Tensor | None:
        """`size` bytes, uint8, contents undefined; None when no free block is large enough."""
        wanted = max(ALIGN, -(-size // ALIGN) * ALIGN)
        with self._lock:
            self._collect()
            index = bisect.bisect_left(self._free, (wanted, 0))
            if index == len(self._free):
                return None
            length, start = self._free[index]
            self._remove(start, length)
            if length > wanted:
                self._add(start + wanted, length - wanted)
            self._used += wanted
        block = self._region[start : start + size]
        weakref.finalize(block, self._returned.append, (start, wanted)).atexit = False
        return torch.from_numpy(block)

    @property
    def memory(self) -> Tensor:
        """All of it, uint8."""
        return torch.from_numpy(self._region)

    def owns(self, tensor: Tensor) -> bool:
        """The tensor lies here."""
        return 0 <= tensor.untyped_storage().data_ptr() - self._region.ctypes.data < max(1, self.size)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._used

    @property
    def largest_free_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._free[-1][0] if self._free else 0

    def check(self) -> None:
        """Assert the invariants; for tests and post-mortems."""
        with self._lock:
            self._collect()
            assert self._free == sorted((length, start) for start, length in self._starts.items())
            assert self._ends == {start + length: start for start, length in self._starts.items()}
            assert not self._starts.keys() & self._ends.keys(), "free neighbours are merged"
            assert self._used + sum(self._starts.values()) == self.size

    def _collect(self) -> None:
        while self._returned:
            start, length = self._returned.popleft()
            self._used -= length
            if start in self._ends:
                before = self._ends[start]
                size = self._starts[before]
                self._remove(before, size)
                start, length = before, size + length
            if start + length in self._starts:
                after = self._starts[start + length]
                self._remove(start + length, after)
                length += after
            self._add(start, length)

    def _add(self, start: int, length: int) -> None:
        bisect.insort(self._free, (length, start))
        self._starts[start] = length
        self._ends[start + length] = start

    def _remove(self, start: int, length: int) -> None:
        del self._free[bisect.bisect_left(self._free, (length, start))]
        del self._starts[start], self._ends[start + length]
