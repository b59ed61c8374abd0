"""The worker's side of turn buffers: mapped shared memory, or private memory filled from a stream."""

from __future__ import annotations

import mmap
import os

from kvcache_client.errors import CacheError


class Buffers:
    """Keeps mappings and private buffers between turns, so that their pages stay resident."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}
        self._free: list[bytearray] = []

    def map(self, path: str, size: int) -> memoryview:
        """The service's buffer file, writable, without a copy. Raises CacheError when it cannot be opened."""
        mapped = self._mapped.get(path)
        if mapped is None:
            try:
                handle = os.open(path, os.O_RDWR)
            except OSError as error:
                raise CacheError("SHARED_MEMORY", f"{path}: {error.strerror}", fix="use transport='stream'") from error
            try:
                mapped = self._mapped[path] = mmap.mmap(handle, size)
            finally:
                os.close(handle)
        return memoryview(mapped)

    def take(self, size: int) -> bytearray:
        """Private memory of at least `size` bytes; contents are undefined."""
        for index, buffer in enumerate(self._free):
            if len(buffer) >= size:
                return self._free.pop(index)
        return bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        self._free = sorted([*self._free, buffer], key=len)[-4:]

    def forget(self) -> None:
        """Drop the mappings of an ended session; memory still in use by a turn stays valid."""
        self._mapped.clear()
