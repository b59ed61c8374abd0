"""What `kvcache top` makes of metrics: by hand, and of a live service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvcache_client import KVCacheClient

from kvcache_service.commands.top import Figures, figures
from kvcache_service.evaluation.service import ServiceProcess, read_metrics
from tests.e2e.test_agents import Team

KVCACHE = Path(sys.executable).with_name("kvcache")


def bucket(outcome: str, le: str) -> str:
    return f'kvcache_ttft_seconds_bucket{{le="{le}",outcome="{outcome}"}}'


def test_figures_are_of_the_time_between_two_looks(service: ServiceProcess) -> None:
    idle = read_metrics(service.metrics_url)
    assert figures({}, idle).token_reuse is None
    assert figures({}, idle).ttft == {"reuse": None, "partial": None, "dense": None}
    bounds = [series.split('le="')[1].split('"')[0] for series in idle if series.startswith("kvcache_ttft_seconds_bucket")]
    assert {"0.1", "0.2", "+Inf"} <= set(bounds)
    first = idle | {'kvcache_turns_total{outcome="dense",policy="guarded"}': 7.0, "kvcache_prompt_tokens_total": 700.0}
    second = first | {
        'kvcache_turns_total{outcome="dense",policy="guarded"}': 8.0,
        'kvcache_turns_total{outcome="reuse",policy="guarded"}': 2.0,
        'kvcache_turns_total{outcome="partial",policy="guarded"}': 1.0,
        'kvcache_turns_total{outcome="aborted",policy="guarded"}': 5.0,
        "kvcache_prompt_tokens_total": 1100.0,
        "kvcache_reused_tokens_total": 300.0,
        'kvcache_fallbacks_total{reason="novelty"}': 1.0,
    }
    # Four first tokens: one of up to 0.1 s, three of 0.1 to 0.2 s. The median is the second: a third of the way.
    counts = {bound: 4.0 if float(bound) >= 0.2 else 1.0 if bound == "0.1" else 0.0 for bound in bounds}
    second |= {bucket("reuse", bound): count for bound, count in counts.items()}
    # All beyond the last bound.
    second[bucket("dense", "+Inf")] = 3.0
    found = figures(first, second)
    assert (found.turns, found.token_reuse, found.call_reuse) == (9, 0.75, 0.75)
    assert found.ttft["reuse"] == pytest.approx(0.1 + 0.1 / 3)
    assert found.ttft["dense"] == max(float(b) for b in bounds if b != "+Inf")
    assert found.fallbacks == {"novelty": 1.0}


def test_one_look_at_a_live_service(start_service: Callable[..., ServiceProcess], model: Any) -> None:
    with start_service() as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        team.ask("something new")
        done = subprocess.run(
            [KVCACHE, "top", "--metrics", service.metrics_url, "--once", "--json"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found = Figures(**json.loads(done.stdout))
        assert found.turns == 22
        assert found.sessions == 1
        assert 0 < (found.token_reuse or 0) < 1
        assert found.ttft["reuse"] is not None
        text = subprocess.run([KVCACHE, "top", "--metrics", service.metrics_url, "--once"], capture_output=True, text=True).stdout
        assert f"{found.token_reuse:.0%} of prompt tokens" in text
    gone = subprocess.run([KVCACHE, "top", "--metrics", service.metrics_url, "--once"], capture_output=True, text=True)
    assert gone.returncode == 1
    assert service.metrics_url in gone.stderr
