"""Anchor metadata: Redis is the record, an in-memory snapshot is what turns read.

The snapshot holds the anchors whose tensors this boot holds. It follows the Redis stream of settle events. What an earlier
boot of the node left is claimed, and all of it is published again when Redis comes back empty: losing Redis costs commits
while it is away, never a turn.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import redis

from kvcache_service.catalog.connection import Connection
from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.errors import Code, KVCacheError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Anchor:
    """One stored sample. slots: the template ordinals whose offsets it holds; sequence: age (older is smaller)."""

    sample: str
    length: int
    sequence: int
    uses: int
    slots: frozenset[str]


@dataclass(frozen=True)
class Insert:
    """One candidate: `sample` consumed at `slot`."""

    pool: PoolKey
    sample: str
    length: int
    slot: str


@dataclass(frozen=True)
class Commit:
    """All that one turn, or one call of an admin, changes. uses: anchors that carried weight; removes: anchors that go."""

    group: Group
    turn_id: str
    uses: Sequence[tuple[PoolKey, str]] = ()
    inserts: Sequence[Insert] = ()
    removes: Sequence[tuple[PoolKey, str]] = ()


@dataclass(frozen=True)
class Outcome:
    """accepted: the inserts that were new; deleted: the anchors pruned with them."""

    accepted: tuple[Insert, ...]
    deleted: tuple[tuple[PoolKey, str], ...]
    repeated: bool


@dataclass(frozen=True)
class Change:
    """One anchor of the snapshot as it is now; None: it is gone."""

    pool: PoolKey
    sample: str
    anchor: Anchor | None


@dataclass(frozen=True)
class Limits:
    """bound: V, anchors per pool; window: prune the least used among this many oldest; times in seconds."""

    bound: int = 20
    window: int = 5
    turn_ttl: int = 3600
    pool_ttl: int = 7 * 24 * 3600


class Catalog:
    """Thread-safe. `holder` is the boot id: anchors of other boots have no tensors here, but for those that attach() names.

    node: the same for all boots that share a disk. on_change: told of every change of the snapshot; on_epoch: of the Redis
    that holds a group's record.
    """

    def __init__(
        self,
        connection: Connection,
        holder: str,
        limits: Limits,
        *,
        node: str,
        on_change: Callable[[Sequence[Change]], None],
        on_epoch: Callable[[Group, str], None],
        poll_seconds: float = 0.25,
    ) -> None:
        self._connection = connection
        self._node = node
        self._holder = holder
        self._limits = limits
        self._on_change = on_change
        self._on_epoch = on_epoch
        self._poll_seconds = poll_seconds
        scripts = resources.files(__package__)
        self._settle_script = scripts.joinpath("settle.lua").read_text()
        self._claim_script = scripts.joinpath("claim.lua").read_text()
        self._lock = threading.Lock()
        self._pools: dict[PoolKey, dict[str, Anchor]] = {}
        self._revisions: dict[tuple[PoolKey, str], int] = {}
        self._by_key: dict[str, PoolKey] = {}
        self._cursors: dict[Group, str] = {}
        self._epochs: dict[Group, str] = {}
        self._unclaimed: set[Group] = set()
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._follow, name="catalog-follow", daemon=True)
        self._reader.start()

    def attach(self, group: Group, anchors: Mapping[PoolKey, Iterable[Anchor]], epoch: str) -> None:
        """Begin to follow a group, once. anchors: those that an earlier boot of this node has left tensors of.

        They are in the snapshot at once. Those that Redis has pruned leave it again; where Redis is another one than `epoch`
        says, they are published there instead. Never raises: the reader thread goes on where Redis does not answer.
        """
        with self._lock:
            if group in self._epochs:
                return
            self._epochs[group] = epoch
            self._unclaimed.add(group)
            for pool, found in anchors.items():
                self._by_key[pool.key] = pool
                self._pools[pool] = {anchor.sample: anchor for anchor in found}
        try:
            self._claim(group)
        except redis.RedisError as error:
            log.warning("catalog not readable: %s", error)

    def anchors(self, pool: PoolKey, slot: str) -> tuple[Anchor, ...]:
        """Anchors of the pool that hold offsets for `slot`, oldest first. Never waits for Redis."""
        with self._lock:
            found = [a for a in self._pools.get(pool, {}).values() if slot in a.slots]
        return tuple(sorted(found, key=lambda a: (a.sequence, a.sample)))

    def held(self, group: Group) -> list[tuple[PoolKey, Anchor]]:
        """All anchors of the group's pools, oldest first within a pool. Never waits for Redis."""
        with self._lock:
            mine = [(pool, anchors.values()) for pool, anchors in self._pools.items() if pool.group == group]
            found = [(pool, anchor) for pool, anchors in mine for anchor in anchors]
        return sorted(found, key=lambda one: (one[0], one[1].sequence, one[1].sample))

    def commit(self, commit: Commit) -> Outcome:
        """Apply one turn in one step; the same turn id again returns the first result.

        Raises CATALOG when Redis does not answer in time; nothing of the turn counts then.
        """
        group = commit.group
        self.attach(group, {}, "")
        pools = sorted({i.pool for i in commit.inserts} | {pool for pool, _ in [*commit.uses, *commit.removes]})
        body = {
            "node": self._node,
            "holder": self._holder,
            "bound": self._limits.bound,
            "window": self._limits.window,
            "turn_ttl": self._limits.turn_ttl,
            "pool_ttl": self._limits.pool_ttl,
            "pools": [
                {
                    "uses": [sample for pool, sample in commit.uses if pool == mine],
                    "inserts": [
                        {"sample": i.sample, "length": i.length, "slot": i.slot} for i in commit.inserts if i.pool == mine
                    ],
                    "removes": [sample for pool, sample in commit.removes if pool == mine],
                }
                for mine in pools
            ],
        }
        with self._lock:
            self._by_key.update({pool.key: pool for pool in pools})
        try:
            keys = [group.turn(commit.turn_id), group.revision, group.events, *(p.key for p in pools)]
            result = self._run(self._settle_script, keys, body)
        except redis.RedisError as error:
            raise KVCacheError(
                Code.CATALOG, f"metadata store did not commit: {error}", fix="nothing was written; later turns propose again"
            ) from error
        changes = self._apply(result)
        accepted = {(pools[index - 1], sample, slot) for index, sample, slot in result["accepted"]}
        return Outcome(
            tuple(i for i in commit.inserts if (i.pool, i.sample, i.slot) in accepted),
            tuple((change.pool, change.sample) for change in changes if change.anchor is None),
            bool(result["repeated"]),
        )

    def put_calibration(self, group: Group, template_id: str, record: str) -> None:
        """Keep a template's calibration for later boots. Raises CATALOG when Redis does not answer in time."""
        try:
            self._connection.ask(lambda store: store.set(group.calibration(template_id), record))
        except redis.RedisError as error:
            raise KVCacheError(
                Code.CATALOG, f"metadata store did not keep the calibration: {error}", fix="calibrate again when it is back"
            ) from error

    def drop_calibrations(self, group: Group, template_ids: Sequence[str]) -> None:
        """Forget kept records. Raises CATALOG when Redis does not answer in time."""
        keys = [group.calibration(template_id) for template_id in template_ids]
        try:
            if keys:
                self._connection.ask(lambda store: store.delete(*keys))
        except redis.RedisError as error:
            raise KVCacheError(
                Code.CATALOG, f"metadata store did not forget the calibrations: {error}", fix="call again when it is back"
            ) from error

    def calibration(self, group: Group, template_id: str) -> str | None:
        """The kept record; None when there is none or Redis does not answer."""
        try:
            found: str | None = self._connection.ask(lambda store: store.get(group.calibration(template_id)))
        except redis.RedisError as error:
            log.warning("calibration not readable: %s", error)
            return None
        return found

    def pool_sizes(self) -> dict[PoolKey, int]:
        with self._lock:
            return {pool: len(anchors) for pool, anchors in self._pools.items()}

    def ping(self) -> bool:
        """True when Redis answers within the timeout."""
        try:
            return bool(self._connection.ask(lambda store: store.ping()))
        except redis.RedisError:
            return False

    def close(self) -> None:
        self._stop.set()
        self._reader.join()
        self._connection.close()

    # Lua encodes an empty array as {}; iterating over either gives nothing.
    def _apply(self, event: Mapping[str, Any]) -> list[Change]:
        """Idempotent: an anchor only moves to a higher revision. Returns what changed in the snapshot."""
        revision = int(event["revision"])
        changes = []
        with self._lock:
            for key, sample, *text in [*event["upserts"], *event["deletes"]]:
                pool = self._by_key.get(key)
                if pool is None or self._revisions.get((pool, sample), 0) > revision:
                    continue
                anchor = self._mine(sample, json.loads(text[0])) if text else None
                if text:
                    self._revisions[pool, sample] = revision
                else:
                    self._revisions.pop((pool, sample), None)
                anchors = self._pools.setdefault(pool, {})
                if anchors.get(sample) == anchor:
                    continue
                changes.append(Change(pool, sample, anchor))
                if anchor is not None:
                    anchors[sample] = anchor
                else:
                    del anchors[sample]
        if changes:
            self._on_change(changes)
        return changes

    def _mine(self, sample: str, raw: Mapping[str, Any]) -> Anchor | None:
        if raw["holder"] != self._holder:
            return None
        return Anchor(sample, raw["length"], raw["sequence"], raw["uses"], frozenset(raw["slots"]))

    def _follow(self) -> None:
        """Reader thread: other nodes' events, and a Redis that came back empty."""
        while not self._stop.wait(self._poll_seconds):
            with self._lock:
                groups = list(self._epochs)
            for group in groups:
                try:
                    if group in self._unclaimed or self._epoch(group) != self._epochs[group]:
                        self._claim(group)
                    self._read_events(group)
                except redis.RedisError as error:
                    log.debug("catalog not readable: %s", error)
                    break

    def _epoch(self, group: Group) -> str | None:
        found: str | None = self._connection.ask(lambda store: store.get(group.epoch))
        return found

    def _run(self, script: str, keys: Sequence[str], body: Mapping[str, Any]) -> Any:
        """A script's text travels with the call: no server has to have seen it before, whoever is the master now."""
        return json.loads(self._connection.ask(lambda store: store.eval(script, len(keys), *keys, json.dumps(body))))

    def _read_events(self, group: Group) -> None:
        cursor = self._cursors[group]
        after = f"({cursor}" if cursor != "0" else "-"
        entries: list[tuple[str, dict[str, str]]] = self._connection.ask(
            lambda store: store.xrange(group.events, min=after, count=500)
        )
        for entry_id, fields in entries:
            self._apply(json.loads(fields["event"]))
            self._cursors[group] = entry_id

    def _claim(self, group: Group) -> None:
        """Ask Redis which anchors of the snapshot still count; a Redis that has lost them takes them in again."""
        with self._lock:
            known = self._epochs[group]
            mine = {p: list(a.values()) for p, a in self._pools.items() if p.group == group and a}
            sequences = [anchor.sequence for anchors in mine.values() for anchor in anchors]
            revisions = [revision for (pool, _), revision in self._revisions.items() if pool.group == group]
        body = {
            "node": self._node,
            "holder": self._holder,
            "epoch": known,
            "new_epoch": secrets.token_hex(8),
            "highest": max([0, *sequences, *revisions]),
            "pool_ttl": self._limits.pool_ttl,
            "pools": [[asdict(anchor) | {"slots": sorted(anchor.slots)} for anchor in anchors] for anchors in mine.values()],
        }
        keys = [group.epoch, group.revision, group.events, *(pool.key for pool in mine)]
        event = self._run(self._claim_script, keys, body)
        with self._lock:
            self._epochs[group], self._cursors[group] = event["epoch"], event["cursor"]
            self._unclaimed.discard(group)
        self._apply(event)
        log.info("claimed %d anchors, catalog %s", len(sequences), "as before" if event["epoch"] == known else "new")
        if event["epoch"] != known:
            self._on_epoch(group, event["epoch"])
