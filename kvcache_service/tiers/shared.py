"""Shared-memory buffers of sessions: one directory per boot, one private file per buffer.

A session's buffers are reused turn after turn, so that their pages stay resident on both sides.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvcache_service.errors import Code, KVCacheError

_PREFIX = "kvcache-"
_LOCK = ".lock"
_GRAIN = 4 << 20  # buffers grow in steps, so that the next, slightly longer turn fits as well


@dataclass(eq=False)
class Buffer:
    """Bytes that one turn at a time writes into. path is "" when it is private memory (stream transport)."""

    path: str
    bytes: Tensor  # uint8 [capacity]
    capacity: int

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The leading bytes as a tensor; shares memory."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[:size].view(dtype).view(shape)


class Pinning(Protocol):
    """Whoever copies to and from host memory quickly once it knows of it."""

    def pin(self, memory: Tensor) -> None: ...

    def unpin(self, memory: Tensor) -> None: ...


class SharedDirectory:
    """Owns `root/kvcache-<boot>` (mode 0700); removes what dead services left under `root`.

    pinning: told of every buffer, from its birth until its file goes.
    """

    def __init__(self, root: Path, boot_id: str, pinning: Pinning | None = None) -> None:
        self._pinning = pinning
        self.path = root / f"{_PREFIX}{boot_id}"
        self.path.mkdir(mode=0o700, parents=True)
        self._lock = _hold(self.path)
        for other in root.glob(f"{_PREFIX}*"):
            if other != self.path and _abandoned(other):
                shutil.rmtree(other, ignore_errors=True)

    def create(self, capacity: int) -> Buffer:
        """A new file, mode 0600, its pages reserved. Raises QUOTA when shared memory is full."""
        path = self.path / f"{secrets.token_hex(16)}.kv"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, capacity)
            mapped = mmap.mmap(handle, capacity)
        except OSError as error:
            path.unlink()
            raise KVCacheError(
                Code.QUOTA, f"no shared memory for {capacity} bytes ({error.strerror})", fix=f"enlarge {self.path.parent}"
            ) from error
        finally:
            os.close(handle)
        buffer = Buffer(str(path), torch.frombuffer(mapped, dtype=torch.uint8), capacity)
        if self._pinning is not None:
            self._pinning.pin(buffer.bytes)
        return buffer

    def unlink(self, buffer: Buffer) -> None:
        if self._pinning is not None:
            self._pinning.unpin(buffer.bytes)
        Path(buffer.path).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _hold(directory: Path) -> int:
    handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _abandoned(directory: Path) -> bool:
    """True when no living service holds the directory's lock."""
    try:
        handle = os.open(directory / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


@dataclass(eq=False)
class BufferPool:
    """The buffers of one session. Not thread-safe by itself: the engine's lock guards it.

    limit: bytes over all buffers of the session. directory None: private memory for streams.
    """

    directory: SharedDirectory | None
    limit: int
    _free: list[Buffer] = field(default_factory=list)
    _taken: list[Buffer] = field(default_factory=list)

    def take(self, size: int) -> Buffer:
        """A buffer of at least `size` bytes: a free one, else a new one. Raises QUOTA over the limit."""
        fitting = [b for b in self._free if b.capacity >= size]
        if fitting:
            buffer = min(fitting, key=lambda b: b.capacity)
            self._free.remove(buffer)
        else:
            buffer = self._new(-(-size // _GRAIN) * _GRAIN)
        self._taken.append(buffer)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        self._taken.remove(buffer)
        self._free.append(buffer)

    def discard(self, buffer: Buffer) -> None:
        """Forget a buffer that its worker may still write into: it must never serve another turn."""
        self._taken.remove(buffer)
        self._unlink(buffer)

    def close(self) -> None:
        for buffer in [*self._free, *self._taken]:
            self._unlink(buffer)
        self._free.clear()
        self._taken.clear()

    @property
    def held_bytes(self) -> int:
        return sum(b.capacity for b in [*self._free, *self._taken])

    def _new(self, capacity: int) -> Buffer:
        while self._free and self.held_bytes + capacity > self.limit:
            self._unlink(self._free.pop())
        if self.held_bytes + capacity > self.limit:
            raise KVCacheError(
                Code.QUOTA, f"the session would hold {self.held_bytes + capacity} bytes of {self.limit}", fix="settle open turns"
            )
        if self.directory is None:
            return Buffer("", torch.empty(capacity, dtype=torch.uint8), capacity)
        return self.directory.create(capacity)

    def _unlink(self, buffer: Buffer) -> None:
        if self.directory is not None:
            self.directory.unlink(buffer)
