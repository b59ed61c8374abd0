"""Agents of a tiny Llama through the real service, over real sockets and both transports."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvcache_client import KVCacheClient
from kvcache_client.adapters.description import UnsupportedModel, model_request
from kvcache_client.adapters.transformers import Agent, Answer, SharedModel
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.evaluation.service import ServiceProcess
from tests.conftest import ByteTokenizer, Clock, tiny_llama

FIRST = "You ask. {question} Now:"
SECOND = "You are the second agent, answer. {question} First said: {first} Now say:"
TOKENS = 12
WARM = 10


def question(seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghij klmnop", k=20))


class Team:
    """Two agents: the second reads the question and the first one's answer."""

    def __init__(self, model: Any, client: KVCacheClient) -> None:
        self.shared = SharedModel(model, ByteTokenizer(), client)
        self.first = self.shared.agent(FIRST, produces="first")
        self.second = self.shared.agent(SECOND, produces="second")

    def ask(self, text: str, **how: Any) -> tuple[Answer, Answer]:
        first = self.first.run({"question": text}, max_new_tokens=TOKENS, **how)
        second = self.second.run({"question": text, "first": first.token_ids}, max_new_tokens=TOKENS, **how)
        return first, second

    def warm(self) -> None:
        for seed in range(WARM):
            self.ask(question(seed))


@pytest.fixture
def team(model: Any, client: KVCacheClient) -> Team:
    return Team(model, client)


def dense(agent: Agent, samples: dict[str, Any]) -> Answer:
    return agent.run(samples, max_new_tokens=TOKENS, cache=False)


def reference_generate(model: Any, ids: list[int]) -> tuple[int, ...]:
    """transformers' own generate, no cache of ours in sight."""
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
    return tuple(out[0, len(ids) :].tolist())


def test_dense_answers_equal_transformers_generate(team: Team, model: Any) -> None:
    answer = dense(team.first, {"question": question(1)})
    ids = team.first.prompt({"question": team.shared.encode(question(1))})
    assert answer.token_ids == reference_generate(model, ids)
    assert answer.outcome == "dense"


def test_an_exact_turn_is_token_identical(team: Team, model: Any) -> None:
    first = team.first.run({"question": question(7)}, max_new_tokens=TOKENS)
    again = team.first.run({"question": question(7)}, max_new_tokens=TOKENS)
    ids = team.first.prompt({"question": team.shared.encode(question(7))})
    assert first.token_ids == again.token_ids == reference_generate(model, ids)
    assert first.outcome == "partial"  # the role prompt was there, the question was new
    assert again.outcome == "reuse"
    assert again.reused_tokens == again.prompt_tokens - 1


def test_an_exact_turn_is_token_identical_through_a_restart(
    start_service: Callable[..., ServiceProcess], model: Any, transport: str
) -> None:
    with start_service() as service:
        port = service.target.rpartition(":")[2]
        with KVCacheClient(service.target, transport=transport) as client:
            team = Team(model, client)
            expected = team.first.run({"question": question(7)}, max_new_tokens=TOKENS).token_ids
            service.process.send_signal(signal.SIGKILL)
            service.process.wait()
            lost = team.first.run({"question": question(7)}, max_new_tokens=TOKENS)
            with start_service(listen=f"127.0.0.1:{port}"):
                answers = until_reuse(team, question(7))
            assert lost.outcome == "dense"
            assert lost.reason == "service"
            assert {lost.token_ids, *(a.token_ids for a in answers)} == {expected}
            assert answers[-1].reused_tokens == answers[-1].prompt_tokens - 1


def until_reuse(team: Team, text: str) -> list[Answer]:
    """Ask again and again until the restarted service reuses; bounded by the client's pause, not by sleeping."""
    answers = []
    for _ in range(2000):
        answers.append(team.first.run({"question": text}, max_new_tokens=TOKENS))
        if answers[-1].outcome == "reuse":
            return answers
    raise AssertionError("reuse did not come back")


def test_pools_warm_and_then_reuse(team: Team, service: ServiceProcess) -> None:
    team.warm()
    first, second = team.ask(question(100))
    assert (first.outcome, first.reason) == ("partial", "miss")
    assert (second.outcome, second.reason) == ("reuse", "none")
    assert second.reused_tokens > 0.5 * second.prompt_tokens
    assert second.recomputed_tokens > 0
    metrics = service.metrics()
    assert metrics['kvcache_turns_total{outcome="reuse",policy="guarded"}'] >= 1
    assert metrics["kvcache_leased_bytes"] == 0
    assert metrics["kvcache_leases"] == 0
    assert metrics["kvcache_open_turns"] == 0
    turns = sum(v for k, v in metrics.items() if k.startswith("kvcache_turns_total"))
    assert turns == 2 * WARM + 2, "one outcome per turn, and they add up"
    assert metrics["kvcache_prompt_tokens_total"] > metrics["kvcache_reused_tokens_total"] > 0


def test_both_transports_give_the_same_kv(start_service: Callable[..., ServiceProcess], model: Any) -> None:
    buffers = {}
    with start_service() as service:
        for transport in ("shared_memory", "stream"):
            with KVCacheClient(service.target, transport=transport) as client:
                team = Team(model, client)
                if transport == "shared_memory":
                    team.warm()
                call = team.second.begin({"question": question(0), "first": [7] * 9}, max_new_tokens=TOKENS, policy="guarded")
                logits = call.prefill()
                buffers[transport] = (logits, call._cache.buffer[:, :, : call._n].clone())
                call.abort()
                del call
    torch.testing.assert_close(buffers["shared_memory"][1], buffers["stream"][1], rtol=0, atol=1e-6)
    torch.testing.assert_close(buffers["shared_memory"][0], buffers["stream"][0], rtol=0, atol=1e-5)


def test_policies(team: Team) -> None:
    team.warm()
    samples = {"question": question(100), "first": team.first.run({"question": question(100)}, max_new_tokens=TOKENS).token_ids}
    off = team.second.run(samples, max_new_tokens=TOKENS, policy="off")
    assert (off.outcome, off.reason, off.reused_tokens) == ("dense", "policy_off", 0)
    paper = team.second.begin(samples, max_new_tokens=TOKENS, policy="paper")
    paper.prefill()
    assert paper.answer.outcome in ("reuse", "partial")
    assert paper.answer.reason in ("none", "entropy", "length")
    paper.abort()


@pytest.mark.parametrize(
    ("gate", "reason"), [("max_error", "quality"), ("residual_limit", "residual"), ("max_cost_ratio", "cost")]
)
def test_every_gate_ends_in_a_dense_turn(
    start_service: Callable[..., ServiceProcess], model: Any, transport: str, gate: str, reason: str
) -> None:
    """A gate that refuses costs reuse, never the answer, and is counted under its reason."""
    with start_service(**{gate: "1e-9"}) as service, KVCacheClient(service.target, transport=transport) as client:
        team = Team(model, client)
        team.warm()
        first = team.first.run({"question": question(100)}, max_new_tokens=TOKENS)
        samples = {"question": question(100), "first": first.token_ids}
        answer = team.second.run(samples, max_new_tokens=TOKENS)
        assert answer.token_ids == dense(team.second, samples).token_ids
        assert answer.reason == reason
        metrics = service.metrics()
        assert metrics[f'kvcache_fallbacks_total{{reason="{reason}"}}'] >= 1


def test_a_turn_that_probes_refuse_teaches_nothing_and_the_next_one_does(
    start_service: Callable[..., ServiceProcess], model: Any, transport: str
) -> None:
    """Otherwise a slot that always fails its probes would never see what would mend it."""
    with start_service(residual_limit="1e-9") as service, KVCacheClient(service.target, transport=transport) as client:
        team = Team(model, client)
        for seed in range(3):
            team.ask(question(seed))
        for seed in (100, 102):
            anchors = service.metrics()["kvcache_anchors"]
            refused = team.ask(question(seed))[1]
            assert (refused.outcome, refused.reason, refused.residual > 0) == ("dense", "residual", True)
            assert service.metrics()["kvcache_anchors"] == anchors, "an emergency proposes nothing"
            lesson = team.ask(question(seed + 1))[1]
            assert (lesson.outcome, lesson.reason, lesson.residual) == ("partial", "residual", 0.0)
            assert service.metrics()["kvcache_anchors"] == anchors + 2


def test_a_judge_is_dense_by_default(model: Any, client: KVCacheClient) -> None:
    team = Team(model, client)
    team.warm()
    judge = team.shared.agent("You judge. {question} said: {first} Verdict:", decision="dense")
    first = team.first.run({"question": question(100)}, max_new_tokens=TOKENS)
    samples = {"question": question(100), "first": first.token_ids}
    verdict = judge.run(samples, max_new_tokens=TOKENS)
    assert verdict.reason == "role"
    assert verdict.token_ids == dense(judge, samples).token_ids


def test_an_aborted_turn_changes_nothing(team: Team, service: ServiceProcess) -> None:
    team.ask(question(1))
    before = service.metrics()
    call = team.second.begin({"question": question(1), "first": [9, 9, 9]}, max_new_tokens=TOKENS)
    call.prefill()
    call.decode()
    call.abort()
    after = service.metrics()
    for name in ("kvcache_anchors", "kvcache_pools", "kvcache_host_used_bytes", "kvcache_leased_bytes", "kvcache_open_turns"):
        assert after[name] == before[name], name
    assert after['kvcache_turns_total{outcome="aborted",policy="guarded"}'] == 1


def test_a_killed_service_costs_reuse_not_the_answer(
    start_service: Callable[..., ServiceProcess], model: Any, transport: str
) -> None:
    """kill -9 between prefill and decode: the generation finishes on what it has."""
    with start_service() as service, KVCacheClient(service.target, transport=transport) as client:
        team = Team(model, client)
        team.first.run({"question": question(3)}, max_new_tokens=TOKENS)
        call = team.first.begin({"question": question(3)}, max_new_tokens=TOKENS)
        call.prefill()
        os.kill(service.process.pid, signal.SIGKILL)
        service.process.wait()
        call.decode()
        answer = call.settle()
        assert answer.token_ids == dense(team.first, {"question": question(3)}).token_ids
        assert sum(team.shared.faults.by_code.values()) >= 1
        late = team.first.begin({"question": question(3)}, max_new_tokens=TOKENS)
        late.prefill()
        late.decode()
        assert late.settle().token_ids == answer.token_ids


def test_a_service_killed_between_open_and_fetch(
    start_service: Callable[..., ServiceProcess], model: Any, transport: str
) -> None:
    with start_service() as service, KVCacheClient(service.target, transport=transport) as client:
        team = Team(model, client)
        expected = team.first.run({"question": question(3)}, max_new_tokens=TOKENS)
        call = team.first.begin({"question": question(3)}, max_new_tokens=TOKENS)
        os.kill(service.process.pid, signal.SIGKILL)
        service.process.wait()
        call.prefill()
        call.decode()
        answer = call.settle()
        # Shared memory was filled when the turn was opened.
        assert answer.outcome == ("reuse" if transport == "shared_memory" else "dense")
        assert answer.token_ids == expected.token_ids


def test_without_any_service(model: Any) -> None:
    with KVCacheClient("127.0.0.1:1", timeout=2.0) as client:
        team = Team(model, client)
        first, second = team.ask(question(5))
        assert (first.reason, second.reason) == ("service", "service")
        ids = team.first.prompt({"question": team.shared.encode(question(5))})
        assert first.token_ids == reference_generate(model, ids)


def test_empty_and_single_token_samples(team: Team) -> None:
    team.warm()
    for sample in ([], [5]):
        samples = {"question": question(50), "first": sample}
        answer = team.second.run(samples, max_new_tokens=TOKENS)
        assert answer.prompt_tokens == len(
            team.second.prompt({"question": team.shared.encode(question(50)), "first": tuple(sample)})
        )
        again = team.second.run(samples, max_new_tokens=TOKENS)
        assert again.prompt_tokens == answer.prompt_tokens


def test_adjacent_leading_trailing_and_repeated_placeholders(team: Team) -> None:
    odd = team.shared.agent("{question}{first} and again {question}")
    samples = {"question": question(1), "first": [3, 4, 5]}
    expected = dense(odd, samples).token_ids
    assert odd.run(samples, max_new_tokens=TOKENS).token_ids == expected
    again = odd.run(samples, max_new_tokens=TOKENS)
    assert again.token_ids == expected
    assert again.outcome == "reuse"


def test_an_escaped_brace_does_not_split_a_fixed_segment(team: Team) -> None:
    agent = team.shared.agent('{question} in JSON: {{"a": 1}} now')
    assert agent.segments == ["question", team.shared.encode(' in JSON: {"a": 1} now')]


def test_one_document_behind_different_questions(team: Team) -> None:
    """The same text in the same place, but never behind the same prefix: it warms like any other."""
    reader = team.shared.agent("Read. {question} The document: {document} Answer:")
    document = "all that is written here is written here again"
    outcomes = [
        reader.run({"question": question(seed), "document": f"{document} {seed % 4}"}, max_new_tokens=TOKENS).outcome
        for seed in range(10)
    ]
    # The questions are new every time (MISS), so the document's own KV is what is reused in the end.
    last = reader.begin({"question": question(99), "document": f"{document} 1"}, max_new_tokens=TOKENS)
    assert last._turn is not None
    actions = [s.action for s in last._turn.plan.segments]
    last.abort()
    assert outcomes[-1] == "partial"
    assert actions[3] == pb.ACTION_REUSE


def test_a_hanging_service_costs_one_timeout(start_service: Callable[..., ServiceProcess], model: Any, clock: Clock) -> None:
    with start_service() as service, KVCacheClient(service.target, timeout=2.0, clock=clock) as client:
        team = Team(model, client)
        expected = team.first.run({"question": question(3)}, max_new_tokens=TOKENS).token_ids
        os.kill(service.process.pid, signal.SIGSTOP)
        try:
            answers = [team.first.run({"question": question(3)}, max_new_tokens=TOKENS) for _ in range(4)]
        finally:
            os.kill(service.process.pid, signal.SIGCONT)
        assert {a.token_ids for a in answers} == {expected}
        assert {a.reason for a in answers} == {"service"}
        assert team.shared.faults.by_code == {"DEADLINE_EXCEEDED": 1, "UNAVAILABLE": 3}
        clock.tick(10.0)
        assert team.first.run({"question": question(3)}, max_new_tokens=TOKENS).outcome == "reuse"


def test_an_edited_template_is_another_template(team: Team) -> None:
    team.warm()
    edited = team.shared.agent(SECOND.replace("answer", "reply"), produces="second")
    first = team.first.run({"question": question(100)}, max_new_tokens=TOKENS)
    answer = edited.run({"question": question(100), "first": first.token_ids}, max_new_tokens=TOKENS)
    assert answer.reason == "warming"


def test_samples_must_fit_the_template(team: Team) -> None:
    with pytest.raises(ValueError, match="the template needs"):
        team.second.run({"question": "x"}, max_new_tokens=TOKENS)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_type": "mamba"}, "model type"), ({"sliding_window": 128}, "full attention")],
    ids=["kind", "window"],
)
def test_unsupported_models_are_refused(change: dict[str, Any], message: str) -> None:
    model = tiny_llama()
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedModel, match=message):
        model_request(model, ByteTokenizer())


def test_the_layer_zero_check_rejects_shifted_tokens(team: Team, service: ServiceProcess) -> None:
    """KV of tokens shifted by one against their ids: the turn's candidates are refused, all of them."""
    team.ask(question(1))
    before = service.metrics()
    honest = team.first.begin({"question": question(2)}, max_new_tokens=TOKENS)
    honest._prompt = honest._prompt.roll(1)  # the worker computes other tokens than it announced
    honest.prefill()
    honest.decode()
    honest.settle()
    after = service.metrics()
    assert after['kvcache_candidates_total{result="refused"}'] == before['kvcache_candidates_total{result="refused"}'] + 1
    assert after["kvcache_host_used_bytes"] == before["kvcache_host_used_bytes"]
    assert after["kvcache_anchors"] == before["kvcache_anchors"]


def test_agents_that_say_the_same_share_no_slot(model: Any, client: KVCacheClient) -> None:
    """Every placeholder learns from the agent that it is meant for, once per turn, also where another one said the same."""
    shared = SharedModel(model, ByteTokenizer(), client)
    ann, bob = (shared.agent(f"You are {name}. {{question}} Now:", produces=name) for name in ("ann", "bob"))
    reader = shared.agent("You read. {question} Ann: {ann} Bob: {bob} Now:")
    for seed in range(6):
        said = {"question": shared.encode(question(seed))}
        alike = seed % 2 == 0
        for agent, name, words in ((ann, "ann", 100 + seed), (bob, "bob", 100 + seed if alike else 200 + seed)):
            call = agent.begin({"question": said["question"]}, max_new_tokens=TOKENS, policy="off")
            call.prefill()
            said[name] = shared.encode(question(words))[:TOKENS]
            call.follow(said[name], stopped=False)
            call.settle()
        reader.run(said, max_new_tokens=2, policy="off")
    [template] = [t for t in client.status().templates if t.template_id == reader.template_id()]
    assert sorted((s.placeholder, s.origin, s.samples) for s in template.slots) == [
        ("ann", f"{ann.template_id()}:output", 6),
        ("bob", f"{bob.template_id()}:output", 6),
        ("question", f"{ann.template_id()}:1", 6),
    ]
