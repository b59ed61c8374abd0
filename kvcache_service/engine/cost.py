"""Predict what a turn costs, from the timings that workers report."""

from __future__ import annotations

import torch
from torch import Tensor

_MIN_REPORTS = 6
_DECAY = 0.98


class CostModel:
    """Seconds of a forward ≈ a + b·fresh + c·fresh·context, by decayed least squares; overhead ≈ d per fetched byte.

    Says nothing (0.0) before enough reports of different sizes have come in: an unknown cost never forbids reuse.
    """

    def __init__(self) -> None:
        self._gram = torch.zeros(3, 3, dtype=torch.float64)
        self._cross = torch.zeros(3, dtype=torch.float64)
        self._reports = 0
        self._overhead_per_byte = 0.0

    def report(self, fresh: int, context: int, forward_seconds: float, fetched_bytes: int, overhead_seconds: float) -> None:
        """One settled turn. context: prompt tokens."""
        row = _row(fresh, context)
        self._gram = self._gram * _DECAY + torch.outer(row, row)
        self._cross = self._cross * _DECAY + row * forward_seconds
        self._reports += 1
        if fetched_bytes:
            share = overhead_seconds / fetched_bytes
            self._overhead_per_byte = share if not self._overhead_per_byte else 0.8 * self._overhead_per_byte + 0.2 * share

    def predict(self, fresh: int, context: int, fetched_bytes: int) -> float:
        """TTFT in seconds; 0.0 when unknown."""
        if self._reports < _MIN_REPORTS:
            return 0.0
        ridge = 1e-6 * self._gram.diagonal().clamp_min(1e-12).diag()
        weights = torch.linalg.solve(self._gram + ridge, self._cross)
        return max(0.0, float(weights @ _row(fresh, context))) + self._overhead_per_byte * fetched_bytes


def _row(fresh: int, context: int) -> Tensor:
    return torch.tensor([1.0, fresh, fresh * context / 1000.0], dtype=torch.float64)
