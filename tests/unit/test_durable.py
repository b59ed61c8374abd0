"""What a restarted node finds: the same to the bit, or nothing."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.catalog.store import Anchor, Change
from kvcache_service.engine.durable import Durable, KnownGroup, KnownTemplate
from kvcache_service.engine.records import Base, FixedBase, Offsets, Place, Slot
from kvcache_service.predictor import RidgeStatistics, RunningMean
from kvcache_service.tiers.disk import DiskTier

GROUP = Group("tenant", "model")
POOL = PoolKey(GROUP, "question", "first:output")
SLOT = Slot(POOL, "template", 1)
PLACE = Place(GROUP, "template", 2)
BUDGET = 8 << 20


def kv(seed: int, tokens: int = 20) -> Tensor:
    return torch.randn(3, 2, tokens, 2, 4, generator=torch.Generator().manual_seed(seed))


def learned(samples: int) -> RidgeStatistics:
    statistics = RidgeStatistics()
    for seed in range(samples):
        statistics.add(kv(seed), 0.3 * kv(seed) + 0.1 * kv(100 + seed))
    return statistics


def offsets(turn: str = "turn") -> Offsets:
    return Offsets(f"base {turn}", f"offset {turn}", f"following {turn}", "fixed", start=7, length=20)


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Callable[[], Durable]]:
    """Opens the directory again and again; closing writes what waits."""
    made: list[Durable] = []

    def build() -> Durable:
        if made:
            made.pop().close()
        made.append(Durable(DiskTier(tmp_path, BUDGET)))
        return made[0]

    yield build
    for durable in made:
        durable.close()


def keep_anchor(durable: Durable, sample: str, turn: str = "turn") -> None:
    kept = offsets(turn)
    durable.keep_anchors([Change(POOL, sample, Anchor(sample, 20, 4, 1, frozenset({SLOT.name, "evicted:3"})))])
    for number, key in enumerate(kept.keys):
        durable.offer(key, kv(number))
    durable.keep_offsets(SLOT, sample, kept)


def test_a_predictor_is_the_same_to_the_bit_and_goes_on_learning(reopen: Callable[[], Durable]) -> None:
    before, norms = learned(5), [0.1, 0.25, 1 / 3]
    reopen().keep_predictor(SLOT, before, norms)
    after, known = reopen().template(GROUP, "template").predictors[SLOT]
    assert known == norms
    for statistics in (before, after):
        statistics.add(kv(50), kv(51))
    assert before.state().keys() == after.state().keys()
    for name, tensor in before.state().items():
        assert tensor.dtype == after.state()[name].dtype, name
        assert torch.equal(tensor, after.state()[name]), name
    assert before.map is not None
    assert after.map is not None
    assert (before.map.samples, before.map.error, before.map.novelty_scale) == (
        after.map.samples,
        after.map.error,
        after.map.novelty_scale,
    )
    assert torch.equal(before.map.change(kv(60)[1]), after.map.change(kv(60)[1]))
    assert before.map.novelty(kv(60)[1]) == after.map.novelty(kv(60)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_means_and_fixed_bases_come_back(reopen: Callable[[], Durable], dtype: torch.dtype) -> None:
    mean = RunningMean()
    for seed in range(3):
        mean.add(kv(seed).to(dtype))
    durable = reopen()
    durable.keep_mean(PLACE, mean)
    durable.keep_fixed(PLACE, FixedBase(kv(9).to(dtype), 31, "fixed"))
    known = reopen().template(GROUP, "template")
    assert known.means[PLACE].samples == 3
    assert torch.equal(known.means[PLACE].mean(), mean.mean())
    found = known.fixed_bases[PLACE]
    assert (found.start, found.key, found.kv.dtype) == (31, "fixed", dtype)
    assert torch.equal(found.kv, kv(9).to(dtype))


def test_bases_anchors_quality_and_node_come_back(reopen: Callable[[], Durable]) -> None:
    durable = reopen()
    node, base = durable.node, Base("first:output", 12, 20, 1, "base turn", "question")
    keep_anchor(durable, "sample")
    durable.keep_base(GROUP, "sample", base)
    durable.keep_quality(GROUP, "template", "a record")
    durable.keep_epoch(GROUP, "an epoch")
    again = reopen()
    assert again.node == node
    assert again.group(GROUP) == KnownGroup(
        bases=[("sample", base)],
        anchors={POOL: [Anchor("sample", 20, 4, 1, frozenset({SLOT.name}))]},  # the other slot has no offsets here
        offsets={(POOL, "sample"): {SLOT.name: offsets()}},
        epoch="an epoch",
    )
    assert again.template(GROUP, "template").quality == "a record"
    assert again.group(Group("tenant", "another")) == KnownGroup()
    assert again.template(GROUP, "another") == KnownTemplate()
    again.check()


def test_what_was_pruned_is_gone_with_its_bytes(reopen: Callable[[], Durable]) -> None:
    durable = reopen()
    keep_anchor(durable, "sample")
    keep_anchor(durable, "other", "later")
    durable.drop_anchor(POOL, "sample", offsets().owned)
    again = reopen()
    assert list(again.group(GROUP).offsets) == [(POOL, "other")]
    assert [key for key in offsets().keys if again.has(key)] == [offsets().base]


@pytest.mark.parametrize("lost", range(3), ids=["base", "offset", "following"])
def test_an_anchor_without_one_of_its_blobs_is_no_anchor(reopen: Callable[[], Durable], tmp_path: Path, lost: int) -> None:
    keep_anchor(reopen(), "sample")
    reopen().drop_blobs([offsets().keys[lost]])
    assert reopen().group(GROUP) == KnownGroup()
    reopen()  # what the last one swept is written by now
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as index:
        for table in ("anchor", "offsets"):
            assert index.execute(f"SELECT * FROM {table}").fetchall() == []


def test_a_record_without_blob_is_dropped(reopen: Callable[[], Durable]) -> None:
    """Killed after the catalog's step and before the turn's blobs were written."""
    durable = reopen()
    durable.keep_anchors([Change(POOL, "sample", Anchor("sample", 20, 4, 1, frozenset({SLOT.name})))])
    durable.keep_base(GROUP, "sample", Base("first:output", 12, 20, 1, "never written", "question"))
    assert reopen().group(GROUP) == KnownGroup()


def test_damaged_state_is_not_there(reopen: Callable[[], Durable], tmp_path: Path) -> None:
    durable = reopen()
    durable.keep_predictor(SLOT, learned(3), [0.1])
    durable = reopen()
    [path] = tmp_path.glob("*.kv")
    path.write_bytes(path.read_bytes()[:-1])
    assert durable.template(GROUP, "template") == KnownTemplate()
    assert durable.gauges()["kvcache_disk_damaged"] == 1
    assert reopen().template(GROUP, "template") == KnownTemplate()


def test_of_states_that_wait_only_the_newest_is_written(tmp_path: Path) -> None:
    disk, hold, written = DiskTier(tmp_path, BUDGET), threading.Event(), []
    disk.then(lambda: hold.wait(10) and None)
    durable = Durable(disk)
    mean = RunningMean()
    for seed in range(5):
        mean.add(kv(seed))
        durable.keep_mean(PLACE, mean)
    replace = disk.replace
    disk.replace = lambda key, blob: (written.append(key), replace(key, blob))[1]  # type: ignore[method-assign]
    hold.set()
    durable.close()
    assert len(written) == 1
    again = Durable(DiskTier(tmp_path, BUDGET))
    assert torch.equal(again.template(GROUP, "template").means[PLACE].mean(), mean.mean())
    again.close()


@pytest.mark.parametrize("harm", [lambda data: b"not a database" * 100, lambda data: data[:5000], lambda data: b""])
def test_a_damaged_index_costs_what_it_knew(
    reopen: Callable[[], Durable], tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    durable = reopen()
    node = durable.node
    keep_anchor(durable, "sample")
    durable.close()
    path = tmp_path / "index.sqlite"
    path.write_bytes(harm(path.read_bytes()))
    fresh = Durable(DiskTier(tmp_path, BUDGET))
    assert fresh.node != node
    assert fresh.group(GROUP) == KnownGroup()
    keep_anchor(fresh, "sample")
    fresh.close()
    again = Durable(DiskTier(tmp_path, BUDGET))
    assert list(again.group(GROUP).anchors) == [POOL]
    again.close()


def test_without_a_disk_nothing_is_kept() -> None:
    durable = Durable(None)
    keep_anchor(durable, "sample")
    durable.keep_predictor(SLOT, learned(2), [])
    assert durable.group(GROUP) == KnownGroup()
    assert durable.template(GROUP, "template") == KnownTemplate()
    assert not durable.has("base turn")
    durable.check()
    durable.close()
