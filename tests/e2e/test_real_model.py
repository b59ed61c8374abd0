"""SmolLM2 through the real service: exact turns are token-identical, corrected turns stay close, and the demo reports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcache_client import KVCacheClient
from kvcache_client.adapters.audit import compare
from kvcache_client.adapters.transformers import SharedModel

from kvcache_service.demo.run import Team
from kvcache_service.demo.run import questions as demo_questions
from kvcache_service.evaluation import model as demo_model
from kvcache_service.evaluation import team as demo_team
from kvcache_service.evaluation.service import ServiceProcess

pytestmark = pytest.mark.model
ANSWER = 16
WARM = 9


@pytest.fixture(scope="module")
def smollm() -> tuple[Any, Any]:
    return demo_model.load(None)


@pytest.fixture
def team(start_service: Callable[..., ServiceProcess], smollm: tuple[Any, Any], transport: str) -> Iterator[Team]:
    with (
        start_service(min_samples="6", max_error="1.0", residual_limit="0.15") as service,
        KVCacheClient(service.target, transport=transport) as client,
    ):
        yield Team(SharedModel(*smollm, client), demo_team.team(2, "full"), ANSWER)


def test_exact_turns_are_token_identical(team: Team, smollm: tuple[Any, Any]) -> None:
    questions = demo_questions()
    model = smollm[0]
    _, planner = team.agents[0]
    shared = planner.shared
    first = planner.run({"question": questions[0]}, max_new_tokens=ANSWER)
    again = planner.run({"question": questions[0]}, max_new_tokens=ANSWER)
    ids = torch.tensor([planner.prompt({"question": shared.encode(questions[0])})])
    with torch.no_grad():
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False)
    assert again.outcome == "reuse"
    assert again.reused_tokens == again.prompt_tokens - 1
    assert first.token_ids == again.token_ids == tuple(expected[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("transport", ["shared_memory"], indirect=True)
def test_corrected_turns_stay_close_to_dense(team: Team) -> None:
    questions = demo_questions()
    _, solver = team.agents[1]
    for question in questions[1 : WARM + 1]:
        team.warm(question)
    measured = [t for q in questions[WARM + 1 : WARM + 4] for t in team.measure(q, ["guarded"]) if t.agent == "solver"]
    assert {(t.answer.outcome, t.answer.reason) for t in measured} == {("reuse", "none")}
    assert sum(t.kl for t in measured) / len(measured) < 0.05
    assert sum(t.top1 for t in measured) / len(measured) > 0.9
    assert all(t.answer.reused_tokens / t.answer.prompt_tokens > 0.8 for t in measured)

    # The yardstick can fail: values that belong to other tokens are far away.
    samples = {"question": questions[WARM + 1], "planner": measured[0].answer.token_ids}
    honest = solver.begin(samples, max_new_tokens=32, cache=False)
    honest.prefill()
    tokens = list(honest.decode())
    reference = honest.score(tokens)
    wrong = solver.begin(samples, max_new_tokens=32)
    wrong.prefill()
    prompt = wrong.answer.prompt_tokens
    values = wrong._cache.buffer[:, 1, : prompt - 16]
    values.copy_(values.flip(1))
    wrong._logits = wrong._forward(torch.arange(prompt - 16, prompt))
    assert compare(reference, wrong.score(tokens)).kl > 0.5
    wrong.abort()


def test_the_demo_reports_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcache_service.cli", "demo", "--agents", "2", "--requests", "1", "--warmup", "1"]
    out = [f"--json={tmp_path / 'demo.json'}", f"--png={tmp_path / 'demo.png'}", "--answer-tokens=4"]
    run = subprocess.run([*command, *out], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "kvcache_prompt_tokens_total" in run.stdout
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["policy"] == "guarded"
    assert [t["agent"] for t in figures["turns"]] == ["planner", "solver"]
    assert set(figures["turns"][0]) == {
        "agent",
        "prompt_tokens",
        "outcome",
        "reason",
        "ttft_dense_s",
        "ttft_s",
        "overhead_s",
        "first_forward_s",
        "reused_tokens",
        "recomputed_tokens",
        "kl",
        "top1",
    }
    assert set(figures["summary"]) == {"token_reuse", "call_reuse", "speedup_p50", "kl_mean", "kl_p95", "top1"}
    assert figures["turns"][0]["kl"] < 1e-4, "exact prefix and fresh tokens only"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_refuses_a_short_dataset(tmp_path: Path) -> None:
    dataset = tmp_path / "few.jsonl"
    dataset.write_text('{"question": "a"}\n')
    command = [sys.executable, "-m", "kvcache_service.cli", "demo", "--dataset", str(dataset)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "28 questions are needed" in run.stderr
