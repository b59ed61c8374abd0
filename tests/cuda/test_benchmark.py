"""benchmarks/gpu.py on small shapes: the same code, so that it does not fail first where time on a device is dear."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_it_runs_dry(tmp_path: Path) -> None:
    out, picture = tmp_path / "gpu.json", tmp_path / "gpu.png"
    command = ["-c", "import runpy, sys; sys.path.insert(0, '.'); runpy.run_path('benchmarks/gpu.py', run_name='__main__')"]
    subprocess.run([sys.executable, *command, "--dry", "--json", str(out), "--png", str(picture)], cwd=ROOT, check=True)
    found = json.loads(out.read_text())
    assert found["dry"]
    assert all(error < 4e-3 for errors in found["errors"].values() for error in errors.values())
    assert {row["bench"] for row in found["rows"]} == {"kernel", "fetch"}
    assert picture.stat().st_size > 1000
