"""The way to the metadata store, whatever it is, behind a circuit breaker: while it is down, one call a pause tries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import ClusterDownError, ReadOnlyError, RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

Store = redis.Redis | RedisCluster
Reply = TypeVar("Reply")

_DOWN = (redis.ConnectionError, redis.TimeoutError, ClusterDownError, ReadOnlyError)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds
_SENTINEL_PORT, _PORT = 26379, 6379


class Connection:
    """Thread-safe. Connects at the first call, so that a service starts where its store does not answer yet.

    draw: random numbers in [0, 1); they keep many services from coming back in the same moment.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._connect = connector(url, timeout)
        self._timeout = timeout
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._pause = 0.0
        self._not_before = 0.0

    def ask(self, call: Callable[[Any], Reply]) -> Reply:
        """call(store). Raises RedisError; at once, without a call, while the store is given a pause."""
        self._pass()
        try:
            reply = call(self._connected())
        except RedisClusterException as error:  # no RedisError: what a cluster raises that cannot be reached as a whole
            self._failed()
            raise redis.ConnectionError(str(error)) from error
        except _DOWN:
            self._failed()
            raise
        except redis.RedisError:
            self._pause = 0.0  # it refused, so it is there
            raise
        self._pause = 0.0
        return reply

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _connected(self) -> Store:
        with self._lock:
            if self._store is None:
                self._store = self._connect()
            return self._store

    def _pass(self) -> None:
        with self._lock:
            wait = self._not_before - self._clock()
            if self._pause and wait > 0:
                raise redis.ConnectionError(f"not asked: it did not answer, and has {wait:.1f} s more")
            if self._pause:  # this caller tries; the others fail at once until he knows
                self._not_before = self._clock() + max(self._pause, self._timeout)

    def _failed(self) -> None:
        with self._lock:
            self._pause = min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE)
            self._not_before = self._clock() + self._pause * (1 + self._draw()) / 2


def connector(url: str, timeout: float) -> Callable[[], Store]:
    """What opens the store that `url` names; timeout: seconds for connecting and for every reply. Raises ValueError.

    redis://, rediss:// and unix:// as redis-py reads them. redis+sentinel://HOST:PORT,HOST:PORT/MASTER_NAME and
    redis+cluster://HOST:PORT,HOST:PORT name several; rediss+ speaks TLS. User and password are the data nodes'; the sentinels'
    own stand in the query, as sentinel_username and sentinel_password. Other query parameters are redis-py's, ssl_ca_certs say.
    """
    parts = urlsplit(url)
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "decode_responses": True,
        "retry": Retry(NoBackoff(), 1),
    }
    if parts.scheme in ("redis", "rediss", "unix"):
        try:
            client = redis.Redis.from_url(url, **options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"redis_url: {error}") from error
        return lambda: client
    family, _, kind = parts.scheme.partition("+")
    if family not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
        raise ValueError(
            f"redis_url begins with {parts.scheme}://; use redis, rediss or unix, the first two also with +sentinel or +cluster"
        )
    query = dict(parse_qsl(parts.query))
    sentinel: dict[str, Any] = {
        name.removeprefix("sentinel_"): query.pop(name) for name in list(query) if name.startswith("sentinel_")
    }
    if family == "rediss":
        options["ssl"] = sentinel["ssl"] = True
        sentinel |= {name: value for name, value in query.items() if name.startswith("ssl_")}
    options |= query
    credentials, _, _ = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    options |= {k: unquote(v) for k, v in (("username", user), ("password", password)) if v}
    if kind == "cluster":
        nodes = [ClusterNode(*node) for node in _nodes(parts, _PORT)]
        return lambda: RedisCluster(startup_nodes=nodes, **options)
    name = parts.path.strip("/")
    if not name or "/" in name:
        raise ValueError("redis_url names sentinels, but not one master; end it in /MASTER_NAME")
    sentinel |= {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    watchers = Sentinel(_nodes(parts, _SENTINEL_PORT), sentinel_kwargs=sentinel, **options)
    master: Store = watchers.master_for(name)
    return lambda: master


def _nodes(parts: SplitResult, default: int) -> list[tuple[str, int]]:
    found = []
    for text in parts.netloc.rpartition("@")[2].split(","):
        host, _, port = text.rpartition(":") if ":" in text else (text, "", str(default))
        if not host or not port.isdigit():
            raise ValueError(f"redis_url: {text!r} is no HOST:PORT")
        found.append((host, int(port)))
    return found
