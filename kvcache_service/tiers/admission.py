"""Which tensor goes when room is needed: S3-FIFO (Yang et al., SOSP 2023), by bytes.

New keys wait in a small queue; those that are used there move on to the main queue, the others leave, and only their names
are remembered for a while. So a flood of prompts that nobody asks for again passes by what is in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

SMALL_SHARE = 0.1  # of the budget: beyond it the small queue gives way first
MAX_HITS = 3
_REMEMBERED = 1024  # names of keys that left unused, or as many as the main queue holds


class Admission:
    """Order of eviction. Knows names and sizes only; not thread-safe."""

    def __init__(self, budget: int) -> None:
        self._small_limit = int(SMALL_SHARE * budget)
        self._small: OrderedDict[str, int] = OrderedDict()
        self._main: OrderedDict[str, int] = OrderedDict()
        self._ghost: OrderedDict[str, None] = OrderedDict()
        self._hits: dict[str, int] = {}
        self._small_bytes = 0

    def add(self, key: str, size: int) -> None:
        """A new key. One that left unused not long ago goes to the main queue at once."""
        self._hits[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = size
        else:
            self._small[key] = size
            self._small_bytes += size

    def hit(self, key: str) -> None:
        self._hits[key] = min(MAX_HITS, self._hits[key] + 1)

    def remove(self, key: str) -> None:
        del self._hits[key]
        if key in self._main:
            del self._main[key]
        else:
            self._small_bytes -= self._small.pop(key)

    def victim(self, pinned: Container[str]) -> str:
        """Takes the next key to evict out of the queues. Some key must not be pinned."""
        small_first = self._small_bytes > self._small_limit
        for take in (self._from_small, self._from_main) if small_first else (self._from_main, self._from_small, self._from_main):
            key = take(pinned)
            if key is not None:
                del self._hits[key]
                return key
        raise AssertionError("every key is pinned")

    def _from_small(self, pinned: Container[str]) -> str | None:
        for _ in range(len(self._small)):
            key, size = self._small.popitem(last=False)
            self._small_bytes -= size
            if not self._hits[key] and key not in pinned:
                self._ghost[key] = None
                while len(self._ghost) > max(_REMEMBERED, len(self._main)):
                    self._ghost.popitem(last=False)
                return key
            self._hits[key] = 0
            self._main[key] = size
        return None

    def _from_main(self, pinned: Container[str]) -> str | None:
        for _ in range((MAX_HITS + 1) * len(self._main)):
            key, size = self._main.popitem(last=False)
            if not self._hits[key] and key not in pinned:
                return key
            self._hits[key] = max(0, self._hits[key] - 1)
            self._main[key] = size
        return None
