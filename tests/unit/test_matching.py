"""KVCOMM Eq. 5 to 7 with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvcache_service import matching
from kvcache_service.kernels import cpu


def test_weights_are_the_softmax_of_negative_distances() -> None:
    match = matching.match(torch.tensor([0.0, math.log(2.0), math.log(4.0)]), entries=1)
    assert match.weights == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    entropy = -(4 / 7 * math.log(4 / 7) + 2 / 7 * math.log(2 / 7) + 1 / 7 * math.log(1 / 7))
    assert match.entropy == pytest.approx(entropy)
    assert match.limit == pytest.approx(0.3 * math.log(3))


def test_gate_accepts_what_stands_out_only() -> None:
    assert matching.match(torch.tensor([0.0, 9.0, 9.0]), entries=1).decisive
    assert not matching.match(torch.tensor([1.0, 1.0, 1.0]), entries=1).decisive


def test_gate_sees_the_raw_norm_and_the_blend_the_rms() -> None:
    match = matching.match(torch.tensor([0.0, 0.09, 0.09]), entries=10_000)
    assert match.decisive
    assert max(match.weights) < 0.4


def test_one_candidate_is_always_decisive() -> None:
    match = matching.match(torch.tensor([5.0]), entries=4)
    assert match.weights == (1.0,)
    assert match.decisive


def test_distance_is_rms_over_the_sample_length() -> None:
    base = torch.zeros(2, 2, 3, 1, 4)
    longer = torch.full((2, 2, 5, 1, 4), 2.0)
    longer[:, :, 3:] = 1e6  # beyond the sample: must not count
    assert cpu.distances(base, [longer]).tolist() == pytest.approx([2.0])
