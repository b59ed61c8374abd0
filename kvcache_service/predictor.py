"""The guarded policy's offset predictor: ridge regression from base KV to offset, kept as sums that only ever add.

For every (layer, K/V, head) of a slot one linear map with features [base (head_dim), 1, lead (LEAD indicators)]:
the indicators give the first tokens of a span a bias of their own, since those act as attention sinks.
The fixed segment that follows needs no map: its tokens never change, so its mean over turns is the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

LEAD = 16
ERROR_MEMORY = 0.8  # weight of the past in the running held-out error
RIDGE = 3.0  # penalty in samples: so much of the mean diagonal of XᵀX per sample; chosen on the training half
MEMORY = 256  # samples: beyond them old ones fade, so that a slot follows its traffic
STORE = torch.float16  # of sums and maps at rest; a quarter of float64, see docs/decisions
_TINY = 1e-30
_JITTER = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # relative to the diagonal; the last holds whatever rounding did
_SHRINK = 1e-3  # of the second moments behind novelty, relative to their mean diagonal


@dataclass(frozen=True)
class LinearMap:
    """Solved predictor, float16; layout as kernels.cpu.mapped takes it. offset = base @ weight + bias (+ lead)."""

    weight: Tensor  # [layers, 2, kv_heads, head_dim, head_dim]
    bias: Tensor  # [layers, 2, kv_heads, head_dim]
    lead: Tensor  # [layers, 2, LEAD, kv_heads, head_dim]
    precision: Tensor  # [2, kv_heads, head_dim + 1, head_dim + 1], float32: inverse second moments of the middle layer
    samples: int
    error: float  # held-out error relative to re-position only; below 1 the map helps
    novelty_scale: float  # running mean of the leverage that samples had just before they were added

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in _MAP_TENSORS)

    def novelty(self, rows: Tensor) -> float:
        """How unlike the learned samples a sample is: the mean leverage xᵀ(XᵀX)⁻¹x of its tokens in the middle layer,
        relative to what new samples of this slot usually have. About 1 for more of the same; grows without bound.

        rows: canonical KV of that layer, [2, tokens, kv_heads, head_dim].
        """
        return _leverage(rows, self.precision) / max(self.novelty_scale, 1e-12)

    @property
    def middle(self) -> int:
        """The layer by which samples are judged before they are corrected."""
        return len(self.weight) // 2

    def change(self, rows: Tensor) -> Tensor:
        """How much the map changes every token in the middle layer: ‖offset‖² / ‖base‖², K and V added, [tokens].

        rows: canonical KV of that layer, [2, tokens, kv_heads, head_dim].
        """
        heads = rows[None].transpose(2, 3).float()
        predicted = self.offset(heads, slice(self.middle, self.middle + 1))
        energy = [x.square().sum((0, 2, 4)) for x in (predicted, heads)]  # [2, tokens] each
        return (energy[0] / energy[1].clamp_min(1e-12)).sum(0)

    def offset(self, rows: Tensor, layers: slice = slice(None)) -> Tensor:
        """The predicted offset of rows [layers, 2, kv_heads, tokens, head_dim], float32, of these layers."""
        out = rows @ self.weight[layers].float() + self.bias[layers].float()[..., None, :]
        lead = min(LEAD, rows.shape[-2])
        out[..., :lead, :] += self.lead[layers].transpose(2, 3)[..., :lead, :].float()
        return out


_MAP_TENSORS = ("weight", "bias", "lead", "precision")


@dataclass(frozen=True)
class _Sums:
    """XᵀX and XᵀY at rest. Features differ in size by orders of magnitude, so each is scaled by its own root mean square
    first: correlations and their like fit float16."""

    size: Tensor  # [..., features], float32: root of the diagonal of XᵀX
    gram: Tensor  # [..., features (features + 1) / 2], upper triangle
    scale: Tensor  # [..., features, 1], float32: largest magnitude of each row of XᵀY
    cross: Tensor  # [..., features, head_dim]

    @classmethod
    def of(cls, gram: Tensor, cross: Tensor) -> _Sums:
        row, column = torch.triu_indices(gram.shape[-1], gram.shape[-1])
        size = gram.diagonal(dim1=-2, dim2=-1).sqrt().clamp_min(_TINY)
        scale = cross.abs().amax(-1, keepdim=True).clamp_min(_TINY)
        packed = (gram / size[..., :, None] / size[..., None, :])[..., row, column]
        return cls(size.float(), packed.to(STORE), scale.float(), (cross / scale).to(STORE))

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Gram [..., features, features] and cross [..., features, head_dim], float64."""
        features = self.size.shape[-1]
        row, column = torch.triu_indices(features, features)
        size, packed = self.size.double(), self.gram.double()
        gram = packed.new_zeros(*size.shape, features)
        gram[..., row, column] = packed
        gram[..., column, row] = packed
        return gram * size[..., :, None] * size[..., None, :], self.cross.double() * self.scale

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.size, self.gram, self.scale, self.cross))


class RidgeStatistics:
    """Sufficient statistics XᵀX and XᵀY. Two nodes merge theirs by addition.

    Before a sample is added, the map solved from the earlier ones is judged on it: the running ratio of squared
    errors, map against no correction, is an honest held-out figure that costs no extra data. It forgets, since the
    first maps come from too few samples. The same holds for its leverage.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._sums: _Sums | None = None
        self.map: LinearMap | None = None  # over all samples so far; None before the first
        self.error = 1.0  # held-out squared error over that of re-position only; 1.0 before the second sample
        self._novelty_scale = 0.0

    def add(self, base: Tensor, offset: Tensor) -> None:
        """Take one sample in. base, offset: canonical [layers, 2, tokens, kv_heads, head_dim]."""
        features = _features(base)
        target = offset.transpose(2, 3).double()
        if self.map is not None:
            self._judge(self.map, base, target)
        transposed = features.transpose(-1, -2)
        gram, cross = transposed @ features, transposed @ target
        if self._sums is not None:
            keep = min(1.0, (MEMORY - 1) / self.samples)
            earlier_gram, earlier_cross = self._sums.unpack()
            gram, cross = gram + keep * earlier_gram, cross + keep * earlier_cross
        self.map = self._solve(gram, cross)
        self._sums = _Sums.of(gram, cross)
        self.samples += 1

    def state(self) -> dict[str, Tensor]:
        """All that the statistics are, by name, to the bit. The tensors are shared and never change. Needs one sample or more."""
        assert self._sums is not None
        assert self.map is not None
        numbers = {"error": self.error, "novelty_scale": self._novelty_scale}
        return (
            {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
            | {"samples": torch.tensor(self.samples)}
            | {f"sums.{f.name}": getattr(self._sums, f.name) for f in fields(_Sums)}
            | {f"map.{name}": getattr(self.map, name) for name in _MAP_TENSORS}
        )

    @classmethod
    def restored(cls, state: Mapping[str, Tensor]) -> RidgeStatistics:
        """The statistics that gave this state. Raises KeyError when something is missing."""
        made = cls()
        made.samples, made.error = int(state["samples"]), float(state["error"])
        made._novelty_scale = float(state["novelty_scale"])
        made._sums = _Sums(**{f.name: state[f"sums.{f.name}"] for f in fields(_Sums)})
        made.map = LinearMap(
            **{name: state[f"map.{name}"] for name in _MAP_TENSORS},
            samples=made.samples,
            error=made.error,
            novelty_scale=made._novelty_scale,
        )
        return made

    @staticmethod
    def layout(layers: int, kv_heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor of a state."""
        maps, features = (layers, 2, kv_heads), head_dim + 1 + LEAD
        wide = (head_dim + 1, head_dim + 1)
        return {
            "error": ((), torch.float64),
            "novelty_scale": ((), torch.float64),
            "samples": ((), torch.int64),
            "sums.size": ((*maps, features), torch.float32),
            "sums.gram": ((*maps, features * (features + 1) // 2), STORE),
            "sums.scale": ((*maps, features, 1), torch.float32),
            "sums.cross": ((*maps, features, head_dim), STORE),
            "map.weight": ((*maps, head_dim, head_dim), STORE),
            "map.bias": ((*maps, head_dim), STORE),
            "map.lead": ((layers, 2, LEAD, kv_heads, head_dim), STORE),
            "map.precision": ((2, kv_heads, *wide), torch.float32),
        }

    @property
    def nbytes(self) -> int:
        return (self._sums.nbytes if self._sums is not None else 0) + (self.map.nbytes if self.map is not None else 0)

    def _solve(self, gram: Tensor, cross: Tensor) -> LinearMap:
        """The ridge solution; float64 inside, positive definite by its penalty."""
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        dim = cross.shape[-1]
        penalty = torch.ones_like(diagonal)  # lead indicators: shrunk as if one sample without offset had been seen
        penalty[..., :dim] = RIDGE / min(self.samples + 1, MEMORY) * diagonal[..., :dim].mean(-1, keepdim=True) + 1e-9
        penalty[..., dim] = 1e-6
        factor = _factor(gram + torch.diag_embed(penalty))
        weights = torch.cholesky_solve(cross, factor).to(STORE)
        return LinearMap(
            weight=weights[..., :dim, :].contiguous(),
            bias=weights[..., dim, :].contiguous(),
            lead=weights[..., dim + 1 :, :].transpose(2, 3).contiguous(),
            precision=_precision(gram[len(gram) // 2, ..., : dim + 1, : dim + 1]),
            samples=self.samples + 1,
            error=self.error,
            novelty_scale=self._novelty_scale,
        )

    def _judge(self, earlier: LinearMap, base: Tensor, target: Tensor) -> None:
        """Layer 0 stays at base and is left out. Layers count equally: each error is relative to its target's energy."""
        miss = (earlier.offset(base.transpose(2, 3).float()) - target)[1:].square().sum((-3, -2, -1))
        plain = target[1:].square().sum((-3, -2, -1)).clamp_min(1e-12)
        self.error = _remember(self.error, float((miss / plain).mean()))
        # Leverage shrinks as 1/n: bring it to the size that the next sample will be compared at.
        leverage = _leverage(base[earlier.middle], earlier.precision) * earlier.samples / (earlier.samples + 1)
        shrunk = self._novelty_scale * earlier.samples / (earlier.samples + 1)
        self._novelty_scale = leverage if not self._novelty_scale else _remember(shrunk, leverage)


def _remember(past: float, new: float) -> float:
    return ERROR_MEMORY * past + (1.0 - ERROR_MEMORY) * new


def _precision(moments: Tensor) -> Tensor:
    """Inverse of second moments [..., n, n]. Far less shrunk than the map: directions that samples hardly take must count."""
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    shrunk = moments + torch.diag_embed((_SHRINK * diagonal.mean(-1, keepdim=True) + 1e-9).expand_as(diagonal))
    return torch.cholesky_inverse(_factor(shrunk)).float().contiguous()


def _factor(matrix: Tensor) -> Tensor:
    """Cholesky factor. Rounding at rest can take a nearly singular matrix below zero: the diagonal grows until it holds."""
    diagonal = torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    for jitter in _JITTER:
        factor, failed = torch.linalg.cholesky_ex(matrix + jitter * diagonal)
        if not bool(failed.any()):
            break
    return factor


def _leverage(rows: Tensor, precision: Tensor) -> float:
    """Mean over tokens, heads, K and V of xᵀ P x. rows: one layer [2, tokens, kv_heads, head_dim]."""
    rows = rows.transpose(1, 2).float()
    rows = torch.cat([rows, torch.ones(*rows.shape[:-1], 1)], -1)
    return float(((rows @ precision) * rows).sum(-1).mean())


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
    """Mean of a fixed segment's dense KV in the canonical frame, kept in the dtype of the KV."""

    def __init__(self) -> None:
        self.samples = 0
        self._mean: Tensor | None = None

    def add(self, kv: Tensor) -> None:
        self.samples += 1
        weight = 1.0 / min(self.samples, MEMORY)
        mean = kv.float() if self._mean is None else torch.lerp(self._mean.float(), kv.float(), weight)
        self._mean = mean.to(kv.dtype)

    def mean(self) -> Tensor:
        """[layers, 2, tokens, kv_heads, head_dim]. Needs one sample or more."""
        assert self._mean is not None
        return self._mean

    def state(self) -> dict[str, Tensor]:
        """All that the mean is; see RidgeStatistics.state."""
        return {"samples": torch.tensor(self.samples), "mean": self.mean()}

    @classmethod
    def restored(cls, state: Mapping[str, Tensor]) -> RunningMean:
        """The mean that gave this state. Raises KeyError when something is missing."""
        made = cls()
        made.samples, made._mean = int(state["samples"]), state["mean"]
        return made

    @property
    def nbytes(self) -> int:
        return 0 if self._mean is None else self._mean.nbytes
