"""Write a plan's KV into a turn's buffer, and take observed KV out of it. The only caller of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache_service.engine.plan import Blended, Mapped, Plan, Repositioned, SegmentPlan, Source
from kvcache_service.geometry import Geometry
from kvcache_service.kernels import cpu

# Buffer columns of a turn:
#   [0, prompt)                  the prompt; `fresh` columns are overwritten by the worker
#   [prompt, prompt + reserve)   decoded tokens, written by the worker
#   [prompt + reserve, …)        re-positioned base at the probe positions, to judge the correction against


def assemble(out: Tensor, plan: Plan, geometry: Geometry, reserve: int) -> None:
    """out: the turn's buffer [layers, 2, columns, kv_heads, head_dim]; every reused column is written once."""
    probe_column = plan.prompt_tokens + reserve
    for segment in plan.segments:
        if segment.source is None:
            continue
        start, covered = segment.span.start, segment.source.base.shape[2]
        positions = torch.arange(start, start + covered)
        rotation = cpu.Rotation.into_place(geometry.rope, positions)
        cpu.write_segment(out[:, :, start : start + covered], _kernel_source(segment.source), rotation)
        if segment.probe:
            _write_probe(out, segment, segment.source.base, geometry, probe_column)
            probe_column += len(segment.probe)


def _write_probe(out: Tensor, segment: SegmentPlan, base: Tensor, geometry: Geometry, column: int) -> None:
    positions = torch.tensor(segment.probe)
    rows = base[:, :, positions - segment.span.start]
    rotation = cpu.Rotation.into_place(geometry.rope, positions)
    cpu.write_segment(out[:, :, column : column + len(positions)], cpu.plain(rows), rotation)


def _kernel_source(source: Source) -> cpu.LayerSource:
    match source:
        case Repositioned(base):
            return cpu.plain(base)
        case Blended(base, offsets, weights):
            return cpu.blended(base, offsets, weights)
        case Mapped(base, map):
            return cpu.mapped(base, map.weight, map.bias, map.lead)


def take_out(kv: Tensor, start: int, geometry: Geometry) -> Tensor:
    """Position-free copy of observed KV whose first column lies at position `start`."""
    return cpu.canonicalise(kv, torch.arange(start, start + kv.shape[2]), geometry.rope)


def fetched_tokens(plan: Plan) -> int:
    """Columns that assembly fills, probe columns included."""
    return sum(s.source.base.shape[2] + len(s.probe) for s in plan.segments if s.source is not None)
