"""The guarded policy's offset predictor: ridge regression from base KV to offset, kept as sums that only ever add.

For every (layer, K/V, head) of a slot one linear map with features [base (head_dim), 1, lead (LEAD indicators)]:
the indicators give the first tokens of a span a bias of their own, since those act as attention sinks.
The fixed segment that follows needs no map: its tokens never change, so its mean over turns is the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAD = 16
ERROR_MEMORY = 0.8  # weight of the past in the running held-out error
RIDGE = 1.0  # relative to the mean diagonal of XᵀX; chosen on the training half, see docs/decisions


@dataclass(frozen=True)
class LinearMap:
    """Solved predictor in float32; layout as kernels.cpu.mapped takes it. weight has the identity added."""

    weight: Tensor  # [layers, 2, kv_heads, head_dim, head_dim]
    bias: Tensor  # [layers, 2, kv_heads, head_dim]
    lead: Tensor  # [layers, 2, LEAD, kv_heads, head_dim]
    samples: int
    error: float  # held-out error relative to re-position only; below 1 the map helps


class RidgeStatistics:
    """Sufficient statistics XᵀX and XᵀY (float64). Two nodes merge theirs by addition.

    Before a sample is added, the map solved from the earlier ones is judged on it: the running ratio of squared
    errors, map against no correction, is an honest held-out figure that costs no extra data. It forgets, since the
    first maps come from too few samples.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._gram: Tensor | None = None
        self._cross: Tensor | None = None
        self.map: LinearMap | None = None  # over all samples so far; None before the first
        self.error = 1.0  # held-out squared error over that of re-position only; 1.0 before the second sample

    def add(self, base: Tensor, offset: Tensor) -> None:
        """Take one sample in. base, offset: canonical [layers, 2, tokens, kv_heads, head_dim]."""
        features = _features(base)
        target = offset.transpose(2, 3).double()
        if self.map is not None:
            self._judge(self.map, base, target)
        transposed = features.transpose(-1, -2)
        gram, cross = transposed @ features, transposed @ target
        if self._gram is not None and self._cross is not None:
            gram, cross = gram + self._gram, cross + self._cross
        self.map = self._solve(gram, cross)
        self._gram, self._cross = gram, cross
        self.samples += 1

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._gram, self._cross) if t is not None)

    def _solve(self, gram: Tensor, cross: Tensor) -> LinearMap:
        """The ridge solution; float64 inside, positive definite by its penalty."""
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        dim = cross.shape[-1]
        penalty = torch.ones_like(diagonal)  # lead indicators: shrunk as if one sample without offset had been seen
        penalty[..., :dim] = RIDGE * diagonal[..., :dim].mean(-1, keepdim=True) + 1e-9
        penalty[..., dim] = 1e-6
        factor = torch.linalg.cholesky(gram + torch.diag_embed(penalty))
        weights = torch.cholesky_solve(cross, factor).float()
        return LinearMap(
            weight=weights[..., :dim, :] + torch.eye(dim),
            bias=weights[..., dim, :].contiguous(),
            lead=weights[..., dim + 1 :, :].transpose(2, 3).contiguous(),
            samples=self.samples + 1,
            error=self.error,
        )

    def _judge(self, earlier: LinearMap, base: Tensor, target: Tensor) -> None:
        """Layer 0 stays at base and is left out. Layers count equally: each error is relative to its target's energy."""
        rows = base.transpose(2, 3).float()
        predicted = rows @ earlier.weight - rows + earlier.bias[..., None, :]
        lead = min(LEAD, rows.shape[-2])
        predicted[..., :lead, :] += earlier.lead.transpose(2, 3)[..., :lead, :]
        miss = (predicted - target)[1:].square().sum((-3, -2, -1))
        plain = target[1:].square().sum((-3, -2, -1)).clamp_min(1e-12)
        self.error = ERROR_MEMORY * self.error + (1.0 - ERROR_MEMORY) * float((miss / plain).mean())


def _features(base: Tensor) -> Tensor:
    """[layers, 2, kv_heads, tokens, head_dim + 1 + LEAD], float64."""
    rows = base.transpose(2, 3).double()
    tokens = rows.shape[-2]
    extra = torch.zeros(tokens, 1 + LEAD, dtype=torch.float64)
    extra[:, 0] = 1.0
    lead = min(tokens, LEAD)
    extra[:lead, 1 : 1 + lead] = torch.eye(lead, dtype=torch.float64)
    return torch.cat([rows, extra.expand(*rows.shape[:-1], 1 + LEAD)], -1)


class RunningMean:
    """Mean of a fixed segment's dense KV in the canonical frame, float32."""

    def __init__(self) -> None:
        self.samples = 0
        self._sum: Tensor | None = None

    def add(self, kv: Tensor) -> None:
        self._sum = kv.float().clone() if self._sum is None else self._sum.add_(kv)
        self.samples += 1

    def mean(self) -> Tensor:
        """[layers, 2, tokens, kv_heads, head_dim]. Needs one sample or more."""
        assert self._sum is not None
        return self._sum / self.samples

    @property
    def nbytes(self) -> int:
        return 0 if self._sum is None else self._sum.nbytes
