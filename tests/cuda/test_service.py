"""The service end to end on the CUDA backend gives the KV that the CPU backend gives."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
from kvcache_client import KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb
from torch import Tensor

from kvcache_service.__main__ import build_backend
from kvcache_service.config import Config
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.kernels.cuda.runtime import CupyRuntime, Runtime
from tests.e2e.test_agents import TOKENS, Team, question

SHIM = {"module": "tests.cuda.service", "device": "cuda"}


def reused(client: KVCacheClient, model: Any, policy: str) -> tuple[Tensor, list[str]]:
    """What a warm reuse turn finds in its buffer, prompt and probe columns, and how its segments were planned."""
    team = Team(model, client)
    for seed in range(4):
        first = team.first.run({"question": question(seed)}, max_new_tokens=TOKENS)
        team.second.run({"question": question(seed), "first": first.token_ids}, max_new_tokens=TOKENS)
    first = team.first.run({"question": question(50)}, max_new_tokens=TOKENS)
    samples = {"question": question(50), "first": first.token_ids}
    call = team.second.begin(samples, max_new_tokens=TOKENS, policy=policy)
    turn = call._turn
    assert turn is not None
    turn.fetch()
    view, plan = team.shared.view(turn), turn.plan.segments
    columns = [c for s in plan for c in range(s.start, s.start + s.tokens) if s.action != pb.ACTION_DENSE and c not in s.fresh]
    found = view[:, :, columns].clone()
    call.abort()
    return found, [str(s.action) for s in plan]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(("policy", "codec"), [("guarded", "int8"), ("paper", "fp8")])
def test_the_backends_agree(start_service: Callable[..., ServiceProcess], model: Any, policy: str, codec: str) -> None:
    found = {}
    for device, settings in {"cpu": {}, "cuda": SHIM}.items():
        with start_service(**settings, host_codec=codec, gamma="1e9") as service, KVCacheClient(service.target) as client:
            found[device] = reused(client, model, policy)
            metrics = service.metrics()
            assert (metrics["kvcache_device_used_bytes"] > 0) == (device == "cuda")
            assert metrics['kvcache_errors_total{code="internal"}'] == 0
    assert found["cuda"][1] == found["cpu"][1]
    assert found["cpu"][0].numel()
    # Not to the bit: predictors rest in float16, so that a last bit of what was learned may fall to either side.
    assert (found["cuda"][0] - found["cpu"][0]).norm() / found["cpu"][0].norm() < 2e-4


def test_auto_takes_the_cpu_where_no_device_answers() -> None:
    def absent(index: int) -> Runtime:
        raise RuntimeError("no device")

    config = Config(device="auto")  # type: ignore[call-arg]
    assert build_backend(config, absent).device == "cpu"
    with pytest.raises(RuntimeError, match="no device"):
        build_backend(Config(device="cuda:1"), absent)  # type: ignore[call-arg]


def test_a_missing_cupy_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="pip install"):
        CupyRuntime(0)
