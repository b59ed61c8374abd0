"""The kernels beside a device copy of the bytes that they move, and a turn's fetch beside a bare copy over the bus.

.venv/bin/python benchmarks/gpu.py --json out/gpu.json --png out/gpu.png
Geometry of Llama-3.1-8B in bfloat16, random KV. --dry: the same code on small shapes, on a device that the CPU stands in for; its
times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvcache_service.bench.rows import Row, Timer, compare, seconds
from kvcache_service.geometry import Pairing, Rope
from kvcache_service.kernels import cpu, reference
from kvcache_service.kernels.backend import Blend, Job, Linear
from kvcache_service.kernels.cuda.backend import CudaBackend
from kvcache_service.kernels.cuda.launch import DeviceKV, DeviceMap, DeviceRotation, Kernels, Target, packed
from kvcache_service.kernels.cuda.runtime import CupyRuntime, Runtime, Stream

DTYPE = torch.bfloat16
ANCHORS = 20


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    dim: int
    tokens: tuple[int, ...]
    rounds: int


LLAMA = Shape(32, 8, 128, (512, 1024, 4096), 30)
SMALL = Shape(2, 2, 16, (8, 24), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        shape, runtime = (SMALL, stand_in(Path(folder))) if asked.dry else (LLAMA, CupyRuntime(0))
        backend = CudaBackend(runtime, "cuda:0", runtime.free_bytes() // 2)
        errors = {str(tokens): correct(backend, shape, tokens) for tokens in shape.tokens}
        rows = [
            row for tokens in shape.tokens for row in (*kernels(runtime, shape, tokens), fetch(runtime, backend, shape, tokens))
        ]
    for row in rows:
        speed = row.bytes / row.seconds_p50 / 1e9
        print(
            f"{row.bench:<8}{row.case:<28}{1e3 * row.seconds_p50:9.3f} ms {speed:8.1f} GB/s {1 / row.ratio:7.1%} of {row.floor}"
        )
    print("relative error against float64:", errors)
    if asked.json:
        found = {"device": runtime.name, "dry": asked.dry, "errors": errors, "rows": [asdict(row) for row in rows]}
        asked.json.write_text(json.dumps(found, indent=2))
    if asked.png:
        plot(rows, asked.png, runtime.name)


def stand_in(folder: Path) -> Runtime:
    from tests.cuda.shim import HostRuntime

    return HostRuntime(folder)


def rope(shape: Shape) -> Rope:
    half = shape.dim // 2
    return Rope("default", tuple(500000.0 ** (-i / half) for i in range(half)), 1.0, Pairing.HALF_SPLIT, shape.dim)


def noise(shape: Shape, tokens: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape.layers, 2, tokens, shape.heads, shape.dim, generator=draw).to(DTYPE)


def linear(shape: Shape) -> Linear:
    draw, outer = torch.Generator().manual_seed(7), (shape.layers, 2)
    weight = 0.01 * torch.randn(*outer, shape.heads, shape.dim, shape.dim, generator=draw)
    bias, lead = torch.randn(*outer, shape.heads, shape.dim, generator=draw), torch.zeros(*outer, 16, shape.heads, shape.dim)
    return Linear(weight.half(), bias.half(), lead.half())


def correct(backend: CudaBackend, shape: Shape, tokens: int) -> dict[str, float]:
    """Relative error of every source, of two layers, which is all that float64 can do in the time."""
    few = Shape(2, shape.heads, shape.dim, (), 0)
    base, offset, map = noise(few, tokens, 1), noise(few, tokens, 2), linear(few)
    mapped = reference.linear(base, map.weight, map.bias[:, :, None])
    blended = reference.blend(base, [offset], torch.tensor([0.5]))
    mapped[0] = blended[0] = base[0].double()
    rotation, found = cpu.Rotations(rope(shape), tokens).into_place(0, tokens), {}
    cases = {"moved": (None, base), "blended": (Blend([offset], [0.5]), blended), "mapped": (map, mapped)}
    for name, (correction, expected) in cases.items():
        out, placed = torch.empty_like(base), reference.place(expected, torch.arange(tokens), rope(shape))
        backend.writer([Job(out, base, rotation, correction)])(range(2), out.nbytes)
        found[name] = float((out.double() - placed).norm() / placed.norm())
    return found


def kernels(runtime: Runtime, shape: Shape, tokens: int) -> Iterator[Row]:
    """Device memory to device memory. A copy of n bytes moves 2n."""
    stream, compiled = runtime.stream(), Kernels(runtime, DTYPE)
    plane = tokens * shape.heads * shape.dim
    size = 2 * shape.layers * plane * DTYPE.itemsize
    memory = [runtime.allocate(size) for _ in range(ANCHORS + 1)]
    out, other = runtime.allocate(size), runtime.allocate(size)
    map = linear(shape)
    small = [tensor.contiguous() for tensor in (map.weight, map.bias, map.lead)]
    table = cpu.Rotations(rope(shape), tokens).into_place(0, tokens)
    turned = [torch.tensor(side) for side in table[:2]]
    kv = [DeviceKV(m.address, 0, 0, 0, shape.layers, tokens, shape.heads, shape.dim, m) for m in memory]
    terms = torch.from_numpy(packed([(one, 1.0) for one in kv]).view("int64"))
    placed = [runtime.allocate(t.nbytes) for t in (*small, *turned, terms)]
    first = noise(shape, tokens, 1)
    for target, source in [*zip(placed, (*small, *turned, terms), strict=True), *((m, first) for m in memory)]:
        stream.copy(target.address, source.nbytes, source.data_ptr(), source.nbytes, source.nbytes, 1)
    stream.synchronize()
    weight, bias, lead, cos, sin, term = (m.address for m in placed)
    rotation = DeviceRotation(cos, sin, shape.dim // 2, table.interleaved)
    device_map, target, layers = (
        DeviceMap(weight, bias, lead, 16, False),
        Target(out.address, 2 * plane, plane),
        range(shape.layers),
    )

    def copied() -> None:
        stream.copy(other.address, size, memory[0].address, size, size, 1)

    cases = {
        "moved": (lambda: compiled.combine(stream, target, term, kv[:1], layers, rotation), 2),
        f"blend of {ANCHORS}": (lambda: compiled.combine(stream, target, term, kv, layers, rotation), ANCHORS + 2),
        "mapped": (lambda: compiled.linear(stream, target, term, kv[0], device_map, layers, rotation), 2),
    }
    for name, (launch, moves) in cases.items():
        floor = done(stream, copied)
        scaled = lambda floor=floor, moves=moves: floor() * moves / 2  # noqa: E731
        case = f"{tokens} tokens, {name}"
        yield compare(track, "kernel", case, "device copy", done(stream, launch), scaled, size=moves * size, rounds=shape.rounds)


def fetch(runtime: Runtime, backend: CudaBackend, shape: Shape, tokens: int) -> Row:
    """KV that lies on the device, assembled into pinned host memory, beside a bare copy of as many bytes."""
    base = noise(shape, tokens, 1)
    out, stream, source = torch.empty_like(base), runtime.stream(), runtime.allocate(base.nbytes)
    backend.pin(out)
    write = backend.writer([Job(out, base, cpu.Rotations(rope(shape), tokens).into_place(0, tokens))])
    size = base.nbytes
    copy = done(stream, lambda: stream.copy(out.data_ptr(), size, source.address, size, size, 1))

    def fetched() -> float:
        return seconds(lambda: write(range(shape.layers), size))

    try:
        return compare(track, "fetch", f"{tokens} tokens", "copy over the bus", fetched, copy, size=size, rounds=shape.rounds)
    finally:
        backend.unpin(out)


def done(stream: Stream, enqueue: Callable[[], None]) -> Timer:
    """Times what is enqueued until it is over."""

    def timed() -> float:
        def work() -> None:
            enqueue()
            stream.synchronize()

        return seconds(work)

    return timed


def track(items: Iterable[int], total: int, description: str) -> Iterator[int]:
    return iter(items)


def plot(rows: Sequence[Row], path: Path, device: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(rows) + 1))
    axes.barh([f"{row.bench}: {row.case}" for row in rows], [100 / row.ratio for row in rows])
    axes.axvline(100, color="black", linewidth=1)
    axes.set_xlabel(f"% of the floor's bandwidth, {device}")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
