"""Controls: KV that must not work. If spoilt KV scores nearly as well as moved KV, the measurement is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from kvcache_client.adapters.audit import compare
from kvcache_client.adapters.slots import SlotCache
from kvcache_client.adapters.transformers import Agent
from kvcache_proto.v1 import kvcache_pb2 as pb
from torch import Tensor

FACTOR = 3.0  # spoilt KV must be this much farther from dense than moved KV


def _zeroed(kv: Tensor) -> Tensor:
    return torch.zeros_like(kv)


def _mismatched(kv: Tensor) -> Tensor:
    """Every token's values belong to another token of the span; keys stay."""
    out = kv.clone()
    out[:, 1] = kv[:, 1].roll(kv.shape[2] // 2, dims=1)
    return out


def _random(kv: Tensor) -> Tensor:
    """Normal noise with the mean and spread of each layer, K/V and head."""
    noise = torch.randn(kv.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return (noise * kv.float().std(2, keepdim=True) + kv.float().mean(2, keepdim=True)).to(kv.dtype)


SPOILERS: Mapping[str, Callable[[Tensor], Tensor]] = {"zeroed": _zeroed, "mismatched": _mismatched, "random": _random}


@torch.no_grad()
def run(
    agent: Agent, samples: Mapping[str, tuple[int, ...]], continuation: Sequence[int], reference: Tensor
) -> dict[str, tuple[float, float]]:
    """For each spoiler: KL to dense with spoilt placeholders, and of the same turn with placeholders that are only moved."""
    out = {}
    for name, spoil in SPOILERS.items():
        moved = _distance(agent, samples, continuation, reference, lambda kv: kv)
        out[name] = (_distance(agent, samples, continuation, reference, spoil), moved)
    return out


def _distance(
    agent: Agent,
    samples: Mapping[str, tuple[int, ...]],
    continuation: Sequence[int],
    reference: Tensor,
    spoil: Callable[[Tensor], Tensor],
) -> float:
    model = agent.shared.model
    prompt = torch.tensor(agent.prompt(dict(samples)))
    n, length = len(prompt), len(prompt) + len(continuation) - 1
    with agent.open(dict(samples), len(continuation), "reposition", pb.Trial(boundary=0, trailing=1)) as turn:
        turn.fetch()
        buffer = agent.shared.view(turn)
        for part, segment in zip(agent.segments, turn.plan.segments, strict=True):
            if isinstance(part, str) and segment.action == pb.ACTION_REUSE:
                columns = [c for c in range(segment.start, segment.start + segment.tokens) if c not in segment.fresh]
                buffer[:, :, columns] = spoil(buffer[:, :, columns])
        cache, fresh = SlotCache(buffer), torch.tensor(turn.fresh)
        rows = [cache.forward(model, prompt[fresh], fresh, n, logits=1)]
        if length > n:
            ids = torch.tensor(continuation[:-1])
            rows.append(cache.forward(model, ids, torch.arange(n, length), length, logits=len(ids)))
    return compare(reference, torch.cat(rows).float().log_softmax(-1)).kl
