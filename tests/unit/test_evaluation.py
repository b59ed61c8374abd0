"""Names, splits and statistics of the evaluation, against numbers worked out by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kvcache_client.adapters.transformers import Answer

from kvcache_service.evaluation import run, summary
from kvcache_service.evaluation.dataset import Dataset, Row
from kvcache_service.evaluation.policies import NAMES, parse
from kvcache_service.evaluation.runner import Measured
from kvcache_service.evaluation.runner import Row as Turn
from kvcache_service.evaluation.team import team


def turn(scene: int, policy: str, kl: float, **changes: Any) -> Turn:
    answer = Answer(
        token_ids=(1,),
        text="",
        outcome=changes.get("outcome", "reuse"),
        reason=changes.get("reason", "none"),
        prompt_tokens=100,
        reused_tokens=changes.get("reused", 80),
        recomputed_tokens=20,
        ttft=changes.get("ttft", 0.1),
        first_forward=0.05,
        overhead=0.05,
        residual=0.0,
        unaided=0.0,
        novelty=0.0,
    )
    return Turn(
        scene, "b", policy, answer, 0.4, kl, changes.get("top1", 1.0), 0.0, changes.get("divergence"), changes.get("refused_kl")
    )


def test_policy_names() -> None:
    assert parse("guarded").options is None, "served, gates and all"
    assert {parse(name).name for name in NAMES} == set(NAMES)
    varied = parse("guarded:8+1")
    assert (varied.name, varied.policy) == ("guarded:8+1", "guarded")
    assert varied.options is not None
    assert (varied.options.boundary, varied.options.trailing) == (8, 1)
    assert parse("reference:0+1").options.blending.absolute_frame  # type: ignore[union-attr]
    for unknown in ("", "best", "guarded:8", "guarded:a+b", "guarded:8+1x"):
        with pytest.raises(ValueError, match="use off, paper"):
            parse(unknown)


def test_figures_of_a_policy() -> None:
    rows = [
        turn(0, "guarded", 0.01, ttft=0.1, divergence=None),
        turn(1, "guarded", 0.20, ttft=0.2, top1=0.5, divergence=8),
        turn(2, "guarded", 0.0, outcome="dense", reason="residual", reused=0, refused_kl=0.02, ttft=0.4),
        turn(0, "recompute", 0.02),
        turn(1, "recompute", 0.10),
        turn(2, "recompute", 0.02),
    ]
    found = summary.figures(Measured(rows, [turn(0, "guarded", 0.0, outcome="partial")], {}), 0.05, {"anchors": 7, "guarded": 5})
    guarded = found["guarded"]
    assert guarded["n"] == 3
    assert guarded["kl_mean"] == pytest.approx(0.07)
    assert guarded["top1"] == pytest.approx(2.5 / 3)
    assert guarded["token_reuse"] == pytest.approx(160 / 300)
    assert guarded["call_reuse"] == pytest.approx(2 / 4), "agents with nothing to reuse are calls too"
    assert guarded["harm_rate"] == pytest.approx(1 / 3), "the second turn is farther from dense than moved KV"
    assert guarded["wrong_accept"] == pytest.approx(1 / 3)
    assert guarded["wrong_reject"] == pytest.approx(1 / 3)
    assert guarded["ttft_ratio_p50"] == pytest.approx(0.5)
    assert guarded["reasons"] == {"residual": 1}
    assert guarded["pool_bytes"] == 5
    assert found["recompute"]["pool_bytes"] == 0


def test_pairs_are_of_the_same_turn() -> None:
    rows = [turn(n, "guarded", 0.01 * n) for n in range(4)] + [turn(n, "paper", 0.01 * n + 0.05) for n in range(4)]
    random.Random(0).shuffle(rows)
    found = summary.paired(rows, "guarded")["paper"]
    assert found["difference"] == pytest.approx(-0.05)
    low, high = found["interval"]  # type: ignore[misc]
    assert low == pytest.approx(-0.05)
    assert high == pytest.approx(-0.05)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    draw = random.Random(1)
    inside = 0
    for case in range(200):
        low, high = summary.interval([draw.gauss(3.0, 1.0) for _ in range(40)], seed=case)
        inside += low <= 3.0 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_controls_must_be_far_worse() -> None:
    measured = Measured([], [], {"zeroed": [(1.0, 0.1), (1.0, 0.1)], "random": [(0.2, 0.1)], "mismatched": []})
    found = summary.controls(measured)
    assert found["zeroed"]["passed"]
    assert not found["random"]["passed"]
    assert run.failed_controls({"A": {"controls": found}}) == ["A: random"]


def test_topologies() -> None:
    assert [m.name for m in team(4, "full")] == ["planner", "solver", "critic", "writer"]
    last = {name: team(4, name)[-1] for name in ("full", "chain", "judge")}
    assert all(f"{{{other}}}" in last["full"].template for other in ("planner", "solver", "critic"))
    assert "{critic}" in last["chain"].template
    assert "{solver}" not in last["chain"].template
    assert (last["judge"].decision, last["judge"].shuffled) == ("dense", True)
    assert "{planner}" not in team(4, "judge")[1].template, "candidates answer on their own"


def test_settings_need_their_data() -> None:
    rows = [Row(str(n), "a") for n in range(40)]
    data = Dataset("numbers", rows[:20], rows[20:])
    options = run.Options(warmup=10, calibration=6, requests=8)
    assert [p.name for p in run.plans(["A", "B", "C", "agents"], [data, data], options)][:3] == ["A", "B", "C"]
    with pytest.raises(ValueError, match="C needs a second dataset"):
        run.plans(["C"], [data], options)
    with pytest.raises(ValueError, match="use A, B, C, agents"):
        run.plans(["D"], [data], options)
    with pytest.raises(ValueError, match="16 rows to learn from"):
        run.plans(["A"], [Dataset("few", rows[:5], rows[5:])], options)
    bare = Dataset("bare", [Row("q", "")] * 20, [Row("q", "")] * 20)
    with pytest.raises(ValueError, match="without a field `answer`"):
        run.plans(["B"], [bare], options)
