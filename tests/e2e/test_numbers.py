"""What a reuse turn finds in its buffer, against the equations computed by hand from what was observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvcache_client import KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb
from torch import Tensor

from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.geometry import Pairing, Rope
from kvcache_service.kernels import reference
from kvcache_service.predictor import RidgeStatistics
from tests.e2e.test_agents import TOKENS, Team, question


def rope_of(model: Any) -> Rope:
    inv_freq = tuple(model.model.rotary_emb.inv_freq.double().tolist())
    return Rope("default", inv_freq, 1.0, Pairing.HALF_SPLIT, 2 * len(inv_freq))


def dense_kv(model: Any, ids: list[int]) -> Tensor:
    """[layers, 2, tokens, kv_heads, head_dim] by transformers, canonical frame, float32."""
    with torch.no_grad():
        cache = model(torch.tensor([ids])).cache
    kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]).transpose(2, 3)
    return reference.canonicalise(kv, torch.arange(len(ids)), rope_of(model)).float()


def rounded(kv: Tensor, codec: str) -> Tensor:
    """KV as the codec leaves it: K by its largest number of every channel, V by that of every token."""
    if codec == "none":
        return kv
    size = torch.stack(
        [kv[:, 0].abs().amax(1, keepdim=True).expand_as(kv[:, 0]), kv[:, 1].abs().amax(-1, keepdim=True).expand_as(kv[:, 1])], 1
    )
    scale = size.double() / (127 if codec == "int8" else 448)
    codes = kv.double() / scale
    codes = codes.round() if codec == "int8" else codes.float().to(torch.float8_e4m3fn).double()
    return (codes * scale).float()


@pytest.mark.parametrize(
    ("transport", "codec"),
    [("shared_memory", "none"), ("stream", "none"), ("shared_memory", "int8"), ("stream", "fp8")],
    indirect=["transport"],
)
def test_guarded_assembly_equals_the_equations(
    start_service: Callable[..., ServiceProcess], model: Any, transport: str, codec: str
) -> None:
    """Role prompt exact, placeholders by the ridge map of independently computed samples, fixed text by the mean.

    The answer's base is stored coded; that of the question is exact KV, which never is.
    """
    with (
        start_service(boundary="2", trailing="4", host_codec=codec) as service,
        KVCacheClient(service.target, transport=transport) as client,
    ):
        team = Team(model, client)
        segments = team.second.segments  # p0, question, p1, first, p2
        statistics = {1: RidgeStatistics(), 3: RidgeStatistics()}
        fixed: list[Tensor] = []
        bases: dict[int, Tensor] = {}

        def observe(seed: int, *, learn: bool) -> list[int]:
            text = team.shared.encode(question(seed))
            first = team.first.run({"question": text}, max_new_tokens=TOKENS)
            first_ids = team.first.prompt({"question": text})
            produced = dense_kv(model, [*first_ids, *first.token_ids])
            start = len(team.first.segments[0])
            bases[1] = produced[:, :, start : start + len(text)]
            said = produced[:, :, len(first_ids) : len(first_ids) + len(first.token_ids) - 1]  # T - 1 rule
            bases[3] = rounded(said, codec)
            prompt = team.second.prompt({"question": text, "first": first.token_ids})
            if learn:
                team.second.run({"question": text, "first": first.token_ids}, max_new_tokens=TOKENS)
                whole = dense_kv(model, prompt)
                at = len(segments[0])
                for ordinal, length in ((1, len(text)), (3, len(first.token_ids))):
                    base = bases[ordinal]
                    statistics[ordinal].add(base, whole[:, :, at : at + base.shape[2]] - base)
                    at += length
                    if ordinal == 1:
                        fixed.append(whole[:, :, at : at + len(segments[2])])
                        at += len(segments[2])
            return prompt

        for seed in range(3):
            observe(seed, learn=True)
        prompt = observe(50, learn=False)
        first = tuple(prompt[-len(segments[4]) - TOKENS : -len(segments[4])])
        call = team.second.begin({"question": question(50), "first": first}, max_new_tokens=TOKENS)
        turn = call._turn
        assert turn is not None
        turn.fetch()
        found = team.shared.view(turn)[:, :, : len(prompt)].double()

        at = 0
        rope = rope_of(model)
        changed: dict[int, list[int]] = {}  # the two tokens that the correction moves farthest in the middle layer
        for ordinal, segment in enumerate(segments):
            if ordinal == 4:
                break  # recomputed in full: trailing covers it
            if ordinal == 0:
                expected = dense_kv(model, list(segment)).double()
            elif ordinal == 2:
                expected = torch.stack(fixed).double().mean(0)
            else:
                solved = statistics[ordinal].map
                assert solved is not None
                base = bases[ordinal]
                bias = solved.bias.double()[:, :, None].expand(-1, -1, base.shape[2], -1, -1).clone()
                lead = min(base.shape[2], solved.lead.shape[2])
                bias[:, :, :lead] += solved.lead[:, :, :lead]
                expected = reference.linear(base, solved.weight, bias)
                expected[0] = base[0].double()
                middle = len(base) // 2
                parts = [x[middle].square().sum((-2, -1)) for x in (expected - base.double(), base.double())]
                ratio = (parts[0] / parts[1]).sum(0)
                changed[ordinal] = sorted(at + int(i) for i in ratio.argsort()[-2:])
            positions = torch.arange(at, at + expected.shape[2])
            placed = reference.place(expected, positions, rope)
            got = found[:, :, at : at + expected.shape[2]]
            # A number that lies halfway between two codes may fall to either side.
            tolerance = 2e-4 if ordinal != 3 or codec == "none" else 1e-3
            assert float((got - placed).norm() / placed.norm()) < tolerance, ordinal
            at += len(question(50)) if ordinal == 1 else TOKENS if ordinal == 3 else len(segment)
        plan = turn.plan.segments
        assert list(plan[1].fresh) == changed[1]
        assert list(plan[2].fresh) == [plan[2].start]
        assert list(plan[3].fresh) == [*changed[3], plan[3].start + TOKENS - 1]  # the last one has no KV
        assert list(plan[4].fresh) == [plan[4].start, *range(len(prompt) - 4, len(prompt))]
        call.abort()
        # The role prompt is exact or computed, never approximated: no mean of it is kept.
        means = fixed[0].nbytes + fixed[0].nbytes // len(segments[2]) * len(segments[4])
        assert service.metrics()["kvcache_predictor_bytes"] == means + sum(s.nbytes for s in statistics.values())


def test_probes_are_judged_at_their_own_positions(
    start_service: Callable[..., ServiceProcess], model: Any, transport: str
) -> None:
    """Where the prompt ends in a sample, recomputed last tokens lie between the probed ones: residuals by hand, from dense KV."""
    with start_service(boundary="3", trailing="12") as service, KVCacheClient(service.target, transport=transport) as client:
        team = Team(model, client)
        reader = team.shared.agent("You only read what is asked: {question}")
        text = team.shared.encode(question(50))
        for seed in range(4):
            team.first.run({"question": question(seed)}, max_new_tokens=1)
            reader.run({"question": question(seed)}, max_new_tokens=1)
        team.first.run({"question": text}, max_new_tokens=1)
        start = len(team.first.segments[0])
        base = dense_kv(model, team.first.prompt({"question": text}))[:, :, start : start + len(text)]
        call = reader.begin({"question": text}, max_new_tokens=1, trial=pb.Trial())
        assert call._turn is not None
        plan = call._turn.plan.segments[1]
        assert set(plan.probed) < set(plan.fresh)
        assert list(plan.probed) != list(plan.fresh)[:3], "else this text proves nothing: take another one"
        call.prefill()
        places = [p - plan.start for p in plan.probed]
        moved = reference.place(base[:, :, places].double(), torch.tensor(list(plan.probed)), rope_of(model))
        kept = call._cache.buffer[1:, :, list(plan.probed)].double()
        unaided = float((kept - moved[1:]).square().sum() / kept.square().sum())
        assert abs(call.answer.unaided - unaided) < 1e-3 * unaided
        call.abort()
