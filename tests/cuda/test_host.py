"""The CUDA backend against float64: on the CPU, from the same source through the same launcher, and on a device where one is."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.geometry import Pairing, Rope
from kvcache_service.kernels import cpu, reference
from kvcache_service.kernels.backend import Blend, Job, Linear
from kvcache_service.kernels.codec import KV, Codec
from kvcache_service.kernels.cuda.backend import CudaBackend
from kvcache_service.kernels.cuda.runtime import CupyRuntime, Runtime
from tests.cuda.shim import HostRuntime
from tests.kernels.test_codec import coded, in_float64

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
GUARD = -777.0
ROPE = Rope("default", (1.0, 0.1), 1.0, Pairing.HALF_SPLIT, 4)

# pairs, dimensions that do not turn; wide loads where both are multiples of eight, odd rows elsewhere
HEADS = st.sampled_from([(1, 0), (3, 1), (5, 2), (8, 0), (8, 16), (16, 0), (4, 5)])
STORED = st.sampled_from([None, Codec.INT8, Codec.FP8])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels lie."""
    return tmp_path_factory.mktemp("shim")


@pytest.fixture(scope="module", params=["shim", pytest.param("device", marks=pytest.mark.gpu)])
def runtime(request: pytest.FixtureRequest, folder: Path) -> Runtime:
    if request.param == "shim":
        if shutil.which("g++") is None:
            pytest.skip("g++ is not installed")
        return HostRuntime(folder)
    try:
        return CupyRuntime(0)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def backend(runtime: Runtime) -> Iterator[CudaBackend]:
    made = CudaBackend(runtime, "cuda:0", 1 << 30)
    yield made
    made.resident.check()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    HEADS,
    st.sampled_from(list(Pairing)),
    st.sampled_from(list(TOLERANCE)),
    st.tuples(STORED, STORED),
    st.integers(1, 21),
    st.integers(1, 3),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_every_source_matches_float64(
    backend: CudaBackend,
    head: tuple[int, int],
    pairing: Pairing,
    dtype: torch.dtype,
    stored: tuple[Codec | None, Codec | None],
    tokens: int,
    heads: int,
    layers: int,
) -> None:
    """Moved, blended and mapped at once, into columns of one buffer, a range of layers at a time; columns between stay."""
    pairs, rest = head
    rope, dim = Rope("default", tuple(100.0 ** (-i / pairs) for i in range(pairs)), 1.3, pairing, 2 * pairs), 2 * pairs + rest

    def kv(length: int, seed: int, coding: Codec | None) -> KV:
        raw = numbers(layers, 2, length, heads, dim, seed=seed).to(dtype)
        return raw if coding is None else coded(raw, coding)

    base = kv(tokens, 1, stored[0])
    offsets, weights = [kv(tokens + i, 2 + i, stored[1]) for i in range(3)], [0.5, 0.3, 0.2]
    weight, bias = numbers(layers, 2, heads, dim, dim, seed=7) * 0.1, numbers(layers, 2, heads, dim, seed=8)
    lead = numbers(layers, 2, 4, heads, dim, seed=9)
    if tokens % 2:  # as predictors store theirs
        weight, bias, lead = weight.half(), bias.half(), lead.half()
    exact, places = in_float64(base), bias.double()[:, :, None].repeat(1, 1, tokens, 1, 1)
    places[:, :, : min(4, tokens)] += lead[:, :, : min(4, tokens)]
    blended = reference.blend(exact, [in_float64(o) for o in offsets], torch.tensor(weights))
    mapped = reference.linear(exact, weight, places)
    blended[0], mapped[0] = exact[0], exact[0]  # layer 0 stays at base

    buffer = torch.full((layers, 2, 3 * tokens + 4, heads, dim), GUARD, dtype=dtype)
    rotation = cpu.Rotations(rope, 40 + tokens).into_place(40, 40 + tokens)
    corrections = (None, Blend(offsets, weights), Linear(weight, bias, lead))
    outs = [buffer[:, :, 1 + i * (tokens + 1) :][:, :, :tokens] for i in range(3)]
    write = backend.writer([Job(out, base, rotation, c) for out, c in zip(outs, corrections, strict=True)])
    for part in (range(1), range(1, layers)):
        write(part, buffer.nbytes)
        assert (buffer[part.stop :] == GUARD).all()
    for out, expected in zip(outs, (exact, blended, mapped), strict=True):
        placed = reference.place(expected, torch.arange(40, 40 + tokens), rope)
        assert (out.double() - placed).norm() / placed.norm() <= TOLERANCE[dtype]
    assert (buffer[:, :, :: tokens + 1] == GUARD).all()


@given(st.sampled_from(list(TOLERANCE)), st.sampled_from([4, 16, 17]), st.integers(1, 9), STORED)
@settings(deadline=None, max_examples=30)
def test_distances(backend: CudaBackend, dtype: torch.dtype, dim: int, tokens: int, coding: Codec | None) -> None:
    """RMS over the base's tokens, the same bits every time."""
    raw = [numbers(3, 2, tokens + i, 2, dim, seed=i).to(dtype) for i in range(4)]
    stored: list[KV] = [kv if coding is None else coded(kv, coding) for kv in raw]
    found = backend.distances(stored[0], stored[1:])
    exact = [(in_float64(stored[0]) - in_float64(kv)[:, :, :tokens]).square().mean().sqrt() for kv in stored[1:]]
    torch.testing.assert_close(found.double(), torch.stack(exact), rtol=1e-6, atol=0)
    assert torch.equal(backend.distances(stored[0], stored[1:]), found)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [16, 9])
def test_canonicalise_takes_runs_out_of_a_buffer(backend: CudaBackend, dtype: torch.dtype, dim: int) -> None:
    rope = Rope("default", (1.0, 0.1, 0.01, 0.001), 1.2, Pairing.HALF_SPLIT, 8)
    buffer = numbers(3, 2, 12, 2, dim, seed=1).to(dtype)
    out = [torch.empty(3, 2, n, 2, dim, dtype=dtype) for n in (2, 5)]
    backend.canonicalise(out, buffer[:, :, 1:11], 40, [41, 44], cpu.Rotations(rope, 60))
    for got, start in zip(out, (41, 44), strict=True):
        columns = slice(start - 39, start - 39 + got.shape[2])
        expected = reference.canonicalise(buffer[:, :, columns], torch.arange(start, start + got.shape[2]), rope)
        assert (got.double() - expected).norm() / expected.norm() <= TOLERANCE[dtype]


def test_many_bands_share_two_scratch_blocks(backend: CudaBackend) -> None:
    """More layers than fit at once: no band overwrites one that is still being copied."""
    base = numbers(40, 2, 512, 8, 16, seed=1)
    out = torch.full_like(base, GUARD)
    rotation = cpu.Rotations(ROPE, 600).into_place(50, 562)
    backend.writer([Job(out, base, rotation)])(range(40), out.nbytes)
    placed = reference.place(base, torch.arange(50, 562), ROPE)
    assert (out.double() - placed).norm() / placed.norm() <= 1e-6


def test_copies_stay_until_room_is_needed_or_their_host_tensor_goes(runtime: Runtime) -> None:
    base = [numbers(2, 2, 64, 2, 8, seed=i) for i in range(4)]
    size = base[0].nbytes
    tight = CudaBackend(runtime, "cuda:0", 5 * size)
    rotation = cpu.Rotations(ROPE, 64).into_place(0, 64)

    def write(kv: Tensor) -> Tensor:
        out = torch.empty_like(kv)
        tight.writer([Job(out, kv, rotation)])(range(2), out.nbytes)
        return out

    first = [write(kv) for kv in base[:3]]
    assert tight.resident.evictions == 0
    assert tight.resident.used_bytes == 3 * size
    assert torch.equal(write(base[0]), first[0])
    write(base[3])
    write(numbers(2, 2, 64, 2, 8, seed=9))
    assert tight.resident.evictions > 0
    assert torch.equal(write(base[1]), first[1])
    tight.resident.check()
    base.clear()
    gc.collect()
    assert tight.resident.used_bytes == 0


@pytest.mark.parametrize("memory", [1 << 40, 1000])
def test_a_full_device_is_a_typed_error(folder: Path, memory: int) -> None:
    """By budget, and by what the device has left."""
    small = HostRuntime(folder, size=memory)
    tight = CudaBackend(small, "cuda:0", 1000 if memory > 1000 else 1 << 30)
    base, out = numbers(2, 2, 64, 2, 8, seed=1), torch.full((2, 2, 64, 2, 8), GUARD)
    with pytest.raises(KVCacheError, match="device_bytes") as refused:
        tight.writer([Job(out, base, cpu.Rotations(ROPE, 64).into_place(0, 64))])(range(2), out.nbytes)
    assert refused.value.code is Code.QUOTA
    assert (out == GUARD).all()
    del refused
    gc.collect()
    assert tight.resident.used_bytes == 0


@pytest.mark.parametrize("pinnable", [True, False])
def test_what_cannot_be_pinned_is_counted(folder: Path, pinnable: bool) -> None:
    own = HostRuntime(folder, pinnable=pinnable)
    made, memory = CudaBackend(own, "cuda:0", 1000), torch.zeros(500, dtype=torch.uint8)
    made.pin(memory)
    assert made.gauges()["kvcache_pageable_bytes"] == (0 if pinnable else 500)
    assert own.pinned == ({memory.data_ptr()} if pinnable else set())
    made.unpin(memory)
    assert made.gauges()["kvcache_pageable_bytes"] == 0
    assert not own.pinned
