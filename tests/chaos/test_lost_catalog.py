"""kill -9 of Valkey: turns go on, commits wait for the next server, reuse is back without restarting anybody."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import psutil
import redis
from kvcache_client import KVCacheClient
from kvcache_client.adapters.transformers import SharedModel

from kvcache_service.evaluation.service import ServiceProcess
from tests.conftest import ByteTokenizer, tiny_llama
from tests.e2e.test_agents import TOKENS, Team, dense, question


def valkey_pid(service: ServiceProcess) -> int:
    with redis.Redis.from_url(service.catalog_url) as server:
        return int(server.info("server")["process_id"])


def test_valkey_killed_in_mid_turn(start_service: Callable[..., ServiceProcess], model: Any, transport: str) -> None:
    with start_service() as service, KVCacheClient(service.target, transport=transport) as client:
        team = Team(model, client)
        team.warm()
        first = team.first.run({"question": question(100)}, max_new_tokens=TOKENS)
        samples = {"question": question(100), "first": first.token_ids}
        call = team.second.begin(samples, max_new_tokens=TOKENS, policy="off")  # a planned dense turn proposes anchors
        os.kill(valkey_pid(service), signal.SIGKILL)
        call.prefill()
        call.decode()
        assert call.settle().token_ids == dense(team.second, samples).token_ids
        assert not team.shared.faults.by_code, "losing the catalog is no fault of a turn"
        # The snapshot serves on, and the supervisor brings Valkey back on the same port.
        answer = team.ask(question(105))[1]
        assert (answer.outcome, answer.reason) == ("reuse", "none")
        while service.metrics()["kvcache_catalog_up"] != 1:
            pass
        assert valkey_pid(service) > 0
        fresh = random.Random(5)
        anchors = service.metrics()["kvcache_anchors"]
        text = "".join(fresh.choices("qrstuvw", k=18))
        answer = team.first.run({"question": text}, max_new_tokens=TOKENS)
        team.second.run({"question": text, "first": answer.token_ids}, max_new_tokens=TOKENS, policy="off")
        assert service.metrics()["kvcache_anchors"] > anchors


def test_no_server_outlives_a_killed_service(start_service: Callable[..., ServiceProcess]) -> None:
    with start_service() as service:
        family = psutil.Process(service.process.pid).children(recursive=True)
        assert any("valkey" in p.name() for p in family)
        service.process.kill()
        service.process.wait()
        gone, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
        assert len(gone) == len(family)


def test_a_silent_server_stops_nobody(start_service: Callable[..., ServiceProcess]) -> None:
    """SIGSTOP instead of a crash: the commit times out, the answer is right, plans need no Redis at all."""
    with start_service(redis_timeout="0.3") as service, KVCacheClient(service.target) as client:
        team = Team(tiny_llama(), client)
        team.warm()
        pid = valkey_pid(service)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert team.ask(question(102))[1].outcome == "reuse"
            first = team.first.run({"question": question(103)}, max_new_tokens=TOKENS)
            samples = {"question": question(103), "first": first.token_ids}
            answer = team.second.run(samples, max_new_tokens=TOKENS, policy="off")  # proposes anchors
            assert answer.token_ids == dense(team.second, samples).token_ids
            assert service.metrics()["kvcache_catalog_commit_failures_total"] == 1
            assert not team.shared.faults.by_code
        finally:
            os.kill(pid, signal.SIGCONT)


def test_shared_model_survives_a_service_that_never_was() -> None:
    with KVCacheClient("127.0.0.1:1", timeout=1.0) as client:
        shared = SharedModel(tiny_llama(), ByteTokenizer(), client)
        answer = shared.agent("Say {x}").run({"x": "a"}, max_new_tokens=2)
        assert answer.reason == "service"
        assert len(answer.token_ids) == 2
