"""CPU backend in torch: one layer at a time, so that temporaries stay in cache; accumulates in float32, rounds once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache_service.geometry import Pairing, Rope
from kvcache_service.kernels import reference

# What a segment is before rotation: layer index -> [2, tokens, kv_heads, head_dim] in float32.
LayerSource = Callable[[int], Tensor]


@dataclass(frozen=True)
class Rotation:
    """cos and sin of one token run, float32 [tokens, 1, rotary_dim / 2], attention_scaling multiplied in."""

    rope: Rope
    cos: Tensor
    sin: Tensor

    @classmethod
    def into_place(cls, rope: Rope, positions: Tensor) -> Rotation:
        """Turns canonical keys to `positions`."""
        return cls._of(rope, positions, rope.attention_scaling)

    @classmethod
    def out_of_place(cls, rope: Rope, positions: Tensor) -> Rotation:
        """Takes keys at `positions` back to the canonical frame."""
        return cls._of(rope, -positions, 1.0 / rope.attention_scaling)

    @classmethod
    def by(cls, rope: Rope, shift: int, tokens: int) -> Rotation:
        """Turns every key by `shift` positions, whatever its own."""
        return cls._of(rope, torch.full((tokens,), shift), 1.0)

    @classmethod
    def _of(cls, rope: Rope, positions: Tensor, factor: float) -> Rotation:
        angle = reference.angles(rope, positions)[:, None, :]
        return cls(rope, (angle.cos() * factor).float(), (angle.sin() * factor).float())

    def write(self, out: Tensor, keys: Tensor) -> None:
        """out[...] = rotated keys; both [tokens, heads, head_dim], keys float32. `out` must not alias `keys`."""
        dim = self.rope.rotary_dim
        if self.rope.pairing is Pairing.HALF_SPLIT:
            first, second = slice(0, dim // 2), slice(dim // 2, dim)
        else:
            first, second = slice(0, dim, 2), slice(1, dim, 2)
        a, b = keys[..., first], keys[..., second]
        out[..., first] = torch.addcmul(a * self.cos, b, self.sin, value=-1.0)
        out[..., second] = torch.addcmul(b * self.cos, a, self.sin)
        if dim < keys.shape[-1]:
            out[..., dim:] = keys[..., dim:]


def write_segment(out: Tensor, source: LayerSource, rotation: Rotation) -> None:
    """Assemble one segment: each output byte is written once.

    out: [layers, 2, tokens, kv_heads, head_dim], a view of the turn's buffer in the model's dtype.
    """
    for layer in range(out.shape[0]):
        kv = source(layer)
        rotation.write(out[layer, 0], kv[0])
        out[layer, 1] = kv[1]


def canonicalise(kv: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Position-free copy of observed KV, in the dtype of `kv`."""
    out = torch.empty_like(kv, memory_format=torch.contiguous_format)
    write_segment(out, lambda layer: kv[layer].float(), Rotation.out_of_place(rope, positions))
    return out


def shift(kv: Tensor, positions: int, rope: Rope) -> Tensor:
    """A copy whose keys are turned by `positions`, to compare with policies that lack the canonical frame."""
    out = torch.empty_like(kv, memory_format=torch.contiguous_format)
    write_segment(out, lambda layer: kv[layer].float(), Rotation.by(rope, positions, kv.shape[2]))
    return out


def plain(base: Tensor) -> LayerSource:
    """Re-position only."""
    return lambda layer: base[layer].float()


def blended(base: Tensor, offsets: Sequence[Tensor], weights: Sequence[float]) -> LayerSource:
    """Paper policy: base + Σ w·offset (Eq. 6, 7). Layer 0 depends on token and position only and stays at base."""
    tokens = base.shape[2]

    def source(layer: int) -> Tensor:
        kv = base[layer].float()
        if layer:
            kv = kv.clone() if kv.dtype == base.dtype else kv
            for offset, weight in zip(offsets, weights, strict=True):
                kv.add_(offset[layer, :, :tokens].float(), alpha=weight)
        return kv

    return source


def mapped(base: Tensor, weight: Tensor, bias: Tensor, lead: Tensor) -> LayerSource:
    """Guarded policy: a linear map per (layer, K/V, head) plus an own bias for the leading tokens.

    base [layers, 2, tokens, kv_heads, head_dim]
    weight [layers, 2, kv_heads, head_dim, head_dim]; any float dtype
    bias [layers, 2, kv_heads, head_dim]
    lead [layers, 2, lead_tokens, kv_heads, head_dim], cut to the segment's length
    """
    heads = base.shape[3]
    lead_tokens = min(lead.shape[2], base.shape[2])

    def source(layer: int) -> Tensor:
        kv = base[layer].float()
        if not layer:
            return kv
        tokens = kv.transpose(1, 2).flatten(0, 1)  # [2 * heads, tokens, head_dim]
        shifted = tokens + bias[layer].float().flatten(0, 1)[:, None]
        moved = torch.baddbmm(shifted, tokens, weight[layer].float().flatten(0, 1))
        out = moved.unflatten(0, (2, heads)).transpose(1, 2)
        out[:, :lead_tokens] += lead[layer, :, :lead_tokens]
        return out

    return source
