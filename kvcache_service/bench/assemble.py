"""The CPU kernels alone, against a copy of the bytes that they read and write and against the bare matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache_service.bench.rows import Row, Timer, Track, compare, seconds
from kvcache_service.geometry import Pairing, Rope
from kvcache_service.kernels import codec, cpu
from kvcache_service.kernels.codec import KV, Codec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODED = torch.bfloat16  # of the KV that is stored coded


@dataclass(frozen=True)
class Segment:
    """KV of one segment of a model."""

    model: str
    layers: int
    heads: int
    dim: int
    tokens: int


SEGMENTS = (Segment("SmolLM2-135M", 30, 3, 64, 1024), Segment("Llama-3.1-8B", 32, 8, 128, 512))


def run(track: Track[int], rounds: int) -> Iterator[Row]:
    for segment in SEGMENTS:
        for dtype in DTYPES:
            yield from _segment(track, rounds, segment, dtype, None)
        for coding in Codec:
            yield from _segment(track, rounds, segment, CODED, coding)


def _segment(track: Track[int], rounds: int, segment: Segment, dtype: torch.dtype, coding: Codec | None) -> Iterator[Row]:
    layers, heads, dim, tokens = segment.layers, segment.heads, segment.dim, segment.tokens
    rope = Rope("default", tuple(10000.0 ** (-i / (dim // 2)) for i in range(dim // 2)), 1.0, Pairing.HALF_SPLIT, dim)
    rotation = cpu.Rotations(rope, 100 + tokens).into_place(100, 100 + tokens)
    cpu.prepare(dtype, rope, dim, coding)
    kv = torch.randn(layers, 2, tokens, heads, dim)
    base, offset = (_stored(noise.to(dtype), coding) for noise in (kv, 0.1 * kv.flip(2)))
    out = torch.empty_like(kv, dtype=dtype)
    weight = (torch.randn(layers, 2, heads, dim, dim) * 0.01).half()
    bias, lead = torch.randn(layers, 2, heads, dim).half(), torch.randn(layers, 2, 16, heads, dim).half()
    rows, matrices = kv.transpose(2, 3).flatten(0, 2).contiguous(), weight.float().flatten(0, 2)
    result = torch.empty_like(rows)
    read, written = codec.nbytes(base), out.nbytes
    kind = str(dtype).removeprefix("torch.") + (f" from {coding.name.lower()}" if coding else "")
    case = f"{segment.model}, {tokens} tokens, {kind}"
    copied = _copy((read + written) // 2)  # a copy of n bytes moves 2n

    def product() -> float:
        return seconds(lambda: torch.bmm(rows, matrices, out=result))

    moved = _timed(cpu.plain(out, base, rotation), out)
    yield compare(track, "assemble", f"{case}, moved", "copy", moved, copied, size=read + written, rounds=rounds)
    shifted, both = _timed(cpu.blended(out, base, [offset], [1.0], rotation), out), _copy((2 * read + written) // 2)
    yield compare(track, "assemble", f"{case}, mean offset", "copy", shifted, both, size=2 * read + written, rounds=rounds)
    mapped = _timed(cpu.mapped(out, base, weight, bias, lead, rotation), out)
    floor = "larger of copy and torch.bmm"
    yield compare(
        track,
        "assemble",
        f"{case}, linear map",
        floor,
        mapped,
        lambda: max(copied(), product()),
        size=read + written,
        rounds=rounds,
    )


def _copy(size: int) -> Timer:
    """A copy of `size` bytes by all threads of torch."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return lambda: seconds(lambda: target.copy_(source))


def _stored(kv: Tensor, coding: Codec | None) -> KV:
    if coding is None:
        return kv
    layers, _, _, heads, dim = kv.shape
    return codec.parts(codec.encode(kv, coding), (layers, heads, dim), kv.dtype)


def _timed(one: cpu.LayerWrite, out: Tensor) -> Timer:
    """As the service runs it, where threads of torch's own would only be in the way; the floors have them all."""

    def timed() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return seconds(lambda: cpu.write([one], range(len(out)), out.nbytes))
        finally:
            torch.set_num_threads(threads)

    return timed
