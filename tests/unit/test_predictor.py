"""The ridge predictor against a direct solution, and what it promises about its held-out error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcache_service.predictor import LEAD, MEMORY, RIDGE, RidgeStatistics, RunningMean

LAYERS, HEADS, DIM = 3, 2, 4


def draw(tokens: int, seed: int) -> Tensor:
    return torch.randn(LAYERS, 2, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def truth(base: Tensor) -> Tensor:
    """A linear offset with a bias and a jump at the first token."""
    matrix = 0.5 * torch.randn(LAYERS, 2, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(99))
    offset = torch.einsum("lcthd,lchde->lcthe", base, matrix) + 0.3
    offset[:, :, 0] += 2.0
    return offset


def test_solution_equals_the_normal_equations() -> None:
    samples = [(b := draw(20 + i, i), truth(b)) for i in range(3)]
    statistics = RidgeStatistics()
    for base, offset in samples:
        statistics.add(base, offset)
    layer, kv, head = 2, 1, 0
    rows, targets = [], []
    for base, offset in samples:
        x = base[layer, kv, :, head].double()
        lead = torch.zeros(len(x), LEAD, dtype=torch.float64)
        lead[range(LEAD), range(LEAD)] = 1.0
        rows.append(torch.cat([x, torch.ones(len(x), 1), lead], 1))
        targets.append(offset[layer, kv, :, head].double())
    x, y = torch.cat(rows), torch.cat(targets)
    gram = x.T @ x
    penalty = torch.ones(DIM + 1 + LEAD, dtype=torch.float64)
    penalty[:DIM] = RIDGE / 3 * gram.diagonal()[:DIM].mean() + 1e-9
    penalty[DIM] = 1e-6
    expected = torch.linalg.inv(gram + penalty.diag()) @ x.T @ y
    found = statistics.map
    assert found is not None
    torch.testing.assert_close(found.weight[layer, kv, head].double(), expected[:DIM], rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(found.bias[layer, kv, head].double(), expected[DIM], rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(found.lead[layer, kv, :, head].double(), expected[DIM + 1 :], rtol=2e-3, atol=1e-3)
    assert found.samples == 3


def test_order_of_samples_does_not_matter() -> None:
    samples = [(b := draw(18, i), truth(b)) for i in range(4)]
    one, other = RidgeStatistics(), RidgeStatistics()
    for base, offset in samples:
        one.add(base, offset)
    for base, offset in reversed(samples):
        other.add(base, offset)
    assert one.map is not None
    assert other.map is not None
    torch.testing.assert_close(one.map.weight, other.map.weight, rtol=5e-3, atol=2e-3)  # kept in float16


def test_held_out_error_falls_where_offsets_are_learnable_and_stays_where_they_are_noise() -> None:
    learnable, noise = RidgeStatistics(), RidgeStatistics()
    for seed in range(12):
        base = draw(40, seed)
        learnable.add(base, truth(base))
        noise.add(base, draw(40, 1000 + seed))
    assert learnable.error < 0.6
    assert noise.error > 0.95


def test_one_short_sample_is_not_singular() -> None:
    statistics = RidgeStatistics()
    statistics.add(draw(1, 0), draw(1, 1))
    assert statistics.map is not None
    assert torch.isfinite(statistics.map.weight).all()


def test_running_mean() -> None:
    mean = RunningMean()
    mean.add(torch.tensor([1.0, 3.0]))
    mean.add(torch.tensor([3.0, 7.0]))
    assert mean.mean().tolist() == [2.0, 5.0]
    assert mean.samples == 2
    with pytest.raises(AssertionError):
        RunningMean().mean()


def test_sums_at_rest_keep_what_the_solution_needs() -> None:
    """Features of very different size, as keys have them: float16 at rest against everything in float64."""
    scales = torch.tensor([100.0, 1.0, 0.05, 3.0])
    statistics = RidgeStatistics()
    gram = cross = 0.0
    for seed in range(40):
        base = draw(30, seed) * scales + scales  # a mean as large as the spread
        offset = truth(base)
        statistics.add(base, offset)
        x = base[1, 0, :, 1].double()
        lead = torch.zeros(len(x), LEAD, dtype=torch.float64)
        lead[range(LEAD), range(LEAD)] = 1.0
        x = torch.cat([x, torch.ones(len(x), 1), lead], 1)
        gram, cross = gram + x.T @ x, cross + x.T @ offset[1, 0, :, 1].double()
    penalty = torch.ones(DIM + 1 + LEAD, dtype=torch.float64)
    penalty[:DIM] = RIDGE / 40 * gram.diagonal()[:DIM].mean() + 1e-9
    penalty[DIM] = 1e-6
    exact = torch.linalg.solve(gram + penalty.diag(), cross)
    probe = draw(30, 999) * scales + scales
    expected = probe[1, 0, :, 1].double() @ exact[:DIM] + exact[DIM]
    found = statistics.map
    assert found is not None
    got = probe[1, 0, :, 1].double() @ found.weight[1, 0, 1].double() + found.bias[1, 0, 1].double()
    assert float((got - expected).norm() / expected.norm()) < 5e-3
    fields = (DIM + 1 + LEAD) * (DIM + 1 + LEAD + 1) // 2 + (DIM + 1 + LEAD) * DIM
    assert statistics.nbytes < LAYERS * 2 * HEADS * fields * 4, "map and sums together take less than float32 sums alone"


def middle(kv: Tensor) -> Tensor:
    return kv[len(kv) // 2]


def test_novelty_tells_a_foreign_sample_from_more_of_the_same() -> None:
    statistics = RidgeStatistics()
    narrow = torch.tensor([1.0, 1.0, 0.02, 0.02])  # the slot's samples hardly move in two directions
    for seed in range(20):
        base = draw(40, seed) * narrow
        statistics.add(base, truth(base))
    assert statistics.map is not None
    same = [statistics.map.novelty(middle(draw(40, 100 + seed) * narrow)) for seed in range(5)]
    foreign = [statistics.map.novelty(middle(draw(40, 200 + seed))) for seed in range(5)]
    assert max(same) < 1.5
    assert min(foreign) > 3 * max(same)


def test_old_samples_fade() -> None:
    """After a change of the world the map follows, however many samples came before."""
    statistics = RidgeStatistics()
    flipped = RidgeStatistics()
    for seed in range(MEMORY + 40):
        base = draw(2, seed)
        statistics.add(base, truth(base))
    for seed in range(4 * MEMORY):
        base = draw(2, 5000 + seed)
        statistics.add(base, -truth(base))
        flipped.add(base, -truth(base))
    assert statistics.map is not None
    assert flipped.map is not None
    difference = (statistics.map.weight.float() - flipped.map.weight.float()).norm() / flipped.map.weight.float().norm()
    assert float(difference) < 0.2


def test_rounding_at_rest_never_stops_a_slot() -> None:
    """Large dimensions that move together, as keys have them: their moments are singular to within float16."""
    statistics = RidgeStatistics()
    mix = torch.zeros(3, 64)
    mix[:, :12] = 50 * torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    for seed in range(40):
        source = torch.Generator().manual_seed(seed)
        common = 1.0 + 0.3 * torch.randn(LAYERS, 2, 30, HEADS, 3, generator=source)
        base = common @ mix + 1e-3 * torch.randn(LAYERS, 2, 30, HEADS, 64, generator=source)
        statistics.add(base, 0.1 * base)
    assert statistics.map is not None
    assert torch.isfinite(statistics.map.weight).all()
    assert torch.isfinite(statistics.map.precision).all()
    assert statistics.error < 0.1, "the offset is learnable all the same"
    assert statistics.map.novelty(middle(base)) > 0
