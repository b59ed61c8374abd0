"""What outlives the process: blobs in the disk tier, and an index of what the memory knew of them, one SQLite file beside.

All writing is behind the turn, on the disk tier's one thread and in the order of the turns: a record follows the blobs that it
names. What a disk refuses costs durability, never a turn; a record whose blob is gone or damaged is dropped when it is met.
State that changes in place (predictors, means) is one blob, replaced as a whole; of several versions that wait only the newest
is written.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvcache_service.catalog.keys import Group, PoolKey, group_of
from kvcache_service.catalog.store import Anchor, Change
from kvcache_service.engine.records import Base, FixedBase, Offsets, Place, Slot
from kvcache_service.predictor import RidgeStatistics, RunningMean
from kvcache_service.tiers.disk import DiskTier

log = logging.getLogger(__name__)

_FILE = "index.sqlite"
_LAYOUT = 1  # of tables and state blobs; an index of another layout is thrown away
_TABLES = """
CREATE TABLE node (id TEXT NOT NULL);
CREATE TABLE epoch (grp TEXT PRIMARY KEY, epoch TEXT NOT NULL);
CREATE TABLE base (grp TEXT, sample TEXT, origin TEXT, start INT, covered INT, taint INT, blob TEXT, produced TEXT,
  PRIMARY KEY (grp, sample, origin));
CREATE TABLE anchor (grp TEXT, placeholder TEXT, origin TEXT, sample TEXT, length INT, sequence INT, uses INT,
  PRIMARY KEY (grp, placeholder, origin, sample));
CREATE TABLE offsets (grp TEXT, placeholder TEXT, origin TEXT, sample TEXT, slot TEXT, base TEXT, blob TEXT, following TEXT,
  fixed TEXT, start INT, length INT, PRIMARY KEY (grp, placeholder, origin, sample, slot));
CREATE TABLE state (blob TEXT PRIMARY KEY, kind TEXT, grp TEXT, template TEXT, ordinal INT, placeholder TEXT, origin TEXT);
CREATE INDEX state_of ON state (grp, template);
CREATE TABLE quality (grp TEXT, template TEXT, record TEXT, PRIMARY KEY (grp, template));
"""
_WITHOUT_OFFSETS = """
DELETE FROM anchor WHERE NOT EXISTS (SELECT 1 FROM offsets o WHERE (o.grp, o.placeholder, o.origin, o.sample)
  = (anchor.grp, anchor.placeholder, anchor.origin, anchor.sample))
"""
_PREDICTOR, _MEAN, _FIXED = "predictor", "mean", "fixed"

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class KnownGroup:
    """What was known of a group. bases: with their samples; anchors: with the slots whose offsets are all on disk."""

    bases: Sequence[tuple[str, Base]] = field(default_factory=list)
    anchors: Mapping[PoolKey, Sequence[Anchor]] = field(default_factory=dict)
    offsets: Mapping[tuple[PoolKey, str], Mapping[str, Offsets]] = field(default_factory=dict)
    epoch: str = ""


@dataclass(frozen=True)
class KnownTemplate:
    """What was known of a template. predictors: with the offset norms that the slot has seen; quality: of its QualityBook."""

    predictors: Mapping[Slot, tuple[RidgeStatistics, Sequence[float]]] = field(default_factory=dict)
    means: Mapping[Place, RunningMean] = field(default_factory=dict)
    fixed_bases: Mapping[Place, FixedBase] = field(default_factory=dict)
    quality: str | None = None


class Durable:
    """Thread-safe. Without a disk it keeps nothing and knows nothing. node: the identity of whoever uses this disk."""

    def __init__(self, disk: DiskTier | None) -> None:
        self._disk = disk
        self._waiting = threading.Lock()  # never held while anything is read or written
        self._newest: dict[str, State] = {}  # states that wait to be written
        self._indexing = threading.Lock()
        self.node = secrets.token_hex(8)
        if disk is not None:
            self._index = _open(disk.directory / _FILE, self.node)
            ((self.node,),) = self._index.execute("SELECT id FROM node")
            self._sweep()
            disk.guard(blob for (blob,) in self._index.execute("SELECT blob FROM state"))

    # Blobs

    def offer(self, key: str, blob: Tensor) -> None:
        """Take a blob, to be written soon. It must not change afterwards; neither must what the key names."""
        if self._disk is not None:
            self._disk.offer(key, blob)

    def get(self, key: str) -> Tensor | None:
        """The blob; None is a miss. Reads a file."""
        return self._disk.get(key) if self._disk is not None else None

    def has(self, key: str) -> bool:
        return self._disk is not None and self._disk.has(key)

    # Records

    def keep_base(self, group: Group, sample: str, base: Base) -> None:
        row = (group.tag, sample, base.origin, base.start, base.covered, base.taint, base.key, base.produced)
        self._later("INSERT OR REPLACE INTO base VALUES (?, ?, ?, ?, ?, ?, ?, ?)", [row])

    def drop_base(self, group: Group, sample: str, base: Base) -> None:
        self._later("DELETE FROM base WHERE grp = ? AND sample = ? AND origin = ?", [(group.tag, sample, base.origin)])

    def keep_anchors(self, changes: Sequence[Change]) -> None:
        """The catalog's part of anchors; those that are gone are left to drop_anchor."""
        kept = [(c.pool, c.anchor) for c in changes if c.anchor is not None]
        rows = [(*_pool(pool), a.sample, a.length, a.sequence, a.uses) for pool, a in kept]
        self._later("INSERT OR REPLACE INTO anchor VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def keep_offsets(self, slot: Slot, sample: str, kept: Offsets) -> None:
        fields = (kept.base, kept.placeholder, kept.following, kept.fixed, kept.start, kept.length)
        row = (*_pool(slot.pool), sample, slot.name, *fields)
        self._later("INSERT OR REPLACE INTO offsets VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [row])

    def drop_anchor(self, pool: PoolKey, sample: str, blobs: Sequence[str]) -> None:
        """Forget an anchor and delete what only it needs."""
        where = "WHERE grp = ? AND placeholder = ? AND origin = ? AND sample = ?"
        for table in ("anchor", "offsets"):
            self._later(f"DELETE FROM {table} {where}", [(*_pool(pool), sample)])
        self.drop_blobs(blobs)

    def drop_blobs(self, keys: Sequence[str]) -> None:
        if self._disk is not None and keys:
            self._disk.then(partial(self._disk.remove, keys))

    def forget(self, group: Group) -> None:
        """Delete all blobs and records of a group, those that wait to be written too."""
        if self._disk is not None:
            for table in ("base", "anchor", "offsets", "state", "quality"):
                self._later(f"DELETE FROM {table} WHERE grp = ?", [(group.tag,)])
            self._disk.then(partial(self._disk.remove_all, f"{group.tag}:"))

    def keep_predictor(self, slot: Slot, statistics: RidgeStatistics, norms: Sequence[float]) -> None:
        def state() -> State:
            return statistics.state() | {"norms": torch.tensor(norms, dtype=torch.float64)}

        key = f"{slot.pool.key}:predictor:{slot.name}"
        group, placeholder, origin = _pool(slot.pool)
        self._refresh(key, state, (_PREDICTOR, group, slot.template_id, slot.ordinal, placeholder, origin))

    def keep_mean(self, place: Place, mean: RunningMean) -> None:
        key = f"{place.group.tag}:mean:{place.template_id}:{place.ordinal}"
        self._refresh(key, mean.state, (_MEAN, place.group.tag, place.template_id, place.ordinal, "", ""))

    def keep_fixed(self, place: Place, base: FixedBase) -> None:
        def state() -> State:
            return {"kv": base.kv, "start": torch.tensor(base.start)}

        self._refresh(base.key, state, (_FIXED, place.group.tag, place.template_id, place.ordinal, "", ""))

    def keep_quality(self, group: Group, template_id: str, record: str) -> None:
        self._later("INSERT OR REPLACE INTO quality VALUES (?, ?, ?)", [(group.tag, template_id, record)])

    def keep_epoch(self, group: Group, epoch: str) -> None:
        """The metadata store that the group's anchors are known to."""
        self._later("INSERT OR REPLACE INTO epoch VALUES (?, ?)", [(group.tag, epoch)])

    # What an earlier boot knew

    def groups(self, tenant: str) -> list[Group]:
        """Groups of a tenant that have records."""
        tags = [tag for (tag,) in self._rows("SELECT grp FROM base UNION SELECT grp FROM offsets UNION SELECT grp FROM state")]
        return [group for group in map(group_of, tags) if group.tenant == tenant]

    def group(self, group: Group) -> KnownGroup:
        bases = [
            (sample, Base(origin, start, covered, taint, blob, produced))
            for sample, origin, start, covered, taint, blob, produced in self._rows(
                "SELECT sample, origin, start, covered, taint, blob, produced FROM base WHERE grp = ? ORDER BY rowid", group.tag
            )
            if self.has(blob)
        ]
        offsets: dict[tuple[PoolKey, str], dict[str, Offsets]] = defaultdict(dict)
        for placeholder, origin, sample, slot, *fields in self._rows(
            "SELECT placeholder, origin, sample, slot, base, blob, following, fixed, start, length FROM offsets WHERE grp = ?",
            group.tag,
        ):
            found = Offsets(*fields)
            if all(map(self.has, found.keys)):
                offsets[PoolKey(group, placeholder, origin), sample][slot] = found
        anchors: dict[PoolKey, list[Anchor]] = defaultdict(list)
        for placeholder, origin, sample, length, sequence, uses in self._rows(
            "SELECT placeholder, origin, sample, length, sequence, uses FROM anchor WHERE grp = ?", group.tag
        ):
            pool = PoolKey(group, placeholder, origin)
            if (pool, sample) in offsets:
                anchors[pool].append(Anchor(sample, length, sequence, uses, frozenset(offsets[pool, sample])))
        epoch = next((epoch for (epoch,) in self._rows("SELECT epoch FROM epoch WHERE grp = ?", group.tag)), "")
        known = {(pool, anchor.sample) for pool, found in anchors.items() for anchor in found}
        return KnownGroup(bases, anchors, {key: offsets[key] for key in known}, epoch)

    def template(self, group: Group, template_id: str) -> KnownTemplate:
        """Reads files."""
        predictors, means, fixed_bases = {}, {}, {}
        for blob, kind, ordinal, placeholder, origin in self._rows(
            "SELECT blob, kind, ordinal, placeholder, origin FROM state WHERE grp = ? AND template = ?", group.tag, template_id
        ):
            place = Place(group, template_id, ordinal)
            try:
                state = self._read(blob)
                if kind == _PREDICTOR:
                    slot = Slot(PoolKey(group, placeholder, origin), template_id, ordinal)
                    predictors[slot] = (RidgeStatistics.restored(state), state["norms"].tolist())
                elif kind == _MEAN:
                    means[place] = RunningMean.restored(state)
                else:
                    fixed_bases[place] = FixedBase(state["kv"], int(state["start"]), blob)
            except (LookupError, SafetensorError) as error:
                log.warning("%s of template %s is gone: %s", kind, template_id[:12], error)
                self._later("DELETE FROM state WHERE blob = ?", [(blob,)])
        quality = self._rows("SELECT record FROM quality WHERE grp = ? AND template = ?", group.tag, template_id)
        return KnownTemplate(predictors, means, fixed_bases, next((record for (record,) in quality), None))

    # Upkeep

    def gauges(self) -> dict[str, float]:
        disk = self._disk
        return {
            "kvcache_disk_used_bytes": disk.used_bytes if disk else 0,
            "kvcache_disk_budget_bytes": disk.budget if disk else 0,
            "kvcache_disk_pending_bytes": disk.pending_bytes if disk else 0,
            "kvcache_disk_pending_writes": disk.pending_jobs if disk else 0,
            "kvcache_disk_refused": disk.refused if disk else 0,
            "kvcache_disk_damaged": disk.damaged if disk else 0,
        }

    def close(self) -> None:
        """Write what waits, then stop."""
        if self._disk is not None:
            self._disk.close()
            self._index.close()

    def check(self) -> None:
        """Assert the invariants; for tests and post-mortems. Only an idle writer keeps them all."""
        if self._disk is not None:
            self._disk.check()
            assert not self._newest
            with self._indexing:
                assert self._index.execute("PRAGMA quick_check").fetchall() == [("ok",)]

    # Inside

    def _later(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        if self._disk is not None and rows:
            self._disk.then(partial(self._execute, statement, rows))

    def _execute(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._indexing, _as_os_error(), self._index:
            self._index.executemany(statement, rows)

    def _rows(self, query: str, *arguments: str) -> list[tuple[Any, ...]]:
        """Without a disk none; nor where the index cannot be read."""
        if self._disk is None:
            return []
        with self._indexing:
            try:
                return self._index.execute(query, arguments).fetchall()
            except sqlite3.Error as error:
                log.warning("%s is not readable: %s", _FILE, error)
                return []

    def _refresh(self, key: str, state: Callable[[], State], row: tuple[object, ...]) -> None:
        """state: asked now, and only where there is a disk to keep it."""
        if self._disk is None:
            return
        newest = state()
        with self._waiting:
            waits = key in self._newest
            self._newest[key] = newest
        if not waits:
            self._disk.then(partial(self._replace, self._disk, key, row))

    def _replace(self, disk: DiskTier, key: str, row: tuple[object, ...]) -> None:
        with self._waiting:
            state = self._newest.pop(key)
        disk.replace(key, torch.frombuffer(bytearray(save(dict(state))), dtype=torch.uint8))
        self._execute("INSERT OR REPLACE INTO state VALUES (?, ?, ?, ?, ?, ?, ?)", [(key, *row)])

    def _read(self, key: str) -> State:
        """Raises KeyError when the disk does not have it, or not whole; SafetensorError for anything else."""
        blob = self.get(key)
        if blob is None:
            raise KeyError("not on disk")
        return load(blob.numpy().tobytes())

    def _sweep(self) -> None:
        """Drop records of blobs that the disk has evicted."""
        for table, column in (("base", "blob"), *(("offsets", c) for c in ("base", "blob", "following")), ("state", "blob")):
            blobs = self._rows(f"SELECT DISTINCT {column} FROM {table} WHERE {column} IS NOT NULL")
            self._later(f"DELETE FROM {table} WHERE {column} = ?", [(blob,) for (blob,) in blobs if not self.has(blob)])
        self._later(_WITHOUT_OFFSETS, [()])


def _pool(pool: PoolKey) -> tuple[str, str, str]:
    return pool.group.tag, pool.placeholder, pool.origin


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """SQLite's refusals (a full disk, a damaged file) are refusals of the disk."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"{_FILE}: {error}") from error


def _open(path: Path, node: str) -> sqlite3.Connection:
    """The index; a new one, for a new node, where there is none that can be used."""
    if path.exists():
        with contextlib.suppress(sqlite3.DatabaseError):
            index = _connect(path)
            version, sound = index.execute("PRAGMA user_version").fetchone(), index.execute("PRAGMA quick_check").fetchall()
            if version == (_LAYOUT,) and sound == [("ok",)]:
                return index
            index.close()
        log.warning("%s is damaged or of another version; what it knew is lost", path)
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    index = _connect(path)
    index.executescript(f"BEGIN; {_TABLES} INSERT INTO node VALUES ('{node}'); PRAGMA user_version = {_LAYOUT}; COMMIT;")
    return index


def _connect(path: Path) -> sqlite3.Connection:
    """For any thread, one at a time. A killed process loses nothing that was committed; a power cut may lose the last of it."""
    index = sqlite3.connect(path, check_same_thread=False)
    index.execute("PRAGMA journal_mode = WAL")
    index.execute("PRAGMA synchronous = NORMAL")
    return index
