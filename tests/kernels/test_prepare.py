"""A model's loops are compiled when it is registered: no turn waits for a compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: other tests have compiled loops for other dtypes.
TURN = """
import sys
import torch
from kvcache_service.geometry import Pairing, Rope
from kvcache_service.kernels import cpu, loops
from kvcache_service.predictor import RidgeStatistics

dtype = getattr(torch, sys.argv[1])
rope = Rope("default", (1.0, 0.1), 1.0, Pairing.HALF_SPLIT, 4)
cpu.prepare(dtype, rope, 4)
compiled = lambda: {name: len(loop.signatures) for name, loop in vars(loops).items() if hasattr(loop, "signatures")}
before = compiled()
base = torch.randn(3, 2, 20, 2, 4).to(dtype)
statistics = RidgeStatistics()
statistics.add(base, base)
learned, rotation, out = statistics.map, cpu.Rotations(rope, 20).into_place(0, 20), torch.empty_like(base)
writes = [
    cpu.plain(out, base, rotation),
    cpu.blended(out, base, [base], [0.5], rotation),
    cpu.mapped(out, base, learned.weight, learned.bias, learned.lead, rotation),
]
cpu.write(writes, range(3), out.nbytes)
assert cpu.finite(out)
cpu.canonicalise([out], base, 0, [0], cpu.Rotations(rope, 20))
cpu.shift(base, 3, rope)
assert sum(before.values()), "nothing was compiled"
assert compiled() == before, (before, compiled())
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_turn_waits_for_a_compiler(dtype: str) -> None:
    subprocess.run([sys.executable, "-c", TURN, dtype], check=True)
