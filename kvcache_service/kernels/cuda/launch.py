"""Launches of the kernels beside this file: parameters are packed here, and the widest loads that alignment allows are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache_service.kernels.cuda.runtime import Memory, Runtime, Stream

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # KV_TYPE of numbers.cuh
CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}  # Term.kind; 0 is the dtype of the KV
KERNELS = {
    "combine": ("combine_one", "combine_wide"),
    "linear": ("linear_one", "linear_wide"),
    "distances": ("squares_one", "squares_wide", "fold"),
}
_BLOCK = 256
_BLOCKS = 4096  # of a grid: enough for any device, few enough that a thread does more than start
_WORDS = ("numbers", "key_scales", "value_scales", "kind", "tokens", "layer", "part")
_TERM = np.dtype([*((name, np.int64) for name in _WORDS), ("weight", np.float64)])  # Term of numbers.cuh


@dataclass(frozen=True)
class DeviceKV:
    """KV [layers, 2, tokens, kv_heads, head_dim] on the device, contiguous. held: what keeps its memory alive."""

    numbers: int
    key_scales: int
    value_scales: int
    kind: int
    layers: int
    tokens: int
    heads: int
    dim: int
    held: Memory


class DeviceRotation(NamedTuple):
    """Addresses of cos and sin, float32 [tokens, pairs]."""

    cos: int
    sin: int
    pairs: int
    interleaved: bool


class DeviceMap(NamedTuple):
    """Addresses of a linear map's terms; full: float32, else float16."""

    weight: int
    bias: int
    lead: int
    leads: int
    full: bool


class Target(NamedTuple):
    """Where the first written layer lies, and the elements from one layer to the next and from K to V."""

    address: int
    layer_step: int
    part_step: int


def source(name: str) -> str:
    """One kernel file with what it includes: all that a compiler needs."""
    here = Path(__file__).parent
    return (here / f"{name}.cu").read_text().replace('#include "numbers.cuh"', (here / "numbers.cuh").read_text())


def options(dtype: torch.dtype) -> tuple[str, ...]:
    return ("--std=c++17", f"-DKV_TYPE={KV_TYPES[dtype]}")


def packed(terms: Sequence[tuple[DeviceKV, float]]) -> NDArray[np.void]:
    """Terms as kernels read them, to be copied to the device."""
    rows = []
    for kv, weight in terms:
        plane = kv.tokens * kv.heads * kv.dim
        rows.append((kv.numbers, kv.key_scales, kv.value_scales, kv.kind, kv.tokens, 2 * plane, plane, weight))
    return np.array(rows, _TERM)


class Kernels:
    """The kernels of one dtype, compiled. Everything is enqueued, nothing waits."""

    def __init__(self, runtime: Runtime, dtype: torch.dtype) -> None:
        self._size = dtype.itemsize
        self._wide = 16 // dtype.itemsize
        self._kernels: dict[str, Any] = {}
        for name, kernels in KERNELS.items():
            self._kernels |= runtime.compile(source(name), options(dtype), kernels)

    def combine(
        self, stream: Stream, target: Target, terms: int, inputs: Sequence[DeviceKV], layers: range, rotation: DeviceRotation
    ) -> None:
        """Base and weighted offsets, rotated; terms: where `packed` lies. inputs: the same terms, base first."""
        base = inputs[0]
        wide = self._vectors(inputs, target) and base.dim % (2 * self._wide) == 0 and rotation.pairs % self._wide == 0
        units = -(-base.dim // (2 * self._wide if wide else 2)) * base.heads * base.tokens
        self._launch(
            stream,
            "combine_wide" if wide else "combine_one",
            units,
            2 * len(layers),
            (*target, terms, len(inputs), layers.start, base.tokens, base.heads, base.dim, *rotation),
        )

    def linear(
        self,
        stream: Stream,
        target: Target,
        term: int,
        base: DeviceKV,
        map: DeviceMap,
        layers: range,
        rotation: DeviceRotation,
    ) -> None:
        """Base and its linear map, rotated. term: where the packed base lies."""
        wide = self._vectors([base], target)
        tiles = -(-base.tokens // 8) * -(-base.dim // 2)
        arguments = (*map[:4], map.full, layers.start, base.tokens, base.heads, base.dim, *rotation)
        rows = 2 * len(layers) * base.heads
        self._launch(stream, "linear_wide" if wide else "linear_one", tiles, rows, (*target, term, *arguments))

    def distances(self, stream: Stream, sums: int, terms: int, inputs: Sequence[DeviceKV]) -> None:
        """Sums of squared differences between the first of `inputs` and every other one: float32 at `sums`, one per candidate.

        sums: room for `distance_bytes`.
        """
        base, candidates = inputs[0], len(inputs) - 1
        wide = self._vectors(inputs, Target(0, 0, 0))
        units = base.tokens * base.heads * (base.dim // self._wide if wide else base.dim)
        blocks = max(1, min(_BLOCKS // 16, -(-units // _BLOCK)))
        name, shape = "squares_wide" if wide else "squares_one", (base.layers, base.tokens, base.heads, base.dim)
        other = sums + 4 * candidates * _BLOCK * (_BLOCKS // 16)
        stream.launch(self._kernels[name], (blocks, candidates), _BLOCK, (other, terms, *shape))
        stream.launch(self._kernels["fold"], (1, candidates), _BLOCK, (sums, other, blocks * _BLOCK))
        stream.launch(self._kernels["fold"], (1, candidates), 1, (other, sums, _BLOCK))
        stream.copy(sums, 4 * candidates, other, 4 * candidates, 4 * candidates, 1)

    def distance_bytes(self, candidates: int) -> int:
        return 2 * 4 * candidates * _BLOCK * (_BLOCKS // 16)

    def _vectors(self, inputs: Sequence[DeviceKV], target: Target) -> bool:
        """All rows begin where a load of 16 bytes (8, of codes) may begin."""
        steps = [inputs[0].dim, target.layer_step, target.part_step]
        addresses = [target.address, *(kv.numbers for kv in inputs)]
        return not any(step % self._wide for step in steps) and not any(address % 16 for address in addresses)

    def _launch(self, stream: Stream, name: str, threads: int, rows: int, arguments: tuple[int, ...]) -> None:
        blocks = min(-(-threads // _BLOCK), max(1, _BLOCKS // rows))
        if blocks and rows:
            stream.launch(self._kernels[name], (blocks, rows), _BLOCK, tuple(map(int, arguments)))
