"""A device that is the CPU: the kernels' own source compiled by g++, threads as loops, streams that are as lazy as they may be.

Work waits in its stream until somebody synchronises with it or waits for its event, so that a forgotten wait shows as wrong
numbers. Memory is poisoned and has guard bands.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvcache_service.kernels.cuda.runtime import DeviceFull

SHIM = """
#define __global__
#define __device__
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
struct Dim { unsigned x, y; };
thread_local Dim blockIdx, threadIdx, gridDim, blockDim;
typedef long long W;
typedef void Kernel(W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W);  // as many words as any kernel takes
extern "C" void run(Kernel *kernel, unsigned x, unsigned y, unsigned block, const W *a) {
  gridDim = {x, y}, blockDim = {block, 1};
  for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y) for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x)
      kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17]);
}
"""
_WORDS = 18
_GUARD = 256
_POISON = 0xFF  # NaN in every dtype


class HostMemory:
    def __init__(self, size: int) -> None:
        self._bytes = np.full(size + 3 * _GUARD, _POISON, np.uint8)
        self._start = -self._bytes.ctypes.data % _GUARD + _GUARD
        self.address, self.size = self._bytes.ctypes.data + self._start, size

    def check(self) -> None:
        """Nobody wrote beside it."""
        assert (self._bytes[: self._start] == _POISON).all()
        assert (self._bytes[self._start + self.size :] == _POISON).all()

    def __del__(self) -> None:
        self.check()


class HostEvent:
    def __init__(self, stream: HostStream, place: int) -> None:
        self._stream, self._place = stream, place

    def synchronize(self) -> None:
        self._stream.run(self._place)


class HostStream:
    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._done = 0

    def copy(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        assert rows == 1 or min(target_pitch, source_pitch) >= width

        def copy() -> None:
            for row in range(rows):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

        self._waiting.append(copy)

    def launch(self, kernel: Any, grid: tuple[int, int], block: int, arguments: tuple[int, ...]) -> None:
        words = (ctypes.c_longlong * _WORDS)(*arguments)
        self._waiting.append(lambda: kernel(*grid, block, words))

    def record(self) -> HostEvent:
        return HostEvent(self, self._done + len(self._waiting))

    def wait(self, event: HostEvent) -> None:
        self._waiting.append(event.synchronize)

    def synchronize(self) -> None:
        self.run(self._done + len(self._waiting))

    def run(self, place: int) -> None:
        while self._done < place:
            self._done += 1
            self._waiting.pop(0)()


class HostRuntime:
    """size: bytes of its memory, as the device has them; pinnable: the system lets memory be pinned."""

    name = "host shim"

    def __init__(self, folder: Path, *, size: int = 1 << 40, pinnable: bool = True) -> None:
        self._folder, self._size, self._pinnable = folder, size, pinnable
        self.pinned: set[int] = set()

    def free_bytes(self) -> int:
        return self._size

    def allocate(self, size: int) -> HostMemory:
        if size > self._size:
            raise DeviceFull(f"{size} of {self._size} bytes")
        return HostMemory(size)

    def compile(self, source: str, options: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Any]:
        path = self._folder / (hashlib.sha256((source + str(options)).encode()).hexdigest()[:16] + ".so")
        if not path.exists():
            flags = ["-O2", "-shared", "-fPIC", "-x", "c++", *(o.replace("--std", "-std") for o in options)]
            subprocess.run(["g++", *flags, "-o", str(path), "-"], input=SHIM + source, text=True, check=True)
        library = ctypes.CDLL(str(path))
        return {name: partial(library.run, getattr(library, name)) for name in names}

    def stream(self) -> HostStream:
        return HostStream()

    def pin(self, address: int, size: int) -> bool:
        if self._pinnable:
            self.pinned.add(address)
        return self._pinnable

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)
