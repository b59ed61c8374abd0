"""The worker's side of turn buffers: mapped shared memory, or private memory filled from a stream."""

from __future__ import annotations

import mmap
import os
import threading

from kvcache_client.errors import CacheError


class Buffers:
    """Keeps mappings and private buffers between turns, so that their pages stay resident."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, mmap.mmap] = {}
        self._free: list[bytearray] = []

    def map(self, path: str, size: int) -> memoryview:
        """The service's buffer file, writable, without a copy. Raises CacheError when it cannot be opened."""
        with self._lock:
            mapped = self._mapped.get(path)
            if mapped is None:
                self._mapped = {p: m for p, m in self._mapped.items() if os.path.exists(p)}
                mapped = self._mapped[path] = _map(path, size)
            return memoryview(mapped)

    def take(self, size: int) -> bytearray:
        """Private memory of at least `size` bytes; contents are undefined."""
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(index)
        return bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        with self._lock:
            self._free = sorted([*self._free, buffer], key=len)[-4:]

    def forget(self) -> None:
        """Drop the mappings of an ended session; memory still in use by a turn stays valid."""
        with self._lock:
            self._mapped.clear()


def _map(path: str, size: int) -> mmap.mmap:
    try:
        handle = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(handle, size)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        raise CacheError("SHARED_MEMORY", f"{path}: {error}", fix="use transport='stream'") from error
