"""Coded KV: its numbers by hand, the bound on its error, and the CPU backend against float64 with the same scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_service.geometry import Geometry, Pairing, Rope
from kvcache_service.kernels import codec, cpu, reference
from kvcache_service.kernels.codec import KV, Codec, Coded
from tests.kernels.test_rope import ROPE_STRATEGY

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
ROPE = Rope("default", (1.0, 0.1), 1.0, Pairing.HALF_SPLIT, 4)


def model(layers: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Geometry:
    turning = Rope("default", (1.0,), 1.0, Pairing.HALF_SPLIT, 2)
    return Geometry("m", layers, heads, dim, dtype, turning, bytes(32), bytes(32), 100, 100)


def coded(kv: Tensor, kind: Codec) -> Coded:
    layers, _, _, heads, dim = kv.shape
    found = codec.opened(codec.encode(kv, kind), model(layers, heads, dim, kv.dtype))
    assert isinstance(found, Coded)
    return found


def in_float64(kv: KV) -> Tensor:
    if not isinstance(kv, Coded):
        return kv.double()
    keys = kv.key_scales[:, None].expand_as(kv.codes[:, 0])
    scales = torch.stack([keys, kv.value_scales[..., None].expand_as(kv.codes[:, 1])], 1)
    return kv.codes.double() * scales.double()


def test_int8_by_hand() -> None:
    """One scale per channel of K over its tokens, one per token of V; halves go to the even code."""
    keys = torch.tensor([[127.0, 0.5], [2.5, -0.25], [3.5, 0.0]])
    values = torch.tensor([[-254.0, 3.0], [0.0, 0.0], [1.0, 127.0]])
    found = coded(torch.stack([keys, values])[None, :, :, None], Codec.INT8)
    assert found.codes[0, 0, :, 0].tolist() == [[127, 127], [2, -64], [4, 0]]
    assert found.key_scales.flatten().tolist() == pytest.approx([1.0, 0.5 / 127])
    assert found.codes[0, 1, :, 0].tolist() == [[-127, 2], [0, 0], [1, 127]]
    assert found.value_scales.flatten().tolist()[::2] == [2.0, 1.0]
    assert found.decode()[0, 1, :, 0].tolist() == [[-254.0, 4.0], [0.0, 0.0], [1.0, 127.0]]


def test_fp8_by_hand() -> None:
    values = torch.tensor([[448.0, 17.0, 19.0, 2.0**-9], [0.0, 1.0, -448.0, 3 * 2.0**-11]])
    found = coded(torch.stack([values, values])[None, :, :, None], Codec.FP8)
    assert found.value_scales.flatten().tolist() == [1.0, 1.0]
    assert found.codes[0, 1, :, 0].float().tolist() == [[448.0, 16.0, 20.0, 2.0**-9], [0.0, 1.0, -448.0, 2.0**-9]]


@pytest.mark.parametrize("kind", Codec)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_the_error_is_bounded_by_the_scale(kind: Codec, dtype: torch.dtype, tokens: int) -> None:
    """Also where one channel of keys is a thousand times larger than the others: it costs them nothing."""
    kv = torch.randn(3, 2, tokens, 2, 5, generator=torch.Generator().manual_seed(tokens))
    kv[:, 0, :, :, 3] *= 1000
    kv = kv.to(dtype)
    before = kv.clone()
    found = coded(kv, kind)
    assert torch.equal(kv, before)
    assert torch.equal(found.key_scales, kv[:, 0].float().abs().amax(1) / kind.value[1])
    assert torch.equal(found.value_scales, kv[:, 1].float().abs().amax(-1) / kind.value[1])
    scale = in_float64(Coded(torch.ones_like(found.codes), found.key_scales, found.value_scales, dtype))
    error, exact = (in_float64(found) - kv.double()).abs(), kv.double().abs()
    half_step = 0.5 * scale if kind is Codec.INT8 else torch.maximum(exact / 16, scale * 2.0**-10)
    assert bool((error <= half_step * 1.00001).all())
    torch.testing.assert_close(found.decode().double(), in_float64(found), rtol=TOLERANCE[dtype], atol=0)
    assert torch.equal(cpu.decoded(found), found.decode())
    assert torch.equal(cpu.decoded(codec.layer(found, 2)), found.decode()[2:])
    places = torch.tensor([0, tokens - 1])
    assert torch.equal(cpu.decoded(codec.at(found, places)), found.decode()[:, :, places])


@pytest.mark.parametrize("kind", Codec)
def test_the_smallest_numbers_and_nothing(kind: Codec) -> None:
    tiny = coded(torch.full((1, 2, 2, 1, 2), 1e-44), kind)
    assert torch.isfinite(tiny.decode()).all()
    assert (coded(torch.zeros(1, 2, 2, 1, 2), kind).decode() == 0).all()
    assert coded(torch.zeros(2, 2, 0, 1, 2), kind).shape == (2, 2, 0, 1, 2)


@pytest.mark.parametrize("kind", Codec)
def test_a_blob_is_flat_and_a_quarter_of_float32(kind: Codec) -> None:
    blob = codec.encode(torch.randn(3, 2, 100, 2, 32), kind)
    assert blob.dim() == 1
    assert blob.dtype is kind.value[0]
    assert blob.nbytes == 3 * 2 * 100 * 2 * 32 + 4 * 3 * 2 * (32 + 100)
    raw = torch.zeros(3, 2, 100, 2, 32)
    assert codec.opened(raw, model(3, 2, 32)) is raw


def test_every_fp8_code_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).reshape(1, 1, 127, 1, 2).repeat(1, 2, 1, 1, 1)
    kv = Coded(codes, torch.ones(1, 1, 2), torch.ones(1, 127, 1), torch.float32)
    out = torch.empty(codes.shape)
    rotation = cpu.Rotation.by(Rope("default", (1.0,), 1.0, Pairing.HALF_SPLIT, 2), 0, 127)
    cpu.write([cpu.plain(out, kv, rotation)], range(1), 0)
    assert torch.equal(out, codes.float())


KINDS = [(torch.bfloat16, Codec.INT8), (torch.float32, Codec.FP8)]


@given(ROPE_STRATEGY, st.integers(1, 60), st.integers(1, 3), st.sampled_from(KINDS), st.booleans(), st.sampled_from([0, 1 << 30]))
@settings(deadline=None, max_examples=40)
def test_cpu_backend_reads_codes(
    rope_dim: tuple[Rope, int], tokens: int, heads: int, kind: tuple[torch.dtype, Codec], raw_base: bool, size: int
) -> None:
    """Every source with the same scales in float64, on a buffer whose guard columns must stay; on one thread and on all."""
    rope, dim = rope_dim
    dtype, coding = kind
    layers, weights = 3, [0.5, 0.3, 0.2]
    draw = torch.Generator().manual_seed(tokens * 31 + heads)
    stored = torch.randn(layers, 2, tokens, heads, dim, generator=draw).to(dtype)
    base: KV = stored if raw_base else coded(stored, coding)
    offsets = [coded(torch.randn(layers, 2, tokens + i, heads, dim, generator=draw).to(dtype), coding) for i in range(3)]
    weight = torch.randn(layers, 2, heads, dim, dim, generator=draw) * 0.1
    bias = torch.randn(layers, 2, heads, dim, generator=draw)
    positions = torch.arange(tokens) + 1000
    rotation = cpu.Rotations(rope, int(positions.max()) + 1).to(positions.tolist())
    exact = in_float64(base)
    mapped = reference.linear(exact, weight, bias[:, :, None])
    blended = reference.blend(exact, [in_float64(o) for o in offsets], torch.tensor(weights))
    for expected in (mapped, blended):
        expected[0] = exact[0]  # layer 0 stays at base
    cases = [
        (lambda out: cpu.plain(out, base, rotation), exact),
        (lambda out: cpu.blended(out, base, offsets, weights, rotation), blended),
        (lambda out: cpu.mapped(out, base, weight, bias, torch.zeros(layers, 2, 0, heads, dim), rotation), mapped),
    ]
    for prepared, expected in cases:
        out = torch.full((layers, 2, tokens + 2, heads, dim), -777.0, dtype=dtype)
        cpu.write([prepared(out[:, :, 1:-1])], range(layers), size)
        placed = reference.place(expected, positions, rope)
        assert (out[:, :, 1:-1].double() - placed).norm() / placed.norm() <= TOLERANCE[dtype]
        assert (out[:, :, 0] == -777.0).all()
        assert (out[:, :, -1] == -777.0).all()


def test_offsets_of_several_kinds_are_added_up() -> None:
    """As after a change of the setting, where a disk still holds what the earlier one wrote."""
    draw = torch.Generator().manual_seed(3)
    base, *raw = (torch.randn(2, 2, 5 + i, 1, 4, generator=draw).bfloat16() for i in range(4))
    offsets: list[KV] = [raw[0], coded(raw[1], Codec.INT8), coded(raw[2], Codec.FP8)]
    expected = reference.blend(base, [in_float64(o) for o in offsets], torch.tensor([0.5, 0.25, 0.25]))
    expected[0] = base[0].double()
    out = torch.empty_like(base)
    positions = torch.arange(5)
    rotation = cpu.Rotations(ROPE, int(positions.max()) + 1).to(positions.tolist())
    cpu.write([cpu.blended(out, base, offsets, [0.5, 0.25, 0.25], rotation)], range(2), 0)
    placed = reference.place(expected, positions, ROPE)
    assert (out.double() - placed).norm() / placed.norm() <= 4e-3
