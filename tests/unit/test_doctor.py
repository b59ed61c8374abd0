"""`kvcache doctor`: what it finds, and the fix and the exit status where something is off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcache_service.cli import app


def run(monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[int, dict[str, Any]]:
    for name, value in settings.items():
        monkeypatch.setenv(f"KVCACHE_{name.upper()}", str(value))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    return result.exit_code, {finding["name"]: finding for finding in json.loads(result.output)}


def test_all_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str) -> None:
    places = {"shared_memory_dir": tmp_path, "disk_dir": tmp_path / "kv"}
    status, found = run(monkeypatch, session_bytes=1000, disk_bytes=1000, redis_url=redis_url, **places)
    assert status == 0, found
    assert found.keys() >= {"python", "torch", "settings", "device", "host memory", "shared memory", "metadata store", "disk"}
    assert "answers" in found["metadata store"]["found"]
    assert not (tmp_path / "kv").exists(), "looking changes nothing"


@pytest.mark.parametrize(
    ("name", "settings", "fix"),
    [
        ("settings", {"hots_bytes": 1}, "KVCACHE_"),
        ("settings", {"listen": "0.0.0.0:50051"}, "KVCACHE_"),
        ("device", {"device": "cuda"}, "KVCACHE_DEVICE=cpu"),
        ("host memory", {"host_bytes": 1 << 60}, "KVCACHE_HOST_BYTES"),
        ("shared memory", {"session_bytes": 1 << 60}, "KVCACHE_SESSION_BYTES"),
        ("shared memory", {"shared_memory_dir": "/nowhere/at/all"}, "KVCACHE_SHARED_MEMORY_DIR"),
        ("metadata store", {"redis_url": "redis://127.0.0.1:1/0"}, "KVCACHE_REDIS_URL"),
        ("disk", {"disk_dir": "/proc/version/kv"}, "KVCACHE_DISK_DIR"),
        ("disk", {"disk_dir": "here", "disk_bytes": 1 << 60}, "KVCACHE_DISK_BYTES"),
    ],
)
def test_what_is_off_comes_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, settings: dict[str, object], fix: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.chdir(tmp_path)
    status, found = run(monkeypatch, **settings)
    assert status == 1
    assert fix in found[name]["fix"]


def test_it_is_read_by_people_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_HOST_BYTES", str(1 << 60))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "fix: lower KVCACHE_HOST_BYTES" in result.output
