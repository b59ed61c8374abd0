"""What the service needs of whatever computes KV, and the CPU's answer; a device's backend is a subclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache_service.geometry import Rope
from kvcache_service.kernels import cpu
from kvcache_service.kernels.codec import KV, Codec

# Writes these layers of all jobs, lowest first; all is written on return. size: bytes that are written.
Write = Callable[[range, int], None]


@dataclass(frozen=True)
class Blend:
    """Σ w·offset (paper)."""

    offsets: Sequence[KV]
    weights: Sequence[float]


@dataclass(frozen=True)
class Linear:
    """A linear map's terms (guarded); shapes as in `cpu.mapped`."""

    weight: Tensor
    bias: Tensor
    lead: Tensor


@dataclass(frozen=True)
class Job:
    """KV to be written: base, corrected or not, turned into place. out: [layers, 2, tokens, kv_heads, head_dim], perhaps
    columns of a buffer in host memory."""

    out: Tensor
    base: KV
    rotation: cpu.Rotation
    correction: Blend | Linear | None = None


class Backend:
    """Computes on the CPU. Thread-safe; every call may take time and belongs on a worker thread."""

    device = "cpu"

    def prepare(self, dtype: torch.dtype, rope: Rope, head_dim: int, codec: Codec | None) -> None:
        """Compile for a model, so that no turn waits for it."""
        cpu.prepare(dtype, rope, head_dim, codec)

    def writer(self, jobs: Sequence[Job]) -> Write:
        """Prepare jobs of one model, to be written a range of layers at a time."""
        writes = [_layer_write(job) for job in jobs]

        def write(layers: range, size: int) -> None:
            cpu.write(writes, layers, size)

        return write

    def canonicalise(self, out: Sequence[Tensor], kv: Tensor, first: int, starts: Sequence[int], to: cpu.Rotations) -> None:
        """See `cpu.canonicalise`."""
        cpu.canonicalise(out, kv, first, starts, to)

    def distances(self, base: KV, candidates: Sequence[KV]) -> Tensor:
        """See `cpu.distances`."""
        return cpu.distances(cpu.decoded(base), [cpu.decoded(candidate) for candidate in candidates])

    def pin(self, memory: Tensor) -> None:
        """Host memory that will be copied from and to, as long as it lives or until `unpin`."""

    def unpin(self, memory: Tensor) -> None: ...

    def gauges(self) -> dict[str, float]:
        return dict.fromkeys(
            ("kvcache_device_used_bytes", "kvcache_device_budget_bytes", "kvcache_device_evictions", "kvcache_pageable_bytes"), 0
        )


def _layer_write(job: Job) -> cpu.LayerWrite:
    match job.correction:
        case None:
            return cpu.plain(job.out, job.base, job.rotation)
        case Blend(offsets, weights):
            return cpu.blended(job.out, job.base, offsets, weights, job.rotation)
        case Linear(weight, bias, lead):
            return cpu.mapped(job.out, job.base, weight, bias, lead, job.rotation)
