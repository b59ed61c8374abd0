"""The evaluation from end to end on a tiny model: its own service, all policies, and figures that add up."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvcache_client.adapters.transformers import SharedModel
from typer.testing import CliRunner

from kvcache_service.cli import app
from kvcache_service.evaluation import run
from kvcache_service.evaluation.dataset import Row
from kvcache_service.evaluation.policies import parse
from kvcache_service.evaluation.scenes import Agents
from kvcache_service.evaluation.team import Member
from tests.conftest import ByteTokenizer
from tests.e2e.test_agents import FIRST, SECOND

POLICIES = ["off", "paper", "reference", "reposition", "recompute", "guarded:0+1", "guarded"]


def untracked(items: Iterable[Any], total: int, description: str) -> Iterator[Any]:
    return iter(items)


def rows(count: int, first: int) -> list[Row]:
    return [Row("".join(random.Random(first + n).choices("abcdefghij klmnop", k=20)), "") for n in range(count)]


def members(decision: str = "reuse", shuffled: bool = False) -> list[Member]:
    return [Member("first", FIRST, "first"), Member("second", SECOND, "second", decision, shuffled)]


def evaluate(team: list[Member], model: Any, **settings: str) -> dict[str, Any]:
    options = run.Options(warmup=4, calibration=6, requests=4, controls=2)
    plan = run.Plan("tiny", lambda shared: Agents("tiny", shared, team, 12), rows(10, 0), rows(4, 1000))
    loose = {"target_kl": "1000000", "target_top1": "0.000001", "min_samples": "3", "max_error": "1000000"} | settings
    return run.run(plan, [parse(p) for p in POLICIES], model, ByteTokenizer(), options, untracked, **loose)


def test_every_policy_on_the_same_turns(model: Any) -> None:
    found = evaluate(members(), model)
    policies = found["policies"]
    assert list(policies) == ["off", "paper", "reference", "reposition", "recompute", "guarded:0+1", "guarded"]
    assert {f["n"] for f in policies.values()} == {4}
    assert policies["off"]["kl_mean"] < 1e-6
    assert policies["off"]["token_reuse"] == 0
    assert policies["reposition"]["fresh_tokens"] < policies["recompute"]["fresh_tokens"]
    assert policies["guarded:0+1"]["fresh_tokens"] == policies["reposition"]["fresh_tokens"]
    assert policies["guarded"]["token_reuse"] > 0.3
    assert policies["paper"]["pool_bytes"] > policies["guarded"]["pool_bytes"] > 0
    assert found["calibration"]["second"]["usable"]
    assert found["calibration"]["second"]["audits"] == 6
    assert set(found["controls"]) == {"zeroed", "mismatched", "random"}
    assert all(c["n"] == 2 and c["kl_mean"] > c["reposition_kl_mean"] for c in found["controls"].values())
    assert len(found["turns"]) == 4 * len(POLICIES)
    json.dumps(found, allow_nan=False)


def test_a_judge_agrees_with_dense_and_forced_reuse_is_seen_apart(model: Any) -> None:
    found = evaluate(members("dense", True), model)["policies"]
    assert found["guarded"]["reasons"] == {"role": 4}
    assert found["guarded"]["top1"] == 1.0
    assert found["guarded"]["kl_mean"] < 1e-6
    assert found["guarded:0+1"]["token_reuse"] > 0.3
    assert found["guarded:0+1"]["kl_mean"] > 1e-6


def test_the_generated_conversation_is_the_models_own(model: Any) -> None:
    """Batches of different lengths change nothing: each answer is the greedy one of its own prompt."""

    class Nobody:  # generation does not touch the client
        pass

    shared = SharedModel(model, ByteTokenizer(), Nobody())  # type: ignore[arg-type]
    setting = Agents("tiny", shared, members(), 12)
    for scene in setting.scenes([*rows(3, 0), Row("a much longer question than the others are", "")], 0):
        for step in scene:
            call = setting.agents[step.agent].begin(dict(step.samples), max_new_tokens=12, cache=False)
            call.prefill()
            assert call.decode() == step.answer
            assert step.continuation[:12] == step.answer
        assert [s.measured for s in scene] == [False, True]
        assert scene[1].samples["first"] == scene[0].answer


def test_commands_refuse_what_they_cannot_use(tmp_path: Path) -> None:
    good = tmp_path / "good.jsonl"
    good.write_text('{"question": "a"}\n' * 4)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense\n")
    cases = [
        (["eval", "--dataset", str(bad)], "line 1"),
        (["eval", "--dataset", str(good)], "rows to learn from"),
        (["eval", "--dataset", str(good), "--policies", "best"], "policy 'best'"),
        (["calibrate", "--dataset", str(good)], "28 rows are needed"),
        (["status", "--target", "127.0.0.1:1"], "UNAVAILABLE"),
    ]
    for arguments, message in cases:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code != 0
        assert message in " ".join((result.output + result.stderr).split()), (arguments, result.output)
