"""CPU backend: one pass over the bytes, layers shared out to threads; accumulates in float32, rounds once.

A segment is written layer by layer, so that layer 0 of a turn is complete first. Matrix products are torch's; all else
is one numba loop that reads, adds, rotates and rounds, and that runs without the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache_service.geometry import Pairing, Rope
from kvcache_service.kernels import loops, reference

# Writes one layer of one segment.
LayerWrite = Callable[[int], None]
Array = NDArray[np.generic]

# How numba sees each dtype: it knows neither 16-bit float, so their bits travel as these integers.
_BITS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
# Of each dtype: unsigned bits of the same size, and the bits of infinity; NaN lies above.
_EXPONENTS = {
    torch.float32: (torch.uint32, 0x7F800000),
    torch.bfloat16: (torch.uint16, 0x7F80),
    torch.float16: (torch.uint16, 0x7C00),
}
_TILE_BYTES = 512 << 10  # of a matrix product's result: it must still be in cache when it is rotated
_ALONE_BYTES = 128 << 10  # jobs below are not worth a hand-over to other threads
_THREADS = len(os.sched_getaffinity(0))
# Products run on one thread each: layers are what runs side by side.
_WORKERS = ThreadPoolExecutor(_THREADS, "kernel", torch.set_num_threads, (1,))


@dataclass(frozen=True)
class Rotation:
    """cos and sin of one token run, float32 [tokens, rotary_dim / 2], attention_scaling multiplied in."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    interleaved: bool

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
        angle = reference.angles(rope, positions)
        cos, sin = (angle.cos() * factor).float(), (angle.sin() * factor).float()
        return cls(cos.numpy(), sin.numpy(), rope.pairing is Pairing.INTERLEAVED)


def write(writes: Sequence[LayerWrite], layers: range, size: int) -> None:
    """Run `writes` for these layers, lowest first, on all cores. size: bytes that they write in all."""
    parts = min(_THREADS, len(layers)) if size > _ALONE_BYTES else 1

    def part(number: int) -> None:
        for layer in layers[number::parts]:
            for one in writes:
                one(layer)

    others = [_WORKERS.submit(part, number) for number in range(1, parts)]
    try:
        part(0)
    finally:
        for other in others:
            other.result()


def plain(out: Tensor, base: Tensor, rotation: Rotation) -> LayerWrite:
    """Re-position only. out, base: [layers, 2, tokens, kv_heads, head_dim]; out may be a column range of a buffer."""
    target, source = _array(out), _array(base)
    nothing = np.zeros((1, *source.shape[3:]), np.float32)

    def layer_write(layer: int) -> None:
        (out_keys, out_values), (keys, values) = target[layer], source[layer]  # each contiguous: the loops rely on it to be fast
        loops.move(out_keys, keys, out_values, values, nothing, rotation.cos, rotation.sin, rotation.interleaved)

    return layer_write


def blended(out: Tensor, base: Tensor, offsets: Sequence[Tensor], weights: Sequence[float], rotation: Rotation) -> LayerWrite:
    """Paper policy: base + Σ w·offset (Eq. 6, 7). Layer 0 depends on token and position only and stays at base.

    offsets: as base, perhaps with more tokens.
    """
    tokens = base.shape[2]

    def layer_write(layer: int) -> None:
        kv = base[layer].float()
        if layer:
            kv = kv.clone() if kv.dtype == base.dtype else kv
            for offset, weight in zip(offsets, weights, strict=True):
                kv.add_(offset[layer, :, :tokens].float(), alpha=weight)
        plain(out[layer, None], kv[None], rotation)(0)

    return layer_write


def mapped(out: Tensor, base: Tensor, weight: Tensor, bias: Tensor, lead: Tensor, rotation: Rotation) -> LayerWrite:
    """Guarded policy: a linear map per (layer, K/V, head) plus an own bias for the leading tokens.

    base [layers, 2, tokens, kv_heads, head_dim]
    weight [layers, 2, kv_heads, head_dim, head_dim]; any float dtype
    bias [layers, 2, kv_heads, head_dim]
    lead [layers, 2, lead_tokens, kv_heads, head_dim], cut to the segment's length
    """
    target, at_base = _array(out), plain(out, base, rotation)
    tokens, heads, dim = base.shape[2:]
    tile = max(1, _TILE_BYTES // (heads * dim * 4))

    def layer_write(layer: int) -> None:
        if not layer:
            return at_base(layer)
        # base + base·W = base·(I + W): one product, nothing to add afterwards but the bias of the token's place.
        matrix = weight[layer].float().clone()
        matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
        own = bias[layer, :, None].float()
        places = torch.cat([own + lead[layer].float(), own], 1).numpy()
        moved = torch.empty(min(tile, tokens), heads, dim)
        for part in (0, 1):
            for start in range(0, tokens, tile):
                end = min(start + tile, tokens)
                result = moved[: end - start]
                torch.bmm(base[layer, part, start:end].float().transpose(0, 1), matrix[part], out=result.transpose(0, 1))
                chunk, places_here = target[layer, part, start:end], places[part, min(start, len(places[part]) - 1) :]
                if part:
                    loops.add(chunk, result.numpy(), places_here)
                else:
                    _rotate(chunk, result.numpy(), places_here, rotation, start)
        return None

    return layer_write


def canonicalise(out: Sequence[Tensor], kv: Tensor, first: int, starts: Sequence[int], rope: Rope) -> None:
    """Position-free copies of token runs of observed KV: out[i] takes those that begin at position starts[i].

    out: [layers, 2, tokens, kv_heads, head_dim] each, in the dtype of kv. first: position of the first column of kv.
    """
    writes = []
    for target, start in zip(out, starts, strict=True):
        end = start + target.shape[2]
        rotation = Rotation.out_of_place(rope, torch.arange(start, end))
        writes.append(plain(target, kv[:, :, start - first : end - first], rotation))
    write(writes, range(len(kv)), sum(t.nbytes for t in out))


def shift(kv: Tensor, positions: int, rope: Rope) -> Tensor:
    """A copy whose keys are turned by `positions`, to compare with policies that lack the canonical frame."""
    out = torch.empty_like(kv, memory_format=torch.contiguous_format)
    write([plain(out, kv, Rotation.by(rope, positions, kv.shape[2]))], range(len(kv)), kv.nbytes)
    return out


def finite(kv: Tensor) -> bool:
    """No NaN and no Inf. kv: contiguous."""
    unsigned, exponent = _EXPONENTS[kv.dtype]
    bits = kv.view(unsigned).flatten().numpy()
    sign = 1 << (8 * kv.itemsize - 1)
    return bool(loops.largest(bits, sign - 1) < exponent)


def prepare(dtype: torch.dtype, rope: Rope, head_dim: int) -> None:
    """Compile the loops for a model's dtype, so that no turn waits for it."""
    base, weight = torch.zeros(2, 2, 1, 1, head_dim, dtype=dtype), torch.zeros(2, 2, 1, head_dim, head_dim)
    out, bias = torch.empty_like(base), torch.zeros(2, 2, 1, head_dim)
    rotation = Rotation.by(rope, 1, 1)
    kinds = [
        plain(out, base, rotation),
        blended(out, base, (), (), rotation),
        mapped(out, base, weight, bias, torch.zeros(2, 2, 1, 1, head_dim), rotation),
    ]
    write(kinds, range(len(base)), 0)
    finite(base)


def _rotate(out: Array, keys: Array, places: Array, rotation: Rotation, start: int = 0) -> None:
    end = start + len(keys)
    loops.add_and_rotate(out, keys, places, rotation.cos[start:end], rotation.sin[start:end], rotation.interleaved)


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.view(_BITS[tensor.dtype]).numpy()
    return array
