"""Calibration, trials and audits through the real service: reuse is off until it is vouched for, and again when it is bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kvcache_client import KVCacheClient
from kvcache_client.adapters.audit import Distance, compare, trial
from kvcache_client.adapters.transformers import Agent, Answer
from kvcache_client.errors import CacheError
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.catalog.embedded import EmbeddedServer
from kvcache_service.evaluation.service import ServiceProcess
from tests.conftest import ByteTokenizer
from tests.e2e.test_agents import SECOND, TOKENS, WARM, Team, question

LOOSE = {"target_kl": 1e6, "target_top1": 1e-6}  # a random model is always far from dense: any distance will do
# Nothing is audited unless a test asks for it.
SETTINGS = {"require_calibration": "true", "audit_rate": "0", "trial_rate": "0"}


@pytest.fixture
def service(start_service: Callable[..., ServiceProcess]) -> Iterator[ServiceProcess]:
    with start_service(**SETTINGS) as running:
        yield running


@pytest.fixture
def team(model: Any, client: KVCacheClient) -> Team:
    made = Team(model, client)
    made.warm()
    return made


def samples_of(team: Team, seed: int) -> tuple[dict[str, tuple[int, ...]], Answer]:
    first = team.first.run({"question": question(seed)}, max_new_tokens=TOKENS)
    return {"question": team.shared.encode(question(seed)), "first": first.token_ids}, first


def try_out(team: Team, seeds: range, **how: Any) -> list[Distance]:
    """Trials of the second agent beside dense, as a calibration runs them."""
    out = []
    for seed in seeds:
        samples, _ = samples_of(team, seed)
        dense = team.second.begin(samples, max_new_tokens=TOKENS, cache=False)
        dense.prefill()
        tokens = dense.decode()
        out.append(trial(team.second, samples, tokens, dense.score(tokens), **how))
    return out


def ask(team: Team, seed: int) -> Answer:
    return team.ask(question(seed))[1]


def calibrate(team: Team, agent: Agent | None = None) -> pb.Calibration:
    return team.shared.client.calibrate((agent or team.second).template_id(), **LOOSE)


def test_reuse_is_off_until_calibrated(team: Team, service: ServiceProcess) -> None:
    before = ask(team, 100)
    assert (before.outcome, before.reason) == ("partial", "uncalibrated")
    assert before.recomputed_tokens == 0, "nothing but exact KV was reused"
    try_out(team, range(200, 206))
    found = calibrate(team)
    assert found.usable
    assert found.audits == 6
    after = ask(team, 101)
    assert (after.outcome, after.reason) == ("reuse", "none")
    assert service.metrics()["kvcache_templates_calibrated"] == 1


def test_too_few_trials_are_refused_with_what_to_do(team: Team) -> None:
    try_out(team, range(200, 205))
    with pytest.raises(CacheError) as caught:
        calibrate(team)
    assert (caught.value.code, caught.value.field) == ("STATE", "template_id")
    assert "kvcache calibrate" in caught.value.fix
    assert ask(team, 100).reason == "uncalibrated"


def test_an_unreachable_target_keeps_reuse_off(team: Team) -> None:
    try_out(team, range(200, 206))
    found = team.shared.client.calibrate(team.second.template_id(), target_kl=1e-9, target_top1=1.0)
    assert not found.usable
    assert ask(team, 100).reason == "quality"


def test_an_edited_template_is_uncalibrated(team: Team) -> None:
    try_out(team, range(200, 206))
    calibrate(team)
    edited = team.shared.agent(SECOND + "!", produces="second")
    for seed in range(300, 300 + WARM):
        samples, _ = samples_of(team, seed)
        answer = edited.run(samples, max_new_tokens=TOKENS)
    assert answer.reason == "uncalibrated"
    assert ask(team, 101).outcome == "reuse", "the old one still is"


def test_a_calibration_outlives_the_service_with_its_catalog(start_service: Callable[..., ServiceProcess], model: Any) -> None:
    with EmbeddedServer() as catalog:
        with start_service(**SETTINGS, redis_url=catalog.url) as service, KVCacheClient(service.target) as client:
            team = Team(model, client)
            team.warm()
            try_out(team, range(200, 206))
            calibrate(team)
        with start_service(**SETTINGS, redis_url=catalog.url) as service, KVCacheClient(service.target) as client:
            team = Team(model, client)
            team.warm()  # tensors are gone, thresholds are not: predictors as old as those that were judged are vouched for
            assert ask(team, 100).outcome == "reuse"
            others = Team(model, client)
            others.second = others.shared.agent(SECOND, produces="another")
            for seed in range(300, 300 + WARM):  # texts whose KV is not stored behind this very prefix
                answer = ask(others, seed)
            assert answer.reason == "uncalibrated"


def test_a_trial_teaches_nothing(team: Team, service: ServiceProcess) -> None:
    samples, _ = samples_of(team, 100)
    before = service.metrics()
    dense = team.second.begin(samples, max_new_tokens=TOKENS, cache=False)
    dense.prefill()
    tokens = dense.decode()
    trial(team.second, samples, tokens, dense.score(tokens))
    after = service.metrics()
    watched = [k for k in before if "candidates" in k or "anchors" in k or "predictor" in k or "host_used" in k or "turns" in k]
    assert {k: before[k] for k in watched} == {k: after[k] for k in watched}
    assert after['kvcache_audit_kl_count{policy="guarded"}'] == before['kvcache_audit_kl_count{policy="guarded"}'] + 1
    assert after["kvcache_leases"] == after["kvcache_open_turns"] == 0


@pytest.mark.parametrize("verdict", [pb.VERDICT_ACCEPTED, pb.VERDICT_REJECTED])
def test_a_trial_cannot_be_settled_like_a_turn(team: Team, verdict: pb.Verdict) -> None:
    samples, _ = samples_of(team, 100)
    with team.second.open(samples, TOKENS, "guarded", pb.Trial()) as turn:
        with pytest.raises(CacheError) as caught:
            turn.settle(verdict, reason=pb.REASON_RESIDUAL, finish_reason=pb.FINISH_REASON_STOP)
        assert (caught.value.code, caught.value.field) == ("INVALID", "verdict")


def test_only_a_trial_is_audited_and_its_distance_must_be_sound(team: Team) -> None:
    samples, _ = samples_of(team, 100)
    with team.second.open(samples, TOKENS, "guarded", None) as turn:
        with pytest.raises(CacheError) as caught:
            turn.settle(pb.VERDICT_AUDITED, distance=pb.Distance(kl=0.1, top1=1.0, tokens=3))
        assert caught.value.field == "verdict"
    broken = [None, pb.Distance(kl=float("nan"), top1=1, tokens=1), pb.Distance(kl=-1, top1=1, tokens=1)]
    broken += [pb.Distance(kl=1, top1=1.1, tokens=1), pb.Distance(kl=1, top1=1, tokens=0)]
    for distance in broken:
        with team.second.open(samples, TOKENS, "guarded", pb.Trial()) as turn:
            with pytest.raises(CacheError) as caught:
                turn.settle(pb.VERDICT_AUDITED, distance=distance)
            assert (caught.value.code, caught.value.field) == ("INVALID", "distance")


def test_a_trial_of_a_settled_turn_does_not_hide_behind_its_exact_kv(team: Team) -> None:
    """Dense turns store exact KV; a trial that took it would always report zero."""
    samples, _ = samples_of(team, 100)
    team.second.run(samples, max_new_tokens=TOKENS)
    dense = team.second.begin(samples, max_new_tokens=TOKENS, cache=False)
    dense.prefill()
    tokens = dense.decode()
    reference = dense.score(tokens)
    exact = trial(team.second, samples, tokens, reference)
    honest = trial(team.second, samples, tokens, reference, options=pb.Trial(ignore_exact=True))
    assert exact.kl < 1e-4
    assert honest.kl > 1e-2


def test_trials_vary_the_policies(team: Team) -> None:
    """Every variation reaches the KV: distances differ, and more recomputed tokens come closer to dense."""
    variations = {
        "guarded": ("guarded", pb.Trial(boundary=8)),
        "all recomputed": ("guarded", pb.Trial(boundary=1000, trailing=1000)),
        "reposition": ("reposition", pb.Trial()),
        "paper": ("paper", pb.Trial(blending=pb.Blending(gamma=1e9))),
        "one anchor": ("paper", pb.Trial(blending=pb.Blending(gamma=1e9, max_anchors=1))),
        "reference": ("paper", pb.Trial(blending=pb.Blending(gamma=1e9, absolute_frame=True, reference_weights=True))),
        "no rotation": ("paper", pb.Trial(blending=pb.Blending(gamma=1e9, no_rotation=True))),
        "no placeholder": ("paper", pb.Trial(blending=pb.Blending(gamma=1e9, no_placeholder_offsets=True))),
        "no following": ("paper", pb.Trial(blending=pb.Blending(gamma=1e9, no_following_offsets=True))),
    }
    samples, _ = samples_of(team, 100)
    dense = team.second.begin(samples, max_new_tokens=TOKENS, cache=False)
    dense.prefill()
    tokens = dense.decode()
    reference = dense.score(tokens)
    found = {
        name: trial(team.second, samples, tokens, reference, policy=policy, options=options).kl
        for name, (policy, options) in variations.items()
    }
    assert len({round(kl, 6) for kl in found.values()}) == len(found), found
    assert found["all recomputed"] < 0.5 * found["guarded"]


def test_a_judge_is_dense_and_a_trial_forces_reuse(team: Team) -> None:
    judge = team.shared.agent(SECOND, decision="dense")
    for seed in range(300, 300 + WARM):
        samples, _ = samples_of(team, seed)
        answer = judge.run(samples, max_new_tokens=TOKENS)
        assert (answer.outcome, answer.reason) == ("partial", "role")
    samples, _ = samples_of(team, 400)
    assert judge.run(samples, max_new_tokens=TOKENS).reason == "role"
    samples, _ = samples_of(team, 401)
    forced = judge.begin(samples, max_new_tokens=TOKENS, trial=pb.Trial())
    forced.prefill()
    assert forced.answer.outcome == "reuse"
    forced.abort()


def test_the_service_asks_for_audits_and_calibrates_itself(start_service: Callable[..., ServiceProcess], model: Any) -> None:
    settings = SETTINGS | {"trial_rate": "1", "calibration_audits": "6", "target_kl": "1000000", "target_top1": "0.000001"}
    with start_service(**settings) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        answers = []
        for seed in range(100, 124):
            answers.append(ask(team, seed))
            assert team.shared.auditor.drain()
        reasons = [a.reason for a in answers]
        first = reasons.index("none")
        assert [a.outcome for a in answers[first:]].count("reuse") >= 1
        assert reasons[:first].count("uncalibrated") >= 6, "reuse began once six audits were in"
        assert "uncalibrated" not in reasons[first:]
        assert not team.shared.faults.by_code
        metrics = service.metrics()
        assert metrics['kvcache_audit_kl_count{policy="guarded"}'] >= 6
        assert metrics['kvcache_audit_kl_count{policy="reposition"}'] >= 6
        assert metrics["kvcache_open_turns"] == 0


def test_a_held_out_turn_is_not_learned_from(start_service: Callable[..., ServiceProcess], model: Any) -> None:
    """A dense turn that will be audited must not teach the predictor that the audit judges."""
    with start_service(**(SETTINGS | {"trial_rate": "1"})) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        before = samples_by_slot(client)
        ask(team, 100)
        assert team.shared.auditor.drain()
        assert samples_by_slot(client) == before


def samples_by_slot(client: KVCacheClient) -> dict[tuple[str, int], int]:
    return {(t.template_id, s.ordinal): s.samples for t in client.status().templates for s in t.slots}


def test_audits_switch_a_slot_to_dense_and_back(start_service: Callable[..., ServiceProcess], model: Any) -> None:
    with start_service(**SETTINGS) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        distances = try_out(team, range(200, 206))
        team_id = team.second.template_id()
        bound = 10 * max(d.kl for d in distances)
        client.calibrate(team_id, target_kl=bound, target_top1=1e-6)
        assert ask(team, 100).outcome == "reuse"

        def report(kl: float, seed: int) -> None:
            samples, _ = samples_of(team, seed)
            call = team.second.begin(samples, max_new_tokens=TOKENS, trial=pb.Trial())
            call.prefill()
            call.audited(Distance(kl, 1.0, TOKENS))
            call.abort()

        for seed in (300, 301):
            report(2 * bound, seed)
        off = ask(team, 101)
        assert (off.outcome, off.reason) == ("partial", "quality")
        status = next(t for t in client.status().templates if t.template_id == team_id)
        assert all(s.off for s in status.slots)
        assert service.metrics()["kvcache_slots_off"] == len(status.slots) == 2
        labels = f'template="{team_id[:12]}"'
        name = f'kvcache_slot_off{{placeholder="1:question",{labels}}}'
        assert service.metrics()[name] == 1
        for seed in range(302, 310):
            report(0.0, seed)
        assert ask(team, 102).outcome == "reuse"
        assert service.metrics()[name] == 0


def test_an_audit_waits_for_the_calls_in_flight(team: Team, service: ServiceProcess) -> None:
    samples, _ = samples_of(team, 100)
    call = team.second.begin(samples, max_new_tokens=TOKENS)
    team.shared.auditor.submit(team.second, samples, (1, 2, 3))
    assert not team.shared.auditor.drain(timeout=0.2)
    assert team.shared.auditor.done == 0
    call.abort()
    assert team.shared.auditor.drain()
    assert team.shared.auditor.done == 1


def test_audits_fail_without_harm(team: Team, service: ServiceProcess) -> None:
    samples, _ = samples_of(team, 100)
    service.process.kill()
    service.process.wait()
    team.shared.auditor.submit(team.second, samples, (1, 2, 3))
    assert team.shared.auditor.drain()
    assert team.shared.faults.by_code
    assert team.shared.auditor.done == 0


def test_a_followed_answer_equals_a_decoded_one(team: Team) -> None:
    """follow() leaves the same KV and the same answer behind as decode()."""
    text = {"question": question(500)}
    decoded = team.first.begin(text, max_new_tokens=TOKENS, cache=False)
    decoded.prefill()
    tokens = decoded.decode()
    followed = team.first.begin(text, max_new_tokens=TOKENS, cache=False)
    followed.prefill()
    rows = followed.follow(tokens, stopped=False)
    assert rows.shape[0] == len(tokens)
    assert rows.argmax(-1).tolist() == list(tokens)
    columns = slice(0, decoded._n + TOKENS - 1)
    torch.testing.assert_close(followed._cache.buffer[:, :, columns], decoded._cache.buffer[:, :, columns], rtol=1e-4, atol=1e-5)
    assert followed.answer.token_ids == tokens
    assert compare(rows, decoded.score(tokens)).kl < 1e-6
    assert ByteTokenizer().decode(list(tokens)) == followed.answer.text


def test_five_hundred_novel_recombinations(start_service: Callable[..., ServiceProcess], model: Any) -> None:
    """Texts that met before never meet again: reuse holds, and nothing grows without bound."""
    with start_service(pool_anchors="8") as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        said = []
        for seed in range(25):
            samples, _ = samples_of(team, seed)
            team.second.run(samples, max_new_tokens=2)
            said.append(samples)
        warm = service.metrics()
        pairs = [(i, (i + shift) % 25) for shift in range(1, 21) for i in range(25)]
        assert len(pairs) == 500
        reused = []
        for i, j in pairs:
            answer = team.second.run({"question": said[i]["question"], "first": said[j]["first"]}, max_new_tokens=2)
            reused.append(answer.reused_tokens / answer.prompt_tokens)
        assert sum(reused[-100:]) / 100 >= 0.8 * sum(reused[:25]) / 25 > 0.3
        end = service.metrics()
        assert end["kvcache_anchors"] <= 8 * end["kvcache_pools"]
        assert end["kvcache_predictor_bytes"] == warm["kvcache_predictor_bytes"]
        assert end["kvcache_slots"] == warm["kvcache_slots"]
        assert end["kvcache_host_used_bytes"] <= end["kvcache_host_budget_bytes"]
        assert end["kvcache_open_turns"] == end["kvcache_leased_bytes"] == 0
