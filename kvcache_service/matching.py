"""Pure functions of the paper policy: distances, weights and the gate (KVCOMM Eq. 5 to 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GAMMA = 0.3


@dataclass(frozen=True)
class Match:
    """weights: one per candidate, summing to 1. entropy in nats; limit: γ·log|A|."""

    weights: tuple[float, ...]
    entropy: float
    limit: float

    @property
    def decisive(self) -> bool:
        """False: the sample is unlike every anchor and becomes a new one."""
        return self.entropy <= self.limit


def absolute_distances(base: Tensor, candidates: Sequence[Tensor]) -> Tensor:
    """Mean of |base − candidate|, as the reference code weighs anchors (there per token, K and V apart); float32."""
    tokens = base.shape[2]
    return torch.stack([torch.nn.functional.l1_loss(base.float(), c[:, :, :tokens].float()) for c in candidates])


def match(distance: Tensor, entries: int, gamma: float = GAMMA) -> Match:
    """Weights and gate from RMS distances over `entries` numbers.

    w = softmax(−RMS) blends: with the raw norm of Eq. 5 the softmax over hundreds of units is one-hot, which is the
    nearest anchor alone. The gate H(softmax(−‖·‖)) ≤ γ·log|A| keeps the paper's raw norm = RMS·√entries, to whose scale
    its γ belongs: on the RMS scale it would refuse every sample.
    """
    raw = torch.softmax(-distance.double() * math.sqrt(entries), 0)
    entropy = float(-(raw * raw.clamp_min(1e-300).log()).sum())
    weights = torch.softmax(-distance.double(), 0)
    return Match(tuple(weights.tolist()), entropy, gamma * math.log(len(distance)))
