"""Session buffers: private files, bounded, reused, and gone with their service."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.tiers.shared import BufferPool, SharedDirectory


def test_files_are_private_and_vanish(tmp_path: Path) -> None:
    directory = SharedDirectory(tmp_path, "boot")
    pool = BufferPool(directory, 64 << 20)
    buffer = pool.take(1000)
    assert stat.S_IMODE(Path(buffer.path).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    pool.close()
    assert not Path(buffer.path).exists()
    directory.close()
    assert list(tmp_path.iterdir()) == []


def test_both_sides_see_the_same_bytes(tmp_path: Path) -> None:
    directory = SharedDirectory(tmp_path, "boot")
    buffer = BufferPool(directory, 64 << 20).take(64)
    buffer.view((2, 8), torch.float32)[1, 7] = 3.0
    assert Path(buffer.path).read_bytes()[60:64] == b"\x00\x00\x40\x40"
    directory.close()


@pytest.mark.parametrize("kind", ["shared", "private"])
def test_buffers_are_reused_and_bounded(kind: str, tmp_path: Path) -> None:
    directory = SharedDirectory(tmp_path, "boot")
    pool = BufferPool(directory if kind == "shared" else None, 20 << 20)
    first = pool.take(5 << 20)
    pool.give_back(first)
    assert pool.take(6 << 20) is first
    second = pool.take(10 << 20)
    with pytest.raises(KVCacheError) as error:
        pool.take(5 << 20)
    assert error.value.code is Code.QUOTA
    pool.give_back(second)
    pool.discard(first)
    assert pool.take(12 << 20) is second
    directory.close()


def test_a_dead_service_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "kvcache-dead").mkdir()
    (tmp_path / "kvcache-dead" / ".lock").touch()
    (tmp_path / "kvcache-dead" / "x.kv").write_bytes(b"old")
    living = SharedDirectory(tmp_path, "alive")
    other = SharedDirectory(tmp_path, "newer")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kvcache-alive", "kvcache-newer"]
    living.close()
    other.close()
