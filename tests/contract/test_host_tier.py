"""The host tier's contract: leases pin, budgets hold, nothing leased is ever lost."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.tiers.host import HostTier, Lease


def blob(size: int, value: int = 1) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_least_recently_used_goes_first() -> None:
    tier = HostTier(30)
    for name in "abc":
        tier.put(name, blob(10))
    assert tier.get("a") is not None
    tier.put("d", blob(10))
    assert [name for name in "abcd" if tier.has(name)] == ["a", "c", "d"]
    assert tier.evictions == 1


def test_a_lease_outlives_removal_and_eviction() -> None:
    tier = HostTier(20)
    tier.put("a", blob(10, 7))
    lease = tier.lease(["a"])
    tier.remove(["a"])
    assert tier.used_bytes == 10
    assert not tier.has("a")
    tier.put("b", blob(10))
    with pytest.raises(KVCacheError) as error:
        tier.put("c", blob(15))
    assert error.value.code is Code.QUOTA
    assert tier.has("b"), "a refused put must not evict"
    lease.release()
    lease.release()
    assert tier.used_bytes == 10
    tier.check()


def test_a_lease_takes_all_or_nothing() -> None:
    tier = HostTier(20)
    tier.put("a", blob(10))
    with pytest.raises(KVCacheError) as error:
        tier.lease(["a", "gone"])
    assert error.value.code is Code.MISS
    assert tier.leased_bytes == 0
    assert tier.leases == 0


def test_replacing_a_leased_blob_twice_keeps_the_books() -> None:
    tier = HostTier(100)
    tier.put("a", blob(10, 1))
    lease = tier.lease(["a"])
    tier.put("a", blob(20, 2))
    tier.put("a", blob(30, 3))
    tier.check()
    lease.release()
    tier.check()
    assert tier.used_bytes == 30


class EvictionStorm(RuleBasedStateMachine):
    """Whatever is leased stays, the budget holds, and the books agree."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(100)
        self.leases: list[tuple[Lease, frozenset[str]]] = []

    @rule(name=st.sampled_from("abcdefgh"), size=st.integers(1, 60))
    def put(self, name: str, size: int) -> None:
        with contextlib.suppress(KVCacheError):
            self.tier.put(name, blob(size))
            assert self.tier.has(name)

    @rule(names=st.sets(st.sampled_from("abcdefgh"), min_size=1))
    def lease(self, names: set[str]) -> None:
        there = all(map(self.tier.has, names))
        with contextlib.suppress(KVCacheError):
            self.leases.append((self.tier.lease(names), frozenset(names)))
            assert there

    @rule(name=st.sampled_from("abcdefgh"))
    def remove(self, name: str) -> None:
        self.tier.remove([name])

    @rule(pick=st.integers(0, 100))
    def release(self, pick: int) -> None:
        if self.leases:
            self.leases.pop(pick % len(self.leases))[0].release()

    @invariant()
    def books_agree(self) -> None:
        self.tier.check()
        assert self.tier.leases == len(self.leases)

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.tier.check()
        assert self.tier.leased_bytes == 0


EvictionStorm.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestEvictionStorm = EvictionStorm.TestCase
