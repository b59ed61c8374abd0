"""Real Redis servers of Debian's packages, started in a folder of the test."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
needs_sentinel = pytest.mark.skipif(shutil.which("redis-sentinel") is None, reason="needs redis-sentinel")
SLOTS = 16384


def free_ports(count: int, above: int = 0) -> list[int]:
    """Ports that nobody has now. above: with a cluster bus port 10,000 higher, which must exist too."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port + above < 1 << 16:
                found.append(port)
        return found


def until(check: Callable[[], bool], what: str) -> None:
    """Ask a server again and again; each question takes a round trip."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(redis.RedisError, OSError):
            if check():
                return
    raise AssertionError(f"{what} did not come about")


class Server:
    """One redis-server or redis-sentinel process."""

    def __init__(self, folder: Path, port: int, lines: Sequence[str], program: str = "redis-server") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port
        self._program = program
        self._configuration = folder / "redis.conf"
        self._configuration.write_text("\n".join([f"dir {folder}", "bind 127.0.0.1", *lines, ""]))
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([self._program, self._configuration], stdout=subprocess.DEVNULL)

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, decode_responses=True, socket_timeout=2, **options)  # type: ignore[call-overload,no-any-return]

    def ready(self, **options: object) -> Server:
        with self.client(**options) as client:
            until(client.ping, f"port {self.port}")
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def servers() -> Iterator[Callable[[Server], Server]]:
    """Whatever passes through ends with the context."""
    started: list[Server] = []

    def kept(server: Server) -> Server:
        started.append(server)
        return server

    try:
        yield kept
    finally:
        for server in reversed(started):
            server.kill()


def plain(folder: Path, *lines: str) -> Server:
    (port,) = free_ports(1)
    return Server(folder, port, [f"port {port}", 'save ""', *lines])


@contextlib.contextmanager
def cluster(folder: Path, *lines: str) -> Iterator[list[Server]]:
    """Three masters that share all slots."""
    with servers() as kept:
        members = []
        for port in free_ports(3, above=10_000):
            own = [f"port {port}", 'save ""', "cluster-enabled yes", "cluster-node-timeout 2000", *lines]
            members.append(kept(Server(folder / str(port), port, own)).ready())
        share = SLOTS // len(members) + 1
        for number, member in enumerate(members):
            with member.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, min(SLOTS, (number + 1) * share) - 1)
                client.execute_command("CLUSTER MEET", "127.0.0.1", members[0].port)
        for member in members:
            with member.client() as client:
                until(lambda asked=client: asked.cluster("info")["cluster_state"] == "ok", "the cluster")  # type: ignore[misc]
        yield members


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[tuple[list[Server], list[Server]]]:
    """A master named `kv`, its replica, and three sentinels that agree quickly. Yields data nodes (master first), sentinels."""
    with servers() as kept:
        master = kept(plain(folder / "master", "requirepass secret", "masterauth secret", "repl-diskless-sync-delay 0")).ready(
            password="secret"
        )
        follow = f"replicaof 127.0.0.1 {master.port}"
        replica = kept(plain(folder / "replica", "requirepass secret", "masterauth secret", follow)).ready(password="secret")
        with replica.client(password="secret") as client:
            until(lambda: client.info("replication")["master_link_status"] == "up", "replication")  # type: ignore[index]
        watchers = []
        for port in free_ports(3):
            lines = [
                f"port {port}",
                f"sentinel monitor kv 127.0.0.1 {master.port} 2",
                "sentinel auth-pass kv secret",
                "sentinel down-after-milliseconds kv 500",
                "sentinel failover-timeout kv 3000",
            ]
            watchers.append(kept(Server(folder / str(port), port, lines, "redis-sentinel")).ready())
        for watcher in watchers:
            with watcher.client() as client:
                # Else the first failover waits for sentinels and replicas that nobody knows of.
                until(lambda asked=client: _knows(asked), "agreement of the sentinels")  # type: ignore[misc]
        yield [master, replica], watchers


def _knows(client: redis.Redis) -> bool:
    found = client.sentinel_master("kv")
    return int(found["num-other-sentinels"]) == 2 and int(found["num-slaves"]) == 1  # type: ignore[index]
