"""Rotation against transformers' own modules, exact algebra in float64, and the CPU backend against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, GlmConfig, LlamaConfig, PhiConfig
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.phi import modeling_phi

from kvcache_service.geometry import Pairing, Rope
from kvcache_service.kernels import cpu, reference

DIM = 32
LLAMA: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": DIM, "max_position_embeddings": 512}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
}


def rope_of(rotary: Any, pairing: Pairing) -> Rope:
    inv_freq = tuple(rotary.inv_freq.double().tolist())
    return Rope(rotary.rope_type, inv_freq, float(rotary.attention_scaling), pairing, 2 * len(inv_freq))


def keys(tokens: int, heads: int = 2, dim: int = DIM, seed: int = 1) -> Tensor:
    return torch.randn(1, tokens, heads, dim, generator=torch.Generator().manual_seed(seed))


def as_kv(key: Tensor) -> Tensor:
    """[1, 2, tokens, heads, dim] with the keys also as values, to see that values stay."""
    return torch.stack([key, key], 1)


@pytest.mark.parametrize("name", ROPES)
def test_llama_family_matches_transformers(name: str) -> None:
    rotary = modeling_llama.LlamaRotaryEmbedding(LlamaConfig(**LLAMA, rope_parameters=ROPES[name]))
    positions = torch.tensor([0, 1, 7, 100, 300])
    key = keys(5)
    cos, sin = rotary(key, positions[None])
    _, expected = modeling_llama.apply_rotary_pos_emb(key.transpose(1, 2), key.transpose(1, 2), cos, sin)
    placed = reference.place(as_kv(key), positions, rope_of(rotary, Pairing.HALF_SPLIT))
    torch.testing.assert_close(placed[:, 0].float(), expected.transpose(1, 2), rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(placed[:, 1].float(), key, rtol=0, atol=0)
    if name == "yarn":
        assert rotary.attention_scaling > 1.0


def test_partial_rotation_matches_transformers() -> None:
    config = PhiConfig(hidden_size=128, num_attention_heads=4, partial_rotary_factor=0.5, max_position_embeddings=512)
    rotary = modeling_phi.PhiRotaryEmbedding(config)
    rope = rope_of(rotary, Pairing.HALF_SPLIT)
    assert rope.rotary_dim == DIM // 2
    positions = torch.tensor([3, 250])
    key = keys(2)
    cos, sin = rotary(key, positions[None])
    rotated = key.transpose(1, 2)[..., : rope.rotary_dim]
    _, expected = modeling_phi.apply_rotary_pos_emb(rotated, rotated, cos, sin)
    placed = reference.place(as_kv(key), positions, rope)[:, 0].float()
    torch.testing.assert_close(placed[..., : rope.rotary_dim], expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert torch.equal(placed[..., rope.rotary_dim :], key[..., rope.rotary_dim :])


@pytest.mark.parametrize(
    ("config", "module", "embedding"),
    [
        (CohereConfig(hidden_size=128, num_attention_heads=4), modeling_cohere, "CohereRotaryEmbedding"),
        (GlmConfig(hidden_size=128, num_attention_heads=4, head_dim=DIM), modeling_glm, "GlmRotaryEmbedding"),
    ],
    ids=["cohere", "glm"],
)
def test_interleaved_matches_transformers(config: Any, module: Any, embedding: str) -> None:
    rotary = getattr(module, embedding)(config)
    positions = torch.tensor([0, 5, 77])
    key = keys(3)
    cos, sin = rotary(key, positions[None])
    _, expected = module.apply_rotary_pos_emb(key.transpose(1, 2), key.transpose(1, 2), cos, sin)
    placed = reference.place(as_kv(key), positions, rope_of(rotary, Pairing.INTERLEAVED))
    torch.testing.assert_close(placed[:, 0].float(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


ROPE_STRATEGY = st.builds(
    lambda pairs, extra, scaling, pairing: (
        Rope("default", tuple(10000.0 ** (-i / pairs) for i in range(pairs)), scaling, pairing, 2 * pairs),
        2 * pairs + extra,
    ),
    st.integers(1, 9),
    st.integers(0, 5),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from(list(Pairing)),
)


@given(ROPE_STRATEGY, st.integers(1, 7), st.integers(1, 3), st.integers(-5000, 5000))
@settings(deadline=None, max_examples=40)
def test_canonical_frame_is_one_frame(rope_dim: tuple[Rope, int], tokens: int, heads: int, shift: int) -> None:
    """Taking out at n and placing at n + shift equals rotating by shift; there and back again is the identity."""
    rope, dim = rope_dim
    kv = as_kv(keys(tokens, heads, dim)).double()
    positions = torch.arange(tokens) + 11
    canonical = reference.canonicalise(kv, positions, rope)
    torch.testing.assert_close(reference.place(canonical, positions, rope), kv, rtol=1e-12, atol=1e-12)
    moved = reference.place(canonical, positions + shift, rope)[:, 0]
    direct = reference.rotate(kv[:, 0], torch.full((tokens,), shift), rope)
    torch.testing.assert_close(moved, direct, rtol=1e-9, atol=1e-9)


@given(
    ROPE_STRATEGY,
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)]),
    st.sampled_from([0, 1 << 30]),
)
@settings(deadline=None, max_examples=60)
def test_cpu_backend_matches_float64(
    rope_dim: tuple[Rope, int], tokens: int, heads: int, precision: tuple[torch.dtype, float], size: int
) -> None:
    """Every source, on a buffer with guard columns that must stay untouched; on one thread and on all."""
    rope, dim = rope_dim
    dtype, tolerance = precision
    layers = 2
    draw = torch.Generator().manual_seed(tokens * 31 + heads)
    base = torch.randn(layers, 2, tokens, heads, dim, generator=draw).to(dtype)
    offsets = [torch.randn(layers, 2, tokens + i, heads, dim, generator=draw).to(dtype) for i in range(3)]
    weights = [0.5, 0.3, 0.2]
    weight = torch.randn(layers, 2, heads, dim, dim, generator=draw) * 0.1 + torch.eye(dim)
    bias = torch.randn(layers, 2, heads, dim, generator=draw)
    lead = torch.randn(layers, 2, 4, heads, dim, generator=draw)
    positions = torch.arange(tokens) + 1000

    lead_full = torch.zeros(layers, 2, tokens, heads, dim)
    lead_full[:, :, : min(4, tokens)] = lead[:, :, : min(4, tokens)]
    mapped = reference.linear(base, weight, bias[:, :, None] + lead_full)
    blended = reference.blend(base, offsets, torch.tensor(weights))
    for expected in (mapped, blended):
        expected[0] = base[0].double()  # layer 0 stays at base
    rotation = cpu.Rotations(rope, int(positions.max()) + 1).to(positions.tolist())
    cases = [
        (lambda out: cpu.plain(out, base, rotation), base.double()),
        (lambda out: cpu.blended(out, base, offsets, weights, rotation), blended),
        (lambda out: cpu.mapped(out, base, weight, bias, lead, rotation), mapped),
    ]
    for prepared, expected in cases:
        out = torch.full((layers, 2, tokens + 2, heads, dim), -777.0, dtype=dtype)
        cpu.write([prepared(out[:, :, 1:-1])], range(layers), size)
        placed = reference.place(expected, positions, rope)
        error = (out[:, :, 1:-1].double() - placed).norm() / placed.norm()
        assert error <= tolerance
        assert (out[:, :, 0] == -777.0).all()
        assert (out[:, :, -1] == -777.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_long_segment_is_corrected_in_tiles(dtype: torch.dtype) -> None:
    """More tokens than one matrix product takes, on every layer and core: biases of leading tokens stay where they belong."""
    rope = Rope("default", (1.0, 0.1, 0.01, 0.001), 1.0, Pairing.HALF_SPLIT, 8)
    layers, tokens, heads, dim = 3, 9000, 2, 8
    draw = torch.Generator().manual_seed(3)
    base = torch.randn(layers, 2, tokens, heads, dim, generator=draw).to(dtype)
    weight, bias = torch.randn(layers, 2, heads, dim, dim, generator=draw), torch.randn(layers, 2, heads, dim, generator=draw)
    lead = torch.randn(layers, 2, 5, heads, dim, generator=draw)
    places = bias[:, :, None].expand(-1, -1, tokens, -1, -1).clone()
    places[:, :, :5] += lead
    expected = reference.linear(base, weight, places)
    expected[0] = base[0].double()
    out = torch.empty_like(base)
    rotation = cpu.Rotations(rope, tokens).into_place(0, tokens)
    cpu.write([cpu.mapped(out, base, weight, bias, lead, rotation)], range(layers), out.nbytes)
    placed = reference.place(expected, torch.arange(tokens), rope)
    error = (out.double() - placed).norm(dim=(-1, -2)) / placed.norm(dim=(-1, -2)).clamp_min(1e-3)
    assert error.max() <= {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize("size", [0, 1 << 30])
@pytest.mark.parametrize("tokens", [0, 5])
def test_layers_are_written_in_ranges(tokens: int, size: int) -> None:
    """What lies outside the range stays; an empty segment writes nothing."""
    rope = Rope("default", (1.0, 0.1), 1.0, Pairing.HALF_SPLIT, 4)
    draw = torch.Generator().manual_seed(7)
    base = torch.randn(9, 2, 5, 1, 4, generator=draw)[:, :, :tokens]
    terms = [torch.randn(9, 2, *shape, generator=draw) for shape in ((1, 4, 4), (1, 4), (2, 1, 4))]
    rotation = cpu.Rotations(rope, 5).into_place(0, 5)
    for source in (lambda out: cpu.mapped(out, base, *terms, rotation), lambda out: cpu.plain(out, base, rotation)):
        whole, ranges = torch.zeros(2, 9, 2, 6, 1, 4)
        cpu.write([source(whole[:, :, :tokens])], range(9), size)
        assert bool(whole.any()) == (tokens > 0)
        for layers in (range(4), range(4, 5), range(5, 9)):
            assert (ranges[layers.start :] == 0).all()
            cpu.write([source(ranges[:, :, :tokens])], layers, size)
            torch.testing.assert_close(ranges[: layers.stop], whole[: layers.stop], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_keep_their_bits(dtype: torch.dtype) -> None:
    rope = Rope("default", (1.0,), 1.0, Pairing.HALF_SPLIT, 2)
    kv = torch.tensor([-0.0, float("nan"), -float("inf"), 1.0], dtype=dtype).repeat(2).reshape(1, 2, 2, 1, 2)
    out = torch.empty_like(kv)
    cpu.write([cpu.plain(out, kv, cpu.Rotations(rope, 2).into_place(0, 2))], range(1), 0)
    assert out[:, 1].view(torch.uint8).equal(kv[:, 1].view(torch.uint8))


def test_tokens_must_lie_side_by_side() -> None:
    """The loops go by the first element and the steps of layers and parts alone."""
    rotation = cpu.Rotation.by(Rope("default", (1.0,), 1.0, Pairing.HALF_SPLIT, 2), 1, 2)
    kv = torch.zeros(1, 2, 2, 2, 2)
    with pytest.raises(ValueError, match="side by side"):
        cpu.plain(torch.empty_like(kv), kv.transpose(2, 3), rotation)


def test_rounding_is_to_nearest_even() -> None:
    """All 16-bit patterns survive, and float32 values round as torch rounds them; NaN stays NaN."""
    rope = Rope("default", (0.0,), 1.0, Pairing.HALF_SPLIT, 2)
    draw = torch.Generator().manual_seed(5)
    wide = torch.randn(1, 2, 4096, 1, 2, generator=draw) * torch.logspace(-6, 4, 4096)[:, None, None]
    wide[0, 1, 0, 0, 0] = float("nan")
    rotation = cpu.Rotation.by(rope, 0, 4096)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty_like(wide, dtype=dtype)
        cpu.write([cpu.plain(out, wide, rotation)], range(1), 0)
        torch.testing.assert_close(out, wide.to(dtype), rtol=0, atol=0, equal_nan=True)
        again = torch.empty_like(out)
        cpu.write([cpu.plain(again, out, rotation)], range(1), 0)
        torch.testing.assert_close(again, out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, spoilt: float) -> None:
    kv = torch.full((3, 1001), torch.finfo(dtype).max, dtype=dtype)
    kv[1] *= -1
    assert cpu.finite(kv)
    assert cpu.finite(torch.empty(0, dtype=dtype))
    kv[2, 777] = spoilt
    assert not cpu.finite(kv)


def test_canonicalise_on_cpu_matches_float64() -> None:
    rope = Rope("yarn", (1.0, 0.1, 0.01), 1.2, Pairing.HALF_SPLIT, 6)
    kv = as_kv(keys(5, 2, 8))
    positions = torch.arange(5) + 40
    first, second = torch.empty_like(kv[:, :, :2]), torch.empty_like(kv[:, :, 2:])
    cpu.canonicalise([first, second], kv, 40, [40, 42], cpu.Rotations(rope, 45))
    got = torch.cat([first, second], 2).double()
    torch.testing.assert_close(got, reference.canonicalise(kv, positions, rope), rtol=1e-5, atol=1e-6)


def test_positions_beyond_the_tables_are_refused() -> None:
    """The loops read a rotation for every token, whatever there is."""
    rotations = cpu.Rotations(Rope("default", (1.0,), 1.0, Pairing.HALF_SPLIT, 2), 8)
    assert len(rotations.into_place(5, 8).cos) == 3
    for start, end in ((5, 9), (-1, 3)):
        for turned in (rotations.into_place, rotations.out_of_place):
            with pytest.raises(ValueError, match="of 8"):
                turned(start, end)


def test_a_whole_model_agrees_after_a_move(model: AutoModelForCausalLM) -> None:
    """Layer 0 keys of a token at two positions are the same position-free key: the frame is the model's own."""
    rotary = model.model.rotary_emb
    rope = rope_of(rotary, Pairing.HALF_SPLIT)
    with torch.no_grad():
        caches = [model(torch.tensor([ids])).cache for ids in ([5, 6, 7], [9, 9, 9, 9, 5, 6, 7])]
    found = [torch.stack([c.layers[0].keys[0], c.layers[0].values[0]]).transpose(1, 2)[None] for c in caches]
    short = reference.canonicalise(found[0], torch.arange(3), rope)
    long = reference.canonicalise(found[1][:, :, 4:], torch.arange(4, 7), rope)
    torch.testing.assert_close(short, long, rtol=1e-4, atol=1e-5)
