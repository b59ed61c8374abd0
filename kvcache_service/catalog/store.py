"""Anchor metadata: Redis is the record, an in-memory snapshot is what turns read.

The snapshot holds the anchors whose tensors this boot holds. It follows the Redis stream of settle events, and is
published again when Redis comes back empty: losing Redis costs commits while it is away, never a turn.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

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
    """All that one turn changes. uses: anchors that carried weight."""

    group: Group
    turn_id: str
    uses: Sequence[tuple[PoolKey, str]] = ()
    inserts: Sequence[Insert] = ()


@dataclass(frozen=True)
class Outcome:
    """accepted: the inserts that were new; deleted: the anchors pruned with them."""

    accepted: tuple[Insert, ...]
    deleted: tuple[tuple[PoolKey, str], ...]
    repeated: bool


@dataclass(frozen=True)
class Limits:
    """bound: V, anchors per pool; window: prune the least used among this many oldest; times in seconds."""

    bound: int = 20
    window: int = 5
    turn_ttl: int = 3600
    pool_ttl: int = 7 * 24 * 3600


class Catalog:
    """Thread-safe. `holder` is the boot id: anchors of other boots have no tensors here."""

    def __init__(
        self,
        url: str,
        holder: str,
        limits: Limits,
        *,
        timeout: float,
        on_delete: Callable[[PoolKey, str], None],
        poll_seconds: float = 0.25,
    ) -> None:
        self._redis = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, decode_responses=True, retry=Retry(NoBackoff(), 1)
        )
        self._holder = holder
        self._limits = limits
        self._on_delete = on_delete
        self._poll_seconds = poll_seconds
        script = resources.files(__package__).joinpath("settle.lua").read_text()
        self._settle = self._redis.register_script(script)
        self._lock = threading.Lock()
        self._pools: dict[PoolKey, dict[str, Anchor]] = {}
        self._revisions: dict[tuple[PoolKey, str], int] = {}
        self._by_key: dict[str, PoolKey] = {}
        self._cursors: dict[Group, str] = {}
        self._epochs: dict[Group, str] = {}
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._follow, name="catalog-follow", daemon=True)
        self._reader.start()

    def anchors(self, pool: PoolKey, slot: str) -> tuple[Anchor, ...]:
        """Anchors of the pool that hold offsets for `slot`, oldest first. Never waits for Redis."""
        with self._lock:
            found = [a for a in self._pools.get(pool, {}).values() if slot in a.slots]
        return tuple(sorted(found, key=lambda a: (a.sequence, a.sample)))

    def commit(self, commit: Commit) -> Outcome:
        """Apply one turn in one step; the same turn id again returns the first result.

        Raises CATALOG when Redis does not answer in time; nothing of the turn counts then.
        """
        pools = sorted({i.pool for i in commit.inserts} | {pool for pool, _ in commit.uses})
        body = {
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
                }
                for mine in pools
            ],
        }
        group = commit.group
        with self._lock:
            self._by_key.update({pool.key: pool for pool in pools})
            self._cursors.setdefault(group, "0")
        try:
            keys = [group.turn(commit.turn_id), group.revision, group.events, *(p.key for p in pools)]
            result = json.loads(self._settle(keys=keys, args=[json.dumps(body)]))
        except redis.RedisError as error:
            raise KVCacheError(
                Code.CATALOG, f"metadata store did not commit: {error}", fix="nothing was written; later turns propose again"
            ) from error
        deleted = self._apply(result)
        accepted = {(pools[index - 1], sample, slot) for index, sample, slot in result["accepted"]}
        return Outcome(
            tuple(i for i in commit.inserts if (i.pool, i.sample, i.slot) in accepted), tuple(deleted), bool(result["repeated"])
        )

    def put_calibration(self, group: Group, template_id: str, record: str) -> None:
        """Keep a template's calibration for later boots. Raises CATALOG when Redis does not answer in time."""
        try:
            self._redis.set(group.calibration(template_id), record)
        except redis.RedisError as error:
            raise KVCacheError(
                Code.CATALOG, f"metadata store did not keep the calibration: {error}", fix="calibrate again when it is back"
            ) from error

    def calibration(self, group: Group, template_id: str) -> str | None:
        """The kept record; None when there is none or Redis does not answer."""
        try:
            found: str | None = self._redis.get(group.calibration(template_id))  # type: ignore[assignment]
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
            return bool(self._redis.ping())
        except redis.RedisError:
            return False

    def close(self) -> None:
        self._stop.set()
        self._reader.join()
        self._redis.close()

    # Lua encodes an empty array as {}; iterating over either gives nothing.
    def _apply(self, event: dict[str, list[list[str]]]) -> list[tuple[PoolKey, str]]:
        """Idempotent: an anchor only moves to a higher revision. Returns what left the snapshot."""
        revision = int(event["revision"])  # type: ignore[call-overload]
        gone = []
        with self._lock:
            for key, sample, text in event["upserts"]:
                pool = self._by_key.get(key)
                if pool is None or self._revisions.get((pool, sample), 0) > revision:
                    continue
                self._revisions[pool, sample] = revision
                raw = json.loads(text)
                anchors = self._pools.setdefault(pool, {})
                if raw["holder"] == self._holder:
                    anchors[sample] = Anchor(sample, raw["length"], raw["sequence"], raw["uses"], frozenset(raw["slots"]))
                elif anchors.pop(sample, None):
                    gone.append((pool, sample))
            for key, sample in event["deletes"]:
                pool = self._by_key.get(key)
                if pool is None or self._revisions.get((pool, sample), 0) > revision:
                    continue
                self._revisions.pop((pool, sample), None)
                if self._pools.get(pool, {}).pop(sample, None):
                    gone.append((pool, sample))
        for pool, sample in gone:
            self._on_delete(pool, sample)
        return gone

    def _follow(self) -> None:
        """Reader thread: other nodes' events, and a Redis that came back empty."""
        while not self._stop.wait(self._poll_seconds):
            with self._lock:
                groups = dict(self._cursors)
            for group, cursor in groups.items():
                try:
                    self._keep_epoch(group)
                    self._read_events(group, cursor)
                except redis.RedisError as error:
                    log.debug("catalog not readable: %s", error)
                    break

    def _read_events(self, group: Group, cursor: str) -> None:
        after = f"({cursor}" if cursor != "0" else "-"
        entries: list[tuple[str, dict[str, str]]] = self._redis.xrange(group.events, min=after, count=500)  # type: ignore[assignment]
        for entry_id, fields in entries:
            self._apply(json.loads(fields["event"]))
            self._cursors[group] = entry_id

    def _keep_epoch(self, group: Group) -> None:
        """A missing or foreign epoch means that Redis lost our data: publish the snapshot again."""
        epoch = self._redis.get(group.epoch)
        if epoch is None:
            self._redis.set(group.epoch, secrets.token_hex(8), nx=True)
            epoch = self._redis.get(group.epoch)
        known = self._epochs.get(group)
        if known is not None and epoch != known:
            self._publish(group)
            self._cursors[group] = "0"
        if epoch is not None:
            self._epochs[group] = str(epoch)

    def _publish(self, group: Group) -> None:
        with self._lock:
            mine = {p: list(a.values()) for p, a in self._pools.items() if p.group == group}
            highest = max((a.sequence for anchors in mine.values() for a in anchors), default=0)
            highest = max(highest, *(r for (p, _), r in self._revisions.items() if p.group == group), 0)
        with self._redis.pipeline(transaction=True) as batch:
            batch.incrby(group.revision, highest)
            for pool, anchors in mine.items():
                for anchor in anchors:
                    batch.hsetnx(pool.key, anchor.sample, json.dumps(self._record(anchor)))
                batch.expire(pool.key, self._limits.pool_ttl)
            batch.execute()
        log.info("catalog came back empty: published %d anchors again", sum(map(len, mine.values())))

    def _record(self, anchor: Anchor) -> dict[str, object]:
        return {
            "length": anchor.length,
            "holder": self._holder,
            "sequence": anchor.sequence,
            "uses": anchor.uses,
            "slots": sorted(anchor.slots),
        }
