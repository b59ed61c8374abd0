"""Stored KV in one byte per number: codes, and the scales that turn them back into numbers.

A coded blob is one flat tensor of the codes' dtype, which names the codec. Its bytes:

    K scales   float32 [layers, kv_heads, head_dim]   one per channel, over the tokens of the blob
    V scales   float32 [layers, tokens, kv_heads]     one per token
    codes      [layers, 2 (K, V), tokens, kv_heads, head_dim]

number = code · scale. Channels of keys differ in size by orders of magnitude, and rotation mixes them: keys are coded
position-free, never rotated first. Exact KV is never coded.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache_service.geometry import Geometry


class Codec(enum.Enum):
    """Values: dtype of the codes, and the largest code."""

    INT8 = (torch.int8, 127.0)
    FP8 = (torch.float8_e4m3fn, 448.0)


@dataclass(frozen=True)
class Coded:
    """The parts of a coded blob, which share its memory; tokens may be some of the blob's. dtype: of the KV that was coded.

    blob: what it was opened from, all of it; None for a part or a copy.
    """

    codes: Tensor
    key_scales: Tensor
    value_scales: Tensor
    dtype: torch.dtype
    blob: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[layers, 2, tokens, kv_heads, head_dim]."""
        return self.codes.shape

    def decode(self) -> Tensor:
        """The KV in the dtype that it had, rounded once; `cpu.decoded` is the quick way."""
        numbers = self.codes.float()
        numbers[:, 0] *= self.key_scales[:, None]
        numbers[:, 1] *= self.value_scales[..., None]
        return numbers.to(self.dtype)


# Canonical KV [layers, 2 (K, V), tokens, kv_heads, head_dim], as it is or coded.
KV = Tensor | Coded


def encode(kv: Tensor, codec: Codec) -> Tensor:
    """A coded blob of canonical KV, finite: symmetric, rounded to nearest, ties to even."""
    dtype, largest = codec.value
    layers, _, tokens, heads, dim = kv.shape
    scales = layers * heads * (dim + tokens)
    blob = torch.empty(4 * scales + kv.numel(), dtype=dtype)
    coded = parts(blob, (layers, heads, dim), kv.dtype)
    for layer in range(layers):  # one after the other: what is read twice stays in cache
        keys, values = kv[layer].float()
        for numbers, scale, axis, part in ((keys, coded.key_scales, 0, 0), (values, coded.value_scales, -1, 1)):
            size = torch.linalg.vector_norm(numbers, torch.inf, axis) if numbers.numel() else torch.zeros(scale[layer].shape)
            scale[layer] = (size / largest).clamp_min(torch.finfo(torch.float32).tiny)
            codes = numbers / scale[layer].unsqueeze(axis)
            codes = codes.round_() if codec is Codec.INT8 else codes
            coded.codes[layer, part] = codes.clamp_(-largest, largest)
    return blob


def tokens(blob: Tensor, geometry: Geometry) -> int | None:
    """How many tokens of a model a blob holds, coded or not; None where it is no KV of this model."""
    if blob.dim() == 1 and blob.dtype in (codec.value[0] for codec in Codec):
        heads = geometry.layers * geometry.kv_heads
        count, rest = divmod(blob.numel() - 4 * heads * geometry.head_dim, 2 * heads * (geometry.head_dim + 2))
        return count if count >= 0 and not rest else None
    found = blob.shape[2] if blob.dim() == 5 else 0
    return found if blob.dtype == geometry.dtype and tuple(blob.shape) == geometry.shape(found) else None


def opened(blob: Tensor, geometry: Geometry) -> KV:
    """Stored KV of a model as kernels read it. Shares the blob's memory."""
    if blob.dim() != 1:
        return blob
    return parts(blob, (geometry.layers, geometry.kv_heads, geometry.head_dim), geometry.dtype)


def nbytes(kv: KV) -> int:
    """What it takes in memory, and what a kernel reads."""
    return sum(t.nbytes for t in (kv.codes, kv.key_scales, kv.value_scales)) if isinstance(kv, Coded) else kv.nbytes


def layer(kv: KV, index: int) -> KV:
    """One layer [1, 2, tokens, kv_heads, head_dim]; shares the memory."""
    one = slice(index, index + 1)
    if isinstance(kv, Coded):
        return Coded(kv.codes[one], kv.key_scales[one], kv.value_scales[one], kv.dtype)
    return kv[one]


def at(kv: KV, places: Tensor) -> KV:
    """A copy of the tokens at these places."""
    if isinstance(kv, Coded):
        return Coded(kv.codes[:, :, places], kv.key_scales, kv.value_scales[:, places], kv.dtype)
    return kv[:, :, places]


def parts(blob: Tensor, model: tuple[int, int, int], dtype: torch.dtype) -> Coded:
    """A blob's parts, which share its memory. model: layers, kv_heads, head_dim; dtype: of the KV that was coded."""
    layers, heads, dim = model
    keys = layers * heads * dim
    tokens = (blob.nbytes - 4 * keys) // (2 * keys + 4 * layers * heads)
    values = layers * tokens * heads
    scales = blob[: 4 * (keys + values)].view(torch.uint8).view(torch.float32)
    return Coded(
        blob[4 * (keys + values) :].view(layers, 2, tokens, heads, dim),
        scales[:keys].view(layers, heads, dim),
        scales[keys:].view(layers, tokens, heads),
        dtype,
        blob,
    )
