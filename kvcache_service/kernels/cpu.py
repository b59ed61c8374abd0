"""CPU backend: one pass over the bytes, layers shared out to threads; accumulates in float32, rounds once.

A segment is written layer by layer, so that layer 0 of a turn is complete first. Matrix products are torch's; all else
is one numba loop that reads, adds, rotates and rounds, and that runs without the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache_service.geometry import Pairing, Rope
from kvcache_service.kernels import loops, reference
from kvcache_service.kernels.codec import KV, Codec, Coded, encode, parts

# Writes these layers of one segment.
LayerWrite = Callable[[range], None]
Array = NDArray[np.generic]

# How numba sees each dtype: it knows no float of 16 or 8 bits, so their bits travel as these integers.
_BITS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.int8: torch.int8,
    torch.float8_e4m3fn: torch.uint8,
}
# Of each dtype: unsigned bits of the same size, and the bits of infinity; NaN lies above.
_EXPONENTS = {
    torch.float32: (torch.uint32, 0x7F800000),
    torch.bfloat16: (torch.uint16, 0x7F80),
    torch.float16: (torch.uint16, 0x7C00),
}
_ALONE_BYTES = 128 << 10  # jobs below are not worth a hand-over to other threads
_SHARES = 4  # hand-overs per thread: few, since each waits for the interpreter's lock; several, since cores may be busy
_THREADS = len(os.sched_getaffinity(0))
# Torch runs on one thread each: layers are what runs side by side.
_WORKERS = ThreadPoolExecutor(_THREADS, "kernel", torch.set_num_threads, (1,))


class Rotation(NamedTuple):
    """cos and sin of one token run, float32 [tokens, rotary_dim / 2], attention_scaling multiplied in."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    interleaved: bool

    @classmethod
    def by(cls, rope: Rope, shift: int, tokens: int) -> Rotation:
        """Turns every key by `shift` positions, whatever its own."""
        return cls(*_turns(rope, torch.full((tokens,), shift), 1.0), rope.pairing is Pairing.INTERLEAVED)


class Rotations:
    """The rotations of a model to and from positions [0, positions), worked out once: float64 angles cost more than moving KV.

    Two tables of float32 [positions, rotary_dim / 2], four where attention_scaling is not 1.
    """

    def __init__(self, rope: Rope, positions: int) -> None:
        self._interleaved = rope.pairing is Pairing.INTERLEAVED
        every = torch.arange(positions)
        self._into = _turns(rope, every, rope.attention_scaling)
        self._out_of = self._into if rope.attention_scaling == 1.0 else _turns(rope, every, 1.0 / rope.attention_scaling)

    def into_place(self, start: int, end: int) -> Rotation:
        """Turns canonical keys to positions [start, end). Raises ValueError beyond the tables, which loops would read past."""
        cos, sin = self._into
        return Rotation(cos[self._within(start, end)], sin[start:end], self._interleaved)

    def to(self, positions: Sequence[int]) -> Rotation:
        """Turns canonical keys to `positions`."""
        cos, sin = self._into
        chosen = list(positions)
        return Rotation(cos[chosen], sin[chosen], self._interleaved)

    def out_of_place(self, start: int, end: int) -> Rotation:
        """Takes keys at positions [start, end) back to the canonical frame. Raises ValueError beyond the tables."""
        cos, sin = self._out_of
        return Rotation(cos[self._within(start, end)], -sin[start:end], self._interleaved)

    def _within(self, start: int, end: int) -> slice:
        if not 0 <= start <= end <= len(self._into[0]):
            raise ValueError(f"positions [{start}, {end}) of {len(self._into[0])}")
        return slice(start, end)


def _turns(rope: Rope, positions: Tensor, factor: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    angle = reference.angles(rope, positions)
    return (angle.cos() * factor).float().numpy(), (angle.sin() * factor).float().numpy()


def write(writes: Sequence[LayerWrite], layers: range, size: int) -> None:
    """Run `writes` for these layers, lowest first, on all cores; all is written on return. size: bytes that they write."""
    threads = min(_THREADS, len(layers)) if size > _ALONE_BYTES else 1
    each = -(-len(layers) // (threads * _SHARES)) if threads > 1 else max(1, len(layers))
    shares = iter([layers[i : i + each] for i in range(0, len(layers), each)])

    def work() -> None:
        for share in shares:  # whichever thread is free takes the next one
            for one in writes:
                one(share)

    others = [_WORKERS.submit(work) for _ in range(1, threads)]
    try:
        work()
    finally:
        for other in others:
            other.result()


def plain(out: Tensor, base: KV, rotation: Rotation) -> LayerWrite:
    """Re-position only. out, base: [layers, 2, tokens, kv_heads, head_dim]; out may be a column range of a buffer."""
    target, source = _planes(out), _numbers(base)

    def layer_write(layers: range) -> None:
        loops.move(target, *source, *rotation, layers.start, layers.stop)

    return layer_write


def blended(out: Tensor, base: KV, offsets: Sequence[KV], weights: Sequence[float], rotation: Rotation) -> LayerWrite:
    """Paper policy: base + Σ w·offset (Eq. 6, 7). Layer 0 depends on token and position only and stays at base.

    offsets: as base, perhaps with more tokens.
    """
    at_base, target, source = plain(out, base, rotation), _planes(out), _numbers(base)
    if not offsets:
        return at_base
    terms, factors = _alike(offsets), np.array(weights, np.float32)

    def layer_write(layers: range) -> None:
        if 0 in layers:
            at_base(range(1))
            layers = layers[1:]
        loops.blend(target, *source, _sums(terms, factors), len(out), *rotation, layers.start, layers.stop)

    return layer_write


def mapped(out: Tensor, base: KV, weight: Tensor, bias: Tensor, lead: Tensor, rotation: Rotation) -> LayerWrite:
    """Guarded policy: a linear map per (layer, K/V, head) plus an own bias for the leading tokens.

    base [layers, 2, tokens, kv_heads, head_dim]
    weight [layers, 2, kv_heads, head_dim, head_dim]; any dtype of KV, as are bias and lead
    bias [layers, 2, kv_heads, head_dim]
    lead [layers, 2, lead_tokens, kv_heads, head_dim], cut to the segment's length
    """
    at_base, target, source = plain(out, base, rotation), _planes(out), _numbers(base)
    terms = [_bits(term.contiguous()) for term in (weight, bias, lead)]

    def layer_write(layers: range) -> None:
        if 0 in layers:
            at_base(range(1))
            layers = layers[1:]
        loops.correct(target, *source, *terms, *rotation, layers.start, layers.stop)

    return layer_write


def canonicalise(out: Sequence[Tensor], kv: Tensor, first: int, starts: Sequence[int], rotations: Rotations) -> None:
    """Position-free copies of token runs of observed KV: out[i] takes those that begin at position starts[i].

    out: [layers, 2, tokens, kv_heads, head_dim] each, in the dtype of kv. first: position of the first column of kv.
    """
    writes = []
    for target, start in zip(out, starts, strict=True):
        end = start + target.shape[2]
        writes.append(plain(target, kv[:, :, start - first : end - first], rotations.out_of_place(start, end)))
    write(writes, range(len(kv)), sum(t.nbytes for t in out))


def shift(kv: Tensor, positions: int, rope: Rope) -> Tensor:
    """A copy whose keys are turned by `positions`, to compare with policies that lack the canonical frame."""
    out = torch.empty_like(kv, memory_format=torch.contiguous_format)
    write([plain(out, kv, Rotation.by(rope, positions, kv.shape[2]))], range(len(kv)), kv.nbytes)
    return out


def decoded(kv: KV) -> Tensor:
    """The KV in the dtype that it had: itself where it is not coded."""
    if not isinstance(kv, Coded):
        return kv
    out, unturned = torch.empty(kv.shape, dtype=kv.dtype), np.empty((kv.shape[2], 0), np.float32)
    write([plain(out, kv, Rotation(unturned, unturned, False))], range(len(out)), out.nbytes)
    return out


def distances(base: Tensor, candidates: Sequence[Tensor]) -> Tensor:
    """RMS over all entries of base − candidate, cut to the length of base; float32, one per candidate."""
    tokens = base.shape[2]
    means = [torch.nn.functional.mse_loss(base.float(), c[:, :, :tokens].float()) for c in candidates]
    return torch.stack(means).sqrt()


def finite(kv: Tensor) -> bool:
    """No NaN and no Inf. kv: contiguous."""
    unsigned, exponent = _EXPONENTS[kv.dtype]
    bits = kv.view(unsigned).flatten().numpy()
    sign = 1 << (8 * kv.itemsize - 1)
    return bool(loops.largest(bits, sign - 1) < exponent)


def prepare(dtype: torch.dtype, rope: Rope, head_dim: int, codec: Codec | None = None) -> None:
    """Compile the loops for a model's dtype, so that no turn waits for it. codec: of KV that is stored coded."""
    base, weight = torch.zeros(2, 2, 1, 1, head_dim, dtype=dtype), torch.zeros(2, 2, 1, head_dim, head_dim).half()
    out, bias = torch.empty_like(base), torch.zeros(2, 2, 1, head_dim).half()
    rotation = Rotation.by(rope, 1, 1)
    stored: list[KV] = [base] if codec is None else [base, parts(encode(base, codec), (2, 1, head_dim), dtype)]
    for kind in stored:
        lead = torch.zeros(2, 2, 1, 1, head_dim).half()
        corrected = mapped(out, kind, weight, bias, lead, rotation), blended(out, kind, stored[-1:], [1.0], rotation)
        write([plain(out, kind, rotation), *corrected], range(len(base)), 0)
    finite(base)


Numbers = tuple[loops.Planes, loops.Scales | None]


def _numbers(kv: KV) -> Numbers:
    if isinstance(kv, Coded):
        return _planes(kv.codes), loops.Scales(kv.key_scales.numpy(), kv.value_scales.numpy())
    return _planes(kv), None


def _alike(offsets: Sequence[KV]) -> list[Numbers]:
    """All of one kind, as the loop takes them: where some are coded otherwise than the first one, as they were before."""
    kinds = {offset.codes.dtype if isinstance(offset, Coded) else None for offset in offsets}
    if len(kinds) > 1:
        offsets = [decoded(offset) for offset in offsets]
    return [_numbers(offset if isinstance(offset, Coded) else offset.contiguous()) for offset in offsets]


def _sums(terms: Sequence[Numbers], weights: NDArray[np.float32]) -> loops.Sums:
    first, scales = terms[0]
    places = [(p.flat.ctypes.data, s.keys.ctypes.data if s else 0, s.values.ctypes.data if s else 0) for p, s in terms]
    tokens = [planes.tokens for planes, _ in terms]
    return loops.Sums(first, scales, np.array(places, np.int64), np.array(tokens, np.int64), weights)


def _planes(kv: Tensor) -> loops.Planes:
    if kv.numel() and not kv[0, 0].is_contiguous():
        raise ValueError("tokens of one layer must lie side by side")
    extent = 1 + sum((n - 1) * step for n, step in zip(kv.shape, kv.stride(), strict=True)) if kv.numel() else 0
    return loops.Planes(_bits(kv.as_strided((extent,), (1,))), *kv.stride()[:2], *kv.shape[2:])


def _bits(tensor: Tensor) -> Array:
    array: Array = tensor.view(_BITS[tensor.dtype]).numpy()
    return array
