"""Disk tier: bytes that outlive the process. One file per blob, written behind, least recently used first out.

One thread does all writing, in the order in which it was asked for: what is written later may name what was written before.

File: one line (its own CRC-32, then JSON: key, dtype, shape, bytes and their CRC-32), then the raw bytes. A file gets its
name only when it is whole, and a damaged one is a miss and goes. So nothing half-written is ever served, whatever died and
when.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from isal import isal_zlib
from torch import Tensor

log = logging.getLogger(__name__)

_SUFFIX, _UNFINISHED = ".kv", ".tmp"
_CODES = (torch.int8, torch.float8_e4m3fn)  # of coded KV: a blob's dtype says how to read it
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, *_CODES)}
_HEAD_BYTES = 64 << 10
_PENDING_BYTES = 256 << 20  # blobs that wait to be written; more are not taken: a slow disk must not hold memory


class DiskTier:
    """Thread-safe. budget: bytes of blobs. Raises ValueError when another service uses the directory."""

    def __init__(self, directory: Path, budget: int) -> None:
        self.budget = budget
        self.directory = directory
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # file name -> bytes, least recently used first
        self._guarded: set[str] = set()  # file names that go last
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = 0
        self._jobs = 0
        self._last = 0
        self.refused = 0  # blobs and jobs not taken because the writer is behind, or that the disk did not take
        self.damaged = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hold = _hold(directory)
        for path in directory.glob(f"*{_UNFINISHED}"):
            path.unlink()
        for path in sorted(directory.glob(f"*{_SUFFIX}"), key=lambda p: p.stat().st_mtime_ns):
            self._sizes[path.name] = path.stat().st_size
        with self._lock:
            self._shrink()
        self._writer = threading.Thread(target=self._write_behind, name="disk-writer", daemon=True)
        self._writer.start()

    def offer(self, key: str, blob: Tensor) -> None:
        """Take a blob, to be written soon. It must not change afterwards."""
        with self._lock:
            if _name(key) in self._sizes:
                return
            if self._pending + blob.nbytes > min(_PENDING_BYTES, self.budget):
                self.refused += 1
                return
            self._pending += blob.nbytes
        self.then(partial(self._take, key, blob))

    def then(self, job: Callable[[], None]) -> None:
        """Run `job` on the writer, after everything that was asked for before. It may raise OSError, which is counted."""
        with self._lock:
            self._jobs += 1
        self._queue.put(job)

    def replace(self, key: str, blob: Tensor) -> None:
        """Write a blob over what was there, and guard it. For jobs on the writer. Raises OSError: the old one stays then."""
        self.guard([key])
        self._write(key, blob)

    def guard(self, keys: Iterable[str]) -> None:
        """Evict these last, as long as they take at most half of the budget: a flood of KV passes by them."""
        with self._lock:
            self._guarded.update(map(_name, keys))

    def remove(self, keys: Iterable[str]) -> None:
        """Delete blobs. For jobs on the writer. Unknown keys are ignored."""
        with self._lock:
            for key in keys:
                self._delete(_name(key))

    def remove_all(self, prefix: str) -> None:
        """Delete all blobs whose keys begin so. For jobs on the writer: it reads the first line of every file."""
        with self._lock:
            names = list(self._sizes)
        doomed = [name for name in names if _key(self.directory / name).startswith(prefix)]
        with self._lock:
            for name in doomed:
                self._delete(name)

    def get(self, key: str) -> Tensor | None:
        """A copy of the blob, verified; None is a miss."""
        name = _name(key)
        with self._lock:
            if name not in self._sizes:
                return None
            self._sizes.move_to_end(name)
        path = self.directory / name
        try:
            blob = _read(path, key)
            self._stamp(path)
        except FileNotFoundError:  # evicted meanwhile, or somebody else's deletion
            with self._lock:
                self._delete(name)
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is damaged: %s", path, error)
            with self._lock:
                self.damaged += 1
                self._delete(name)
            return None
        return blob

    def has(self, key: str) -> bool:
        with self._lock:
            return _name(key) in self._sizes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    @property
    def pending_bytes(self) -> int:
        """Bytes of offered blobs that are not written yet."""
        return self._pending

    @property
    def pending_jobs(self) -> int:
        """What the writer still has to do, blobs included."""
        return self._jobs

    def close(self) -> None:
        """Write what was taken, then stop."""
        self._queue.put(None)
        self._writer.join()
        self._hold.close()

    def check(self) -> None:
        """Assert the invariants; for tests and post-mortems."""
        with self._lock:
            found = {p.name: p.stat().st_size for p in self.directory.glob(f"*{_SUFFIX}")}
            assert found == dict(self._sizes)
            assert sum(found.values()) <= self.budget

    def _write_behind(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except OSError as error:
                log.warning("not kept on disk: %s", error)
                with self._lock:
                    self.refused += 1
            del job  # an idle writer holds no blob
            with self._lock:
                self._jobs -= 1

    def _take(self, key: str, blob: Tensor) -> None:
        try:
            self._write(key, blob)
        finally:
            with self._lock:
                self._pending -= blob.nbytes

    def _write(self, key: str, blob: Tensor) -> None:
        name = _name(key)
        data = blob.contiguous().view(torch.uint8).numpy().data.cast("B")
        head = {"key": key, "dtype": str(blob.dtype), "shape": list(blob.shape), "bytes": len(data), "crc": isal_zlib.crc32(data)}
        unfinished = self.directory / (name + _UNFINISHED)
        try:
            with unfinished.open("wb") as file:
                file.write(_sealed(json.dumps(head).encode()))
                file.write(data)
            self._stamp(unfinished)
            size = unfinished.stat().st_size
            if size > self.budget:
                raise OSError(f"{size} bytes are more than the disk budget")
            unfinished.rename(self.directory / name)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        with self._lock:
            self._sizes[name] = size
            self._sizes.move_to_end(name)
            self._shrink()

    def _stamp(self, path: Path) -> None:
        """Every use is later than the one before, however coarse the clock: a restart reads the order off the files."""
        with self._lock:
            self._last = max(self._last + 1, time.time_ns())
            os.utime(path, ns=(self._last, self._last))

    def _shrink(self) -> None:
        used = sum(self._sizes.values())
        guarded = sum(self._sizes.get(name, 0) for name in self._guarded)
        while used > self.budget:
            crowded = guarded > self.budget // 2
            name = next((n for n in self._sizes if (n in self._guarded) is crowded), next(iter(self._sizes)))
            used -= self._sizes[name]
            guarded -= self._sizes[name] if name in self._guarded else 0
            self._delete(name)

    def _delete(self, name: str) -> None:
        self._sizes.pop(name, None)
        self._guarded.discard(name)
        with contextlib.suppress(OSError):
            (self.directory / name).unlink()


def _hold(directory: Path) -> IO[bytes]:
    """Lock the directory for as long as the returned file is open; a killed process lets go."""
    file = (directory / ".lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"disk_dir {directory} is in use by another service; give each one its own") from None
    return file


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest() + _SUFFIX


def _sealed(head: bytes) -> bytes:
    """The first line of a file: a header that was changed must not say how much memory to take."""
    return b"%08x %s\n" % (isal_zlib.crc32(head), head)


def _key(path: Path) -> str:
    """Whose blob a file holds; "" where that cannot be read: the file is a miss then."""
    try:
        with path.open("rb") as file:
            return str(_head(file).get("key", ""))
    except (OSError, ValueError):
        return ""


def _head(file: IO[bytes]) -> dict[str, Any]:
    """Raises ValueError for a header that has changed."""
    line = file.readline(_HEAD_BYTES)
    if line != _sealed(line[9:-1]):
        raise ValueError("the header has changed")
    found: dict[str, Any] = json.loads(line[9:])
    return found


def _read(path: Path, key: str) -> Tensor:
    """Raises OSError or ValueError when the file is not what was written under the key."""
    with path.open("rb") as file:
        head = _head(file)
        if head.get("key") != key or head.get("dtype") not in _DTYPES:
            raise ValueError("another blob's header")
        blob = torch.empty(head["shape"], dtype=_DTYPES[head["dtype"]])
        data = blob.view(torch.uint8).numpy().data.cast("B")
        if len(data) != head["bytes"] or file.readinto(data) != len(data) or isal_zlib.crc32(data) != head["crc"]:
            raise ValueError("bytes missing or changed")
    return blob
