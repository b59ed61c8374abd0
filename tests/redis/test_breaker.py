"""The breaker with a clock of the test, and what a URL names."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.exceptions import RedisClusterException

from kvcache_service.catalog.connection import Connection, connector
from tests.conftest import Clock

NOWHERE = "redis://127.0.0.1:1/0"


class Store:
    """Counts the calls that come through, and answers as told."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.calls = 0
        self.error: Exception | None = redis.ConnectionError("gone")

    def _answer(self, _: Any) -> str:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return "fine"

    def ask(self) -> str:
        return self._connection.ask(self._answer)


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(Connection(NOWHERE, 1.0, clock=clock, draw=lambda: 1.0))


@pytest.mark.parametrize(
    "error", [redis.ConnectionError("x"), redis.TimeoutError("x"), redis.ReadOnlyError("x"), RedisClusterException("x")]
)
def test_a_store_that_is_down_is_tried_once_a_pause(store: Store, clock: Clock, error: Exception) -> None:
    store.error = error
    for attempt, pause in enumerate([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]):
        with pytest.raises(redis.RedisError, match=str(error)):
            store.ask()
        clock.tick(0.99 * pause)
        with pytest.raises(redis.ConnectionError, match="not asked"):
            store.ask()
        assert store.calls == attempt + 1
        clock.tick(0.02 * pause)


def test_one_answer_ends_the_pause(store: Store, clock: Clock) -> None:
    with pytest.raises(redis.ConnectionError):
        store.ask()
    store.error = None
    clock.tick(0.1)
    assert [store.ask(), store.ask()] == ["fine", "fine"]
    store.error = redis.ConnectionError("gone again")
    with pytest.raises(redis.ConnectionError, match="gone again"):
        store.ask()
    clock.tick(0.1)
    store.error = None
    assert store.ask() == "fine", "the pause is short again"


def test_a_refusal_is_an_answer(store: Store, clock: Clock) -> None:
    with pytest.raises(redis.ConnectionError):
        store.ask()
    clock.tick(0.1)
    store.error = redis.ResponseError("NOPERM")
    for _ in range(2):
        with pytest.raises(redis.ResponseError):
            store.ask()


def test_while_one_tries_the_others_fail_at_once(store: Store, clock: Clock) -> None:
    with pytest.raises(redis.ConnectionError):
        store.ask()
    clock.tick(0.1)
    connection = store._connection
    refused = []

    def slow(_: Any) -> str:
        with pytest.raises(redis.ConnectionError, match="not asked") as caught:
            connection.ask(lambda _: "no")
        refused.append(caught)
        clock.tick(0.9)  # a call may take as long as its timeout
        with pytest.raises(redis.ConnectionError, match="not asked"):
            connection.ask(lambda _: "no")
        return "fine"

    assert connection.ask(slow) == "fine"
    assert len(refused) == 1


def test_an_error_of_the_request_is_no_failure_of_the_store(store: Store) -> None:
    store.error = redis.ResponseError("NOPERM")
    for _ in range(3):
        with pytest.raises(redis.ResponseError):
            store.ask()
    assert store.calls == 3


def test_many_services_do_not_come_back_together(clock: Clock) -> None:
    early, late = (Store(Connection(NOWHERE, 1.0, clock=clock, draw=lambda drawn=drawn: drawn)) for drawn in (0.0, 1.0))
    for store in (early, late):
        with pytest.raises(redis.ConnectionError, match="gone"):
            store.ask()
    clock.tick(0.06)
    with pytest.raises(redis.ConnectionError, match="gone"):
        early.ask()
    with pytest.raises(redis.ConnectionError, match="not asked"):
        late.ask()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://x", "use redis, rediss or unix"),
        ("redis+raft://x", "+sentinel or +cluster"),
        ("redis+sentinel://a:1", "/MASTER_NAME"),
        ("redis+sentinel://a:b/kv", "'a:b' is no HOST:PORT"),
        ("redis+cluster://a:1,:2", "':2' is no HOST:PORT"),
        ("redis://a:b", "redis_url"),
    ],
)
def test_a_url_that_names_nothing_is_told(url: str, words: str) -> None:
    with pytest.raises(ValueError, match="redis_url") as caught:
        connector(url, 1.0)
    assert words in str(caught.value)


def test_a_url_is_read_whole() -> None:
    single: Any = connector("rediss://me:p%40ss@h:7/2?ssl_ca_certs=/ca.pem", 0.5)()
    options = single.connection_pool.connection_kwargs
    assert (options["host"], options["port"], options["db"], options["password"]) == ("h", 7, 2, "p@ss")
    assert (options["socket_timeout"], options["ssl_ca_certs"]) == (0.5, "/ca.pem")
    url = "rediss+sentinel://me:p%40ss@a,b:7/kv?sentinel_password=watch&ssl_ca_certs=/ca.pem&db=3"
    master: Any = connector(url, 0.5)()
    pool = master.connection_pool
    assert (pool.service_name, pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == ("kv", "me", "p@ss")
    assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
    watchers = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(w["host"], w["port"], w["password"]) for w in watchers] == [("a", 26379, "watch"), ("b", 7, "watch")]
    assert all(w["ssl_ca_certs"] == "/ca.pem" for w in watchers)


def test_a_cluster_is_not_looked_for_before_the_first_call() -> None:
    connect = connector("redis+cluster://127.0.0.1:1", 0.2)
    with pytest.raises(RedisClusterException):
        connect()
