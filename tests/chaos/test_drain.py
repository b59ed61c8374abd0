"""SIGTERM under load: open turns end as if nothing had happened, new ones run dense, the process leaves in time."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvcache_client import KVCacheClient
from kvcache_client.errors import CacheError

from kvcache_service.evaluation.service import ServiceProcess
from tests.conftest import tiny_llama
from tests.e2e.test_agents import TOKENS, Team, dense, question

THREADS = 6


def terminate(service: ServiceProcess) -> None:
    """Returns when the service says that it drains."""
    with grpc.insecure_channel(service.target) as channel:
        states = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        service.process.send_signal(signal.SIGTERM)
        assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
        states.cancel()


def test_open_turns_are_settled_and_new_ones_run_dense(
    start_service: Callable[..., ServiceProcess], model: Any, transport: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        start_service(drain_seconds="60") as service,
        KVCacheClient(service.target, transport=transport) as client,
        KVCacheClient(service.target, transport=transport) as other,
    ):
        team = Team(model, client)
        team.warm()
        first = team.first.run({"question": question(100)}, max_new_tokens=TOKENS)
        samples = {"question": question(100), "first": first.token_ids}
        fetching = team.second.begin(samples, max_new_tokens=TOKENS)
        teaching = team.second.begin(samples, max_new_tokens=TOKENS, policy="off")
        other.connect()  # idle: holds nothing up
        terminate(service)

        answer = team.first.run({"question": question(101)}, max_new_tokens=TOKENS)
        assert answer.token_ids == dense(team.first, {"question": question(101)}).token_ids
        assert dict(team.shared.faults.by_code) == {"DRAINING": 1}
        with pytest.raises(CacheError) as refused, KVCacheClient(service.target) as late:
            late.connect()
        assert (refused.value.code, refused.value.retry) == ("DRAINING", True)

        fetching.prefill()
        fetching.decode()
        assert fetching.settle().outcome == "reuse"
        teaching.prefill()
        teaching.decode()
        assert service.metrics()["kvcache_open_turns"] == 1
        assert service.process.poll() is None, "it waits for the last turn"
        before = time.monotonic()
        teaching.settle()
        assert service.process.wait(timeout=30) == 0
        assert time.monotonic() - before < 10, "it does not wait for the rest of its time"
        assert dict(team.shared.faults.by_code) == {"DRAINING": 1}
    assert "Traceback" not in capfd.readouterr().err


def test_no_turn_fails_under_load(start_service: Callable[..., ServiceProcess], capfd: pytest.CaptureFixture[str]) -> None:
    """Agents that go on asking before, while and after the service stops say what they would have said without it."""
    right: dict[int, list[Any]] = {}
    wrong: list[object] = []
    gone = threading.Event()
    model = tiny_llama()

    with start_service(drain_seconds="20") as service:
        asked = threading.Barrier(THREADS + 1)

        def work(number: int) -> None:
            with KVCacheClient(service.target) as client:
                team = Team(model, client)
                last = False
                for turn in range(10_000):
                    if turn == 3:
                        asked.wait()
                    last = gone.is_set()
                    asking = {"question": question(1000 * number + turn)}
                    answer = team.first.run(asking, max_new_tokens=4)
                    right.setdefault(number, []).append(answer.reason)
                    if answer.token_ids != dense(team.first, asking).token_ids[:4]:
                        wrong.append((number, turn, answer))
                    if last:
                        return

        def guarded(number: int) -> None:
            try:
                work(number)
            except Exception as error:  # whatever it is: it must reach the test
                wrong.append(error)
                asked.abort()

        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        asked.wait()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(timeout=30) == 0
        gone.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(right) == THREADS
    assert all(reasons[-1] == "service" for reasons in right.values()), "the last turns had no service any more"
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_that_never_settles_is_not_waited_for(start_service: Callable[..., ServiceProcess], model: Any) -> None:
    with start_service(drain_seconds="0.5") as service, KVCacheClient(service.target) as client:
        call = Team(model, client).first.begin({"question": question(7)}, max_new_tokens=4)
        service.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            service.process.wait(timeout=0.3)
        assert service.process.wait(timeout=10) == 0
        call.prefill()
        call.decode()
        assert call.settle().token_ids == dense(call._agent, {"question": question(7)}).token_ids[:4]
