"""Write a plan's KV into a turn's buffer, and take observed KV out of it. The only caller of the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvcache_service.engine.plan import Blended, Mapped, Plan, Repositioned, SegmentPlan, Source
from kvcache_service.geometry import Geometry
from kvcache_service.kernels import codec, cpu
from kvcache_service.kernels.backend import Backend, Blend, Job, Linear
from kvcache_service.kernels.codec import KV
from kvcache_service.tiers.host import HostTier

# Buffer columns of a turn:
#   [0, prompt)                  the prompt; `fresh` columns are overwritten by the worker
#   [prompt, prompt + reserve)   decoded tokens, written by the worker
#   [prompt + reserve, …)        re-positioned base at the probe positions, to judge the correction against


def assemble(
    backend: Backend, out: Tensor, plan: Plan, geometry: Geometry, rotations: cpu.Rotations, reserve: int, band_bytes: int
) -> Iterator[range]:
    """Write every reused column once, lowest layers first; yields the layers that have become complete, about `band_bytes`
    at a time.

    out: the turn's buffer [layers, 2, columns, kv_heads, head_dim].
    """
    probe_column = plan.prompt_tokens + reserve
    jobs = []
    for segment in plan.segments:
        if segment.source is None:
            continue
        start, covered = segment.span.start, segment.source.base.shape[2]
        jobs.append(_job(out[:, :, start : start + covered], segment.source, rotations.into_place(start, start + covered)))
        if segment.probe:
            columns = out[:, :, probe_column : probe_column + len(segment.probe)]
            jobs.append(_probe_job(columns, segment, segment.source.base, rotations))
            probe_column += len(segment.probe)
    layer_bytes = fetched_tokens(plan) * geometry.token_bytes // geometry.layers
    step = max(1, min(geometry.layers, band_bytes // max(1, layer_bytes)))
    write = backend.writer(jobs)
    for first in range(0, geometry.layers, step):
        layers = range(first, min(first + step, geometry.layers))
        write(layers, len(layers) * layer_bytes)
        yield layers


def _probe_job(columns: Tensor, segment: SegmentPlan, base: KV, rotations: cpu.Rotations) -> Job:
    rows = codec.at(base, torch.tensor(segment.probe) - segment.span.start)
    return Job(columns, rows, rotations.to(segment.probe))


def _job(out: Tensor, source: Source, rotation: cpu.Rotation) -> Job:
    match source:
        case Repositioned(base):
            return Job(out, base, rotation)
        case Blended(base, offsets, weights):
            return Job(out, base, rotation, Blend(offsets, weights))
        case Mapped(base, map):
            return Job(out, base, rotation, Linear(map.weight, map.bias, map.lead))


def take_out(
    backend: Backend,
    tier: HostTier,
    kv: Tensor,
    first: int,
    ranges: Sequence[tuple[int, int]],
    geometry: Geometry,
    rotations: cpu.Rotations,
) -> list[Tensor]:
    """Position-free copies of token ranges [start, end) of observed KV whose first column lies at position `first`.

    They lie in memory of the tier. Raises QUOTA when it has none.
    """
    out = [tier.empty(geometry.shape(end - start), geometry.dtype) for start, end in ranges]
    backend.canonicalise(out, kv, first, [start for start, _ in ranges], rotations)
    return out


def fetched_tokens(plan: Plan) -> int:
    """Columns that assembly fills, probe columns included."""
    return sum(s.source.base.shape[2] + len(s.probe) for s in plan.segments if s.source is not None)
