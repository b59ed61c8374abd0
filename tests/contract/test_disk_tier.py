"""The disk tier's contract: whole blobs or none, within the budget, across restarts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvcache_service.tiers.disk import DiskTier

BUDGET = 1 << 20


def blob(seed: int, count: int = 1000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    opened = DiskTier(tmp_path / "kv", BUDGET)
    yield opened
    opened.close()


def reopened(tier: DiskTier, budget: int = BUDGET) -> DiskTier:
    """Closing waits for the writer."""
    tier.close()
    return DiskTier(tier.directory, budget)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_blob_survives_a_restart_bit_by_bit(tier: DiskTier, dtype: torch.dtype) -> None:
    value = blob(1, dtype=dtype).view(2, 5, 100)
    tier.offer("a", value)
    again = reopened(tier)
    found = again.get("a")
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    assert again.get("b") is None
    again.close()


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data.replace(b'"key": "a"', b'"key": "b"'),
        lambda data: data.replace(b"[1000]", b"[1001]"),
    ],
    ids=["byte lost", "half lost", "header torn", "empty", "bit flipped", "other key", "other shape"],
)
def test_a_damaged_file_is_a_miss_and_goes(tier: DiskTier, harm: object) -> None:
    tier.offer("a", blob(1))
    again = reopened(tier)
    [path] = again.directory.glob("*.kv")
    path.write_bytes(harm(path.read_bytes()))  # type: ignore[operator]
    assert again.get("a") is None
    assert again.damaged == 1
    assert not again.has("a")
    assert not path.exists()
    again.check()
    again.close()


def test_an_unfinished_file_is_never_seen(tier: DiskTier) -> None:
    tier.offer("a", blob(1))
    tier.close()
    [path] = tier.directory.glob("*.kv")
    path.rename(path.with_name(path.name + ".tmp"))
    again = DiskTier(tier.directory, BUDGET)
    assert again.get("a") is None
    assert [p.name for p in again.directory.iterdir()] == [".lock"]
    again.close()


def test_the_least_recently_used_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 3 * 4200)
    for seed, key in enumerate("abc"):
        tier.offer(key, blob(seed))
    again = reopened(tier, 3 * 4200)
    assert again.get("a") is not None
    again.offer("d", blob(9))
    again = reopened(again, 3 * 4200)
    assert [key for key in "abcd" if again.has(key)] == ["a", "c", "d"]
    again.check()
    again = reopened(again, 4200)
    assert [key for key in "abcd" if again.has(key)] == ["d"]
    again.close()


def test_what_does_not_fit_is_refused_and_counted(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4500)
    tier.offer("large", blob(1, count=5000))
    tier.offer("small", blob(2))
    tier.close()
    assert tier.refused == 1
    assert [key for key in ("large", "small") if tier.has(key)] == ["small"]
    assert tier.pending_bytes == 0
    tier.check()


def test_a_disk_that_takes_nothing_costs_the_blob_only(tier: DiskTier) -> None:
    shutil.rmtree(tier.directory)
    tier.offer("a", blob(1))
    tier.close()
    assert tier.refused == 1
    assert tier.get("a") is None


def test_two_services_cannot_share_a_directory(tier: DiskTier) -> None:
    with pytest.raises(ValueError, match="in use by another service"):
        DiskTier(tier.directory, BUDGET)
    tier.close()
    DiskTier(tier.directory, BUDGET).close()
