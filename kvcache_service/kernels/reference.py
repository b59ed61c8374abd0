"""The right answer, in plain torch and float64: every backend is tested against this file.

Layout everywhere: kv [layers, 2 (K, V), tokens, kv_heads, head_dim].
Canonical frame (algorithm.md section 2): a key at position n is stored as k0 = R(-n) k / attention_scaling;
every use writes R(n') k0 * attention_scaling once. Values carry no position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache_service.geometry import Pairing, Rope


def angles(rope: Rope, positions: Tensor) -> Tensor:
    """Rotation angles in radians, float64 [tokens, rotary_dim / 2], for integer positions [tokens]."""
    table = torch.tensor(rope.inv_freq, dtype=torch.float64, device=positions.device)
    return positions.to(torch.float64)[:, None] * table[None, :]


def rotate(keys: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """R(n) k for keys [..., tokens, heads, head_dim] and positions n [tokens], which may be negative.

    Dimensions beyond rotary_dim pass through. No attention_scaling here. Returns float64.
    """
    angle = angles(rope, positions)[:, None, :]
    cos, sin = angle.cos(), angle.sin()
    out = keys.to(torch.float64).clone()
    half = rope.rotary_dim // 2
    if rope.pairing is Pairing.HALF_SPLIT:
        first, second = slice(0, half), slice(half, rope.rotary_dim)
    else:
        first, second = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def _scaled(keys: Tensor, rope: Rope, factor: float) -> Tensor:
    """Apply attention_scaling to the rotated dimensions only."""
    out = keys.clone()
    out[..., : rope.rotary_dim] *= factor
    return out


def canonicalise(kv: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Take keys out of their positions: R(-n) k / attention_scaling. Returns float64."""
    out = kv.to(torch.float64).clone()
    out[:, 0] = _scaled(rotate(kv[:, 0], -positions, rope), rope, 1.0 / rope.attention_scaling)
    return out


def place(kv: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Put canonical KV at new positions: R(n') k0 * attention_scaling. Returns float64."""
    out = kv.to(torch.float64).clone()
    out[:, 0] = _scaled(rotate(kv[:, 0], positions, rope), rope, rope.attention_scaling)
    return out


def linear(base: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """base + base @ weight + bias per (layer, K/V, head).

    weight [layers, 2, kv_heads, head_dim, head_dim]; bias [layers, 2, tokens or 1, kv_heads, head_dim]. Float64.
    """
    base = base.to(torch.float64)
    return base + torch.einsum("lcthd,lchde->lcthe", base, weight.to(torch.float64)) + bias.to(torch.float64)


def blend(base: Tensor, offsets: list[Tensor], weights: Tensor) -> Tensor:
    """K̂V = base + Σ w·offset (KVCOMM Eq. 6 and 7); offsets may be longer than base. Float64."""
    out = base.to(torch.float64).clone()
    for offset, weight in zip(offsets, weights.tolist(), strict=True):
        out += weight * offset[:, :, : base.shape[2]].to(torch.float64)
    return out
