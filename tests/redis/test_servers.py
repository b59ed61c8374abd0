"""The service on real Redis servers: TLS, least rights, Cluster, a failover, one that is slow, one that was flushed."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kvcache_client import KVCacheClient

from kvcache_service.evaluation.service import ServiceProcess
from tests.e2e.test_agents import TOKENS, Team, dense, question
from tests.e2e.test_bench import SlowPort
from tests.redis.servers import Server, cluster, free_ports, needs_redis, needs_sentinel, plain, servers, watched
from tests.security.conftest import Authority

DOC = Path(__file__).parents[2] / "docs" / "redis.md"
pytestmark = needs_redis
fresh = itertools.count(10_000)


def learns_and_reuses(service: ServiceProcess, client: KVCacheClient, model: Any) -> Team:
    """Warm turns are committed to the store, and what was committed is reused."""
    team = Team(model, client)
    team.warm()
    assert service.metrics()["kvcache_anchors"] > 0
    assert service.metrics()["kvcache_catalog_commit_failures_total"] == 0
    asked(team, "reuse")
    return team


def asked(team: Team, outcome: str) -> None:
    """A new question, answered as dense answers it, by exact or corrected KV."""
    _, second = team.ask(question(next(fresh)))
    assert second.outcome == outcome
    assert not team.shared.faults.by_code


def commits(service: ServiceProcess, team: Team) -> bool:
    """A dense turn whose anchors the store takes in."""
    before = service.metrics()["kvcache_anchors"]
    text = question(next(fresh))
    first = team.first.run({"question": text}, max_new_tokens=TOKENS, policy="off")
    team.second.run({"question": text, "first": first.token_ids}, max_new_tokens=TOKENS, policy="off")
    return service.metrics()["kvcache_anchors"] > before


def test_tls(start_service: Callable[..., ServiceProcess], model: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "redis-ca")
    certificate, key = authority.issue("redis")
    (port,) = free_ports(1)
    lines = [
        "port 0",
        f"tls-port {port}",
        f"tls-cert-file {certificate}",
        f"tls-key-file {key}",
        f"tls-ca-cert-file {authority.path}",
    ]
    tls = {"ssl": True, "ssl_ca_certs": str(authority.path)}
    with servers() as kept:
        kept(Server(tmp_path / "server", port, [*lines, "tls-auth-clients optional", 'save ""'])).ready(**tls)
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.path}"
        with start_service(redis_url=url, pool_anchors="100") as service, KVCacheClient(service.target) as client:
            learns_and_reuses(service, client, model)
        stranger = Authority(tmp_path, "stranger").path
        with start_service(redis_url=f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={stranger}") as service:
            assert service.metrics()["kvcache_catalog_up"] == 0, "a server of another authority is not spoken to"


def rights() -> list[str]:
    """The ACL rules that docs/redis.md tells operators to give."""
    (rules,) = re.findall(r"ACL SETUSER kvcache on >PASSWORD (.*)", DOC.read_text())
    return str(rules).split()


def test_the_documented_rights_suffice(start_service: Callable[..., ServiceProcess], model: Any, tmp_path: Path) -> None:
    with servers() as kept:
        server = kept(plain(tmp_path)).ready()
        with server.client() as client:
            client.execute_command("ACL SETUSER", "kvcache", "on", ">secret", *rights())
            client.execute_command("ACL SETUSER", "default", "off")
        url = f"redis://kvcache:secret@127.0.0.1:{server.port}/0"
        with start_service(redis_url=url, pool_anchors="100") as service, KVCacheClient(service.target) as connected:
            team = learns_and_reuses(service, connected, model)
            assert commits(service, team)
        with server.client(username="kvcache", password="secret") as client, pytest.raises(Exception, match="NOPERM|permissions"):
            client.set("elsewhere", "1")


@pytest.mark.parametrize("missing", ["+eval", "+hset", "+xadd", "+get"])
def test_no_documented_right_is_idle(
    missing: str, start_service: Callable[..., ServiceProcess], model: Any, tmp_path: Path
) -> None:
    with servers() as kept:
        server = kept(plain(tmp_path)).ready()
        with server.client() as client:
            client.execute_command("ACL SETUSER", "kvcache", "on", ">secret", *(r for r in rights() if r != missing))
        url = f"redis://kvcache:secret@127.0.0.1:{server.port}/0"
        with start_service(redis_url=url) as service, KVCacheClient(service.target) as connected:
            team = Team(model, connected)
            team.ask(question(1))
            assert service.metrics()["kvcache_catalog_commit_failures_total"] > 0
            assert not team.shared.faults.by_code, "turns do not mind"


def test_cluster(start_service: Callable[..., ServiceProcess], model: Any, tmp_path: Path) -> None:
    """Two nodes of the service see each other's anchors through a cluster of three; tenants' keys lie on several masters."""
    with cluster(tmp_path) as members:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{member.port}" for member in members[:2])
        with start_service(redis_url=url, pool_anchors="100") as service, KVCacheClient(service.target) as client:
            team = learns_and_reuses(service, client, model)
            assert commits(service, team)
        keys = {member.port: list(member.client().scan_iter("kvcache:1:*")) for member in members}
        assert sum(len(found) > 0 for found in keys.values()) == 1, "one group, one slot"
        tags = {key.partition("}")[0] for found in keys.values() for key in found}
        assert len(tags) == 1


def test_a_cluster_that_lost_a_master_and_got_it_back(
    start_service: Callable[..., ServiceProcess], model: Any, tmp_path: Path
) -> None:
    with cluster(tmp_path, "appendonly yes") as members:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{member.port}" for member in members)
        with start_service(redis_url=url, pool_anchors="100") as service, KVCacheClient(service.target) as client:
            team = learns_and_reuses(service, client, model)
            (owner,) = [member for member in members if list(member.client().scan_iter("kvcache:1:*"))]
            owner.kill()
            asked(team, "reuse")
            assert not commits(service, team)
            owner.start()
            owner.ready()
            returned(service, team)


def returned(service: ServiceProcess, team: Team) -> None:
    """Commits are taken in and turns reuse within five seconds from now."""
    began = time.monotonic()
    while not commits(service, team):
        assert time.monotonic() - began < 5
    asked(team, "reuse")
    assert time.monotonic() - began < 5


@needs_sentinel
def test_failover(start_service: Callable[..., ServiceProcess], model: Any, tmp_path: Path) -> None:
    with watched(tmp_path) as ((master, replica), watchers):
        addresses = ",".join(f"127.0.0.1:{watcher.port}" for watcher in watchers)
        url = f"redis+sentinel://:secret@{addresses}/kv"
        with start_service(redis_url=url, pool_anchors="100") as service, KVCacheClient(service.target) as client:
            team = learns_and_reuses(service, client, model)
            master.kill()
            asked(team, "reuse")
            with replica.client(password="secret") as client_of_replica:
                while client_of_replica.info("replication")["role"] != "master":  # type: ignore[index]
                    asked(team, "reuse")
            returned(service, team)
            text = question(next(fresh))
            first = team.first.run({"question": text}, max_new_tokens=TOKENS, policy="off")
            samples = {"question": text, "first": first.token_ids}
            assert (
                team.second.run(samples, max_new_tokens=TOKENS, policy="off").token_ids == dense(team.second, samples).token_ids
            )


def test_flushed(start_service: Callable[..., ServiceProcess], model: Any, tmp_path: Path) -> None:
    with servers() as kept:
        server = kept(plain(tmp_path)).ready()
        url = f"redis://127.0.0.1:{server.port}/0"
        with start_service(redis_url=url, pool_anchors="100") as service, KVCacheClient(service.target) as client:
            team = learns_and_reuses(service, client, model)
            anchors = service.metrics()["kvcache_anchors"]
            with server.client() as direct:
                direct.flushall()
                asked(team, "reuse")
                returned(service, team)
                while not list(direct.scan_iter("kvcache:1:*:pool:*")):
                    pass
            assert service.metrics()["kvcache_anchors"] > anchors, "what was flushed was published again"


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[str]:
    """A Redis whose every reply takes half a second."""
    with servers() as kept:
        server = kept(plain(tmp_path)).ready()
        way = SlowPort(server.port, 0.25)  # there and back
        yield f"redis://127.0.0.1:{way.port}/0"
        way.close()


def test_a_slow_store_slows_settling_only(slow: str, start_service: Callable[..., ServiceProcess], model: Any) -> None:
    """16 turns settle at once, each waiting for Redis; meanwhile opening and fetching keep their pace."""
    with start_service(redis_url=slow, pool_anchors="100") as service, KVCacheClient(service.target, timeout=60.0) as client:
        team = Team(model, client)
        for seed in range(4):
            team.ask(question(seed))
        calls = []
        for _ in range(16):
            text = question(next(fresh))
            first = team.first.run({"question": text}, max_new_tokens=2)
            call = team.second.begin({"question": text, "first": first.token_ids}, max_new_tokens=2, policy="off")
            call.prefill()
            call.decode()
            calls.append(call)
        with ThreadPoolExecutor(len(calls)) as pool:
            settling = [pool.submit(call.settle) for call in calls]
            paces: list[float] = []
            while not all(done.done() for done in settling):
                began = time.perf_counter()
                turn = team.second.begin({"question": question(0), "first": question(1)}, max_new_tokens=2)
                turn.prefill()
                paces.append(time.perf_counter() - began)
                turn.abort()
            assert all(done.result() for done in settling)
        assert len(paces) > 5, "all but the last were measured while others settled"
        assert sorted(paces)[len(paces) // 2] < 0.25, "half of what one reply of Redis takes"
        assert not team.shared.faults.by_code
