"""The catalog on a real server: one step per turn, exactly once, bounded, and back after a loss."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from kvcache_service.catalog.connection import Connection
from kvcache_service.catalog.embedded import EmbeddedServer
from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.catalog.store import Anchor, Catalog, Change, Commit, Insert, Limits
from kvcache_service.errors import Code, KVCacheError

SLOT = "template:1"


@pytest.fixture
def group() -> Group:
    return Group("tenant", uuid.uuid4().hex)


@pytest.fixture
def pool(group: Group) -> PoolKey:
    return PoolKey(group, "question", "origin")


class Told:
    """Remembers what a catalog tells its engine; wait() lets a test follow the reader thread."""

    def __init__(self) -> None:
        self.deleted: list[tuple[PoolKey, str]] = []
        self.kept: dict[str, Anchor] = {}
        self.epochs: list[str] = []
        self._event = threading.Event()

    def changed(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.anchor is None:
                self.deleted.append((change.pool, change.sample))
                self.kept.pop(change.sample, None)
                self._event.set()
            else:
                self.kept[change.sample] = change.anchor

    def moved(self, group: Group, epoch: str) -> None:
        self.epochs.append(epoch)

    def wait(self) -> None:
        assert self._event.wait(10)


@pytest.fixture
def make(redis_url: str) -> Iterator[Callable[..., Catalog]]:
    made: list[Catalog] = []

    def build(
        holder: str = "boot", limits: Limits | None = None, told: Told | None = None, url: str = redis_url, node: str = ""
    ) -> Catalog:
        watcher = told or Told()
        catalog = Catalog(
            Connection(url, 2.0),
            holder,
            limits or Limits(),
            node=node or f"node of {holder}",
            on_change=watcher.changed,
            on_epoch=watcher.moved,
            poll_seconds=0.02,
        )
        made.append(catalog)
        return catalog

    yield build
    for catalog in made:
        catalog.close()


def insert(pool: PoolKey, sample: str, slot: str = SLOT, length: int = 5) -> Insert:
    return Insert(pool, sample, length, slot)


def turn() -> str:
    return uuid.uuid4().hex


def test_a_commit_is_visible_at_once_and_repeat_safe(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    catalog = make()
    commit = Commit(group, turn(), inserts=[insert(pool, "s1"), insert(pool, "s2")])
    first = catalog.commit(commit)
    assert [i.sample for i in first.accepted] == ["s1", "s2"]
    assert not first.repeated
    again = catalog.commit(commit)
    assert again.repeated
    assert again.accepted == first.accepted
    assert [a.sample for a in catalog.anchors(pool, SLOT)] == ["s1", "s2"]
    assert catalog.pool_sizes() == {pool: 2}


def test_a_sample_enters_a_slot_once(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    catalog = make()
    assert catalog.commit(Commit(group, turn(), inserts=[insert(pool, "s")])).accepted
    assert not catalog.commit(Commit(group, turn(), inserts=[insert(pool, "s")])).accepted
    assert catalog.commit(Commit(group, turn(), inserts=[insert(pool, "s", "other:3")])).accepted
    (anchor,) = catalog.anchors(pool, SLOT)
    assert anchor.slots == {SLOT, "other:3"}


def test_prunes_the_least_used_of_the_oldest(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    told = Told()
    catalog = make(limits=Limits(bound=6, window=5), told=told)
    for i in range(6):
        catalog.commit(Commit(group, turn(), inserts=[insert(pool, f"s{i}")]))
    used = ["s0", "s0", "s1", "s1", "s3", "s4"]  # among the 5 oldest, s2 is unused; s5 is too, but it is not old
    catalog.commit(Commit(group, turn(), uses=[(pool, s) for s in used]))
    outcome = catalog.commit(Commit(group, turn(), inserts=[insert(pool, "s6")]))
    assert outcome.deleted == ((pool, "s2"),)
    assert told.deleted == [(pool, "s2")]
    assert told.kept == {a.sample: a for a in catalog.anchors(pool, SLOT)}
    assert {a.sample: a.uses for a in catalog.anchors(pool, SLOT)} == {"s0": 2, "s1": 2, "s3": 1, "s4": 1, "s5": 0, "s6": 0}


def test_overlapping_commits_lose_nothing(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    catalogs = [make("boot", limits=Limits(bound=1000)) for _ in range(4)]
    accepted: list[tuple[str, ...]] = []

    def work(index: int) -> None:
        for n in range(10):
            commit = Commit(group, turn(), inserts=[insert(pool, f"{index}-{n}"), insert(pool, f"shared-{n}")])
            accepted.append(tuple(i.sample for i in catalogs[index].commit(commit).accepted))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flat = sorted(itertools.chain(*accepted))
    assert flat == sorted([f"{i}-{n}" for i in range(4) for n in range(10)] + [f"shared-{n}" for n in range(10)])


def test_another_node_replaces_a_dead_boots_anchor(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    told = Told()
    old = make("old", told=told)
    old.commit(Commit(group, turn(), inserts=[insert(pool, "s")]))
    new = make("new")
    assert new.anchors(pool, SLOT) == ()
    assert new.commit(Commit(group, turn(), inserts=[insert(pool, "s")])).accepted
    told.wait()  # the old node follows the stream of settle events
    assert told.deleted == [(pool, "s")]
    assert old.anchors(pool, SLOT) == ()
    assert [a.sample for a in new.anchors(pool, SLOT)] == ["s"]


def left(catalog: Catalog, pool: PoolKey) -> dict[PoolKey, list[Anchor]]:
    """What a node finds on its disk after this boot."""
    return {pool: list(catalog.anchors(pool, SLOT))}


def test_a_new_boot_claims_what_its_node_has_tensors_of(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    told = Told()
    first = make("first", node="node", told=told)
    first.commit(Commit(group, turn(), inserts=[insert(pool, "s1"), insert(pool, "s2"), insert(pool, "s3")]))
    first.commit(Commit(group, turn(), uses=[(pool, "s1")]))
    kept = {pool: [a for a in left(first, pool)[pool] if a.sample != "s3"]}
    first.close()
    other = make("other", node="elsewhere")
    other.attach(group, kept, told.epochs[-1])
    assert other.anchors(pool, SLOT) == (), "another node's tensors are not here"
    second = make("second", node="node")
    second.attach(group, kept, told.epochs[-1])
    assert {a.sample: a.uses for a in second.anchors(pool, SLOT)} == {"s1": 1, "s2": 0}
    assert not second.commit(Commit(group, turn(), inserts=[insert(pool, "s1")])).accepted, "still known"
    assert second.commit(Commit(group, turn(), inserts=[insert(pool, "s3")])).accepted, "its tensors were lost"


def test_what_was_pruned_meanwhile_stays_pruned(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    told = Told()
    first = make("first", node="node", limits=Limits(bound=3), told=told)
    for sample in ("s1", "s2", "s3"):
        first.commit(Commit(group, turn(), inserts=[insert(pool, sample)]))
    stale = left(first, pool)  # killed before the prune reached the disk
    assert first.commit(Commit(group, turn(), inserts=[insert(pool, "s4")])).deleted == ((pool, "s1"),)
    first.close()
    told_second = Told()
    second = make("second", node="node", told=told_second)
    second.attach(group, stale, told.epochs[-1])
    assert [a.sample for a in second.anchors(pool, SLOT)] == ["s2", "s3"]
    assert told_second.deleted == [(pool, "s1")], "whoever keeps its tensors hears of it"


def test_a_new_server_takes_what_the_node_kept(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    told, kept = Told(), {pool: [Anchor("s1", 5, 40, 3, frozenset({SLOT})), Anchor("s2", 5, 41, 0, frozenset({SLOT}))]}
    catalog = make("boot", told=told)
    catalog.attach(group, kept, "a server that is gone")
    assert list(catalog.anchors(pool, SLOT)) == kept[pool]
    assert len(told.epochs) == 1
    assert catalog.commit(Commit(group, turn(), inserts=[insert(pool, "s3")])).accepted
    assert [(a.sample, a.uses) for a in catalog.anchors(pool, SLOT)] == [("s1", 3), ("s2", 0), ("s3", 0)], "the oldest first"
    later = make("later", node="node of boot")
    later.attach(group, left(catalog, pool), told.epochs[-1])
    assert later.anchors(pool, SLOT) == catalog.anchors(pool, SLOT)


def test_without_a_server_the_kept_anchors_serve(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    kept = {pool: [Anchor("s1", 5, 40, 3, frozenset({SLOT}))]}
    catalog = make(url="redis://127.0.0.1:1/0")
    catalog.attach(group, kept, "an epoch")
    assert list(catalog.anchors(pool, SLOT)) == kept[pool]


def test_a_flushed_server_gets_the_snapshot_back(
    make: Callable[..., Catalog], group: Group, pool: PoolKey, redis_url: str
) -> None:
    catalog = make()
    catalog.commit(Commit(group, turn(), inserts=[insert(pool, "s1"), insert(pool, "s2")]))
    with redis.Redis.from_url(redis_url, decode_responses=True) as server:
        while server.get(group.epoch) is None:  # the reader has seen this server
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)
        server.delete(pool.key, group.revision, group.events, group.epoch)
        deadline = threading.Event()
        for _ in range(500):
            if server.hlen(pool.key) == 2:
                break
            deadline.wait(0.01)
        assert sorted(server.hkeys(pool.key)) == ["s1", "s2"]
    assert not catalog.commit(Commit(group, turn(), inserts=[insert(pool, "s1")])).accepted, "still known"
    assert catalog.commit(Commit(group, turn(), inserts=[insert(pool, "s3")])).accepted
    assert [a.sample for a in catalog.anchors(pool, SLOT)] == ["s1", "s2", "s3"]


def test_a_lost_server_refuses_commits_and_serves_the_snapshot(make: Callable[..., Catalog], group: Group, pool: PoolKey) -> None:
    catalog = make(url="redis://127.0.0.1:1/0")
    with pytest.raises(KVCacheError) as error:
        catalog.commit(Commit(group, turn(), inserts=[insert(pool, "s")]))
    assert error.value.code is Code.CATALOG
    assert catalog.anchors(pool, SLOT) == ()
    assert not catalog.ping()


def test_embedded_servers_started_together_share_no_port() -> None:
    with ThreadPoolExecutor(6) as threads:
        servers = list(threads.map(lambda _: EmbeddedServer(), range(6)))
    try:
        assert len({server.url for server in servers}) == 6
        for number, server in enumerate(servers):
            with redis.Redis.from_url(server.url) as client:
                assert client.set("number", number, nx=True)
    finally:
        for server in servers:
            server.close()
