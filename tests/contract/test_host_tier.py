"""The host tier's contract: leases hold, budgets hold, nothing leased is ever lost, what is in use outlives a flood."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.tiers.arena import ALIGN as UNIT
from kvcache_service.tiers.arena import Arena
from kvcache_service.tiers.host import HostTier, Lease, Pin


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def blob(units: int, value: int = 1) -> torch.Tensor:
    return torch.full((units * UNIT,), value, dtype=torch.uint8)


def tier_of(units: int, **options: object) -> HostTier:
    return HostTier(units * UNIT, **options)  # type: ignore[arg-type]


def there(tier: HostTier, names: Iterable[str]) -> str:
    return "".join(name for name in names if tier.has(name))


def test_least_recently_used_goes_first() -> None:
    tier = tier_of(3)
    for name in "abc":
        tier.put(name, blob(1))
    assert tier.get("a") is not None
    tier.put("d", blob(1))
    assert there(tier, "abcd") == "acd"
    assert tier.evictions == 1


def test_a_flood_that_nobody_asks_for_again_passes_by_what_is_in_use() -> None:
    tier = tier_of(100)
    for name in "abcdefgh":
        tier.put(name, blob(10))
        assert tier.get(name) is not None
    for number in range(1000):
        tier.put(f"once {number}", blob(10))
    assert there(tier, "abcdefgh") == "abcdefgh"
    assert tier.evictions == 1000 - 2
    tier.check()


def test_the_first_use_may_come_late_while_little_is_protected() -> None:
    """New tensors may take all that nobody protects: under load their first use comes after many other puts."""
    tier = tier_of(100)
    for number in range(10):
        tier.put(f"new {number}", blob(10))
    assert all(tier.get(f"new {number}") is not None for number in range(10))


def test_what_was_just_stored_waits_for_its_first_use_while_others_receive() -> None:
    """Memory that is being received is taken from old and new alike: eight clients that store at once find what they stored."""
    tier = tier_of(100)
    for name in "abcdefgh":
        tier.put(name, blob(10))
        assert tier.get(name) is not None
    receiving = [tier.empty((10 * UNIT,), torch.uint8) for _ in range(3)]
    tier.put("x", blob(10))
    receiving.append(tier.empty((10 * UNIT,), torch.uint8))
    assert tier.get("x") is not None
    assert there(tier, "abcdefgh") == "defgh"
    assert len(receiving) == 4


def test_use_that_has_ended_makes_room_at_last() -> None:
    """Nothing stays for ever on old merits: new tensors that are used push out those that no longer are."""
    tier = tier_of(100)
    for name in "abcdefghij":
        tier.put(name, blob(10))
        for _ in range(5):
            tier.get(name)
    for number in range(60):
        tier.put(f"new {number}", blob(10))
        tier.get(f"new {number}")
    assert there(tier, "abcdefghij") == ""
    tier.check()


def test_pins_outlive_use() -> None:
    tier = tier_of(10)
    tier.put("hard", blob(4), Pin.HARD)
    tier.put("soft", blob(2), Pin.SOFT)
    for number in range(50):
        tier.put(f"new {number}", blob(2))
        tier.get(f"new {number}")
    assert tier.has("hard")
    assert tier.has("soft")
    assert tier.pinned_bytes == 6 * UNIT
    tier.put("large", blob(6))
    assert tier.has("hard")
    assert not tier.has("soft"), "a soft pin yields when nothing else can"
    assert tier.pin("hard", Pin.NONE)
    tier.put("larger", blob(10))
    assert not tier.has("hard")
    assert not tier.pin("hard", Pin.SOFT), "what is gone cannot be pinned"
    tier.check()


def test_a_template_that_begins_with_a_hard_pin_does_not_weaken_it() -> None:
    tier = tier_of(10)
    tier.put("hard", blob(4), Pin.HARD)
    tier.put("none", blob(1))
    assert tier.pin("hard", Pin.SOFT, weaken=False)
    assert tier.pin("none", Pin.SOFT, weaken=False)
    assert not tier.pin("gone", Pin.SOFT, weaken=False)
    assert tier.pinned_bytes == 5 * UNIT
    tier.put("large", blob(6))
    assert there(tier, ["hard", "none"]) == "hard"


def test_hard_pins_leave_half_of_the_tier() -> None:
    tier = tier_of(10)
    tier.put("a", blob(5), Pin.HARD)
    tier.put("b", blob(1))
    for refused in (lambda: tier.put("c", blob(1), Pin.HARD), lambda: tier.pin("b", Pin.HARD)):
        with pytest.raises(KVCacheError) as error:
            refused()
        assert (error.value.code, error.value.field) == (Code.QUOTA, "pin")
    assert there(tier, "abc") == "ab"
    tier.put("a", blob(4), Pin.HARD)
    assert tier.pin("b", Pin.HARD)


def test_what_was_idle_for_too_long_goes() -> None:
    clock = Clock()
    tier = tier_of(10, idle_seconds=60.0, clock=clock)
    for name in "abcd":
        tier.put(name, blob(1))
    tier.pin("d", Pin.SOFT)
    lease = tier.lease("c")
    clock.now = 30.0
    tier.get("b")
    clock.now = 60.0
    tier.expire()
    assert there(tier, "abcd") == "bcd"
    lease.release()
    clock.now = 90.0
    tier.expire()
    assert there(tier, "abcd") == "d"
    assert tier.used_bytes == UNIT
    tier.check()


def test_a_lease_outlives_removal_and_eviction() -> None:
    tier = tier_of(20)
    tier.put("a", blob(10, 7))
    held = tier.get("a")
    lease = tier.lease(["a"])
    tier.remove(["a"])
    assert held is not None
    del held
    assert tier.used_bytes == tier.leased_bytes == 10 * UNIT
    assert not tier.has("a")
    tier.put("b", blob(10))
    with pytest.raises(KVCacheError) as error:
        tier.put("c", blob(15))
    assert error.value.code is Code.QUOTA
    assert tier.has("b"), "a refused put must not evict"
    lease.release()
    lease.release()
    assert tier.used_bytes == 10 * UNIT
    tier.check()


def test_a_lease_takes_all_or_nothing() -> None:
    tier = tier_of(20)
    tier.put("a", blob(10))
    with pytest.raises(KVCacheError) as error:
        tier.lease(["a", "gone"])
    assert error.value.code is Code.MISS
    assert tier.leased_bytes == 0
    assert tier.leases == 0


def test_replacing_a_leased_blob_twice_keeps_the_books() -> None:
    tier = tier_of(100)
    tier.put("a", blob(10, 1))
    lease = tier.lease(["a"])
    tier.put("a", blob(20, 2))
    tier.put("a", blob(30, 3))
    tier.check()
    assert tier.leased_bytes == 10 * UNIT
    lease.release()
    tier.check()
    assert tier.used_bytes == 30 * UNIT


def test_memory_is_not_given_away_while_somebody_reads_it() -> None:
    """Evicted, not leased, but still in a variable: its bytes stay what they are."""
    tier = tier_of(2)
    tier.put("a", blob(1, 7))
    read = tier.get("a")
    assert read is not None
    tier.put("b", blob(1))
    with pytest.raises(KVCacheError):
        tier.put("c", blob(2))
    assert not tier.has("a")
    assert read.eq(7).all()
    part = read[3:5]
    del read
    assert tier.used_bytes == UNIT
    assert part.eq(7).all()
    del part
    tier.put("c", blob(2))
    tier.check()


def test_a_tensor_of_the_tier_is_not_copied() -> None:
    tier = tier_of(10)
    own = tier.empty((4, UNIT), torch.uint8)
    tier.put("a", own)
    stored = tier.get("a")
    assert stored is not None
    assert stored.data_ptr() == own.data_ptr()
    assert tier.used_bytes == 4 * UNIT


def test_free_space_does_not_crumble() -> None:
    """Churn of two sizes in two thirds of the arena: a large block is always there, and afterwards all is one block."""
    arena = Arena(1000 * UNIT)
    draw = torch.Generator().manual_seed(1)
    held: list[torch.Tensor] = []
    for _ in range(5000):
        block = arena.take((7 if int(torch.randint(2, (), generator=draw)) else 40) * UNIT)
        assert block is not None
        held.append(block)
        del block
        while arena.used_bytes > 660 * UNIT:
            held.pop(int(torch.randint(len(held), (), generator=draw)))
        assert arena.largest_free_bytes >= 80 * UNIT
    arena.check()
    held.clear()
    gc.collect()
    assert arena.largest_free_bytes == 1000 * UNIT
    assert arena.used_bytes == 0
    arena.check()


class EvictionStorm(RuleBasedStateMachine):
    """Whatever is leased stays, the budget holds, and the books agree."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = tier_of(100)
        self.values: dict[str, int] = {}
        self.leases: list[tuple[Lease, dict[str, tuple[torch.Tensor, int]]]] = []

    @rule(name=st.sampled_from("abcdefgh"), units=st.integers(1, 60), value=st.integers(0, 255), pin=st.sampled_from(Pin))
    def put(self, name: str, units: int, value: int, pin: Pin) -> None:
        with contextlib.suppress(KVCacheError):
            self.tier.put(name, blob(units, value), pin)
            self.values[name] = value
            assert self.tier.has(name)

    @rule(names=st.sets(st.sampled_from("abcdefgh"), min_size=1))
    def lease(self, names: set[str]) -> None:
        there = all(map(self.tier.has, names))
        with contextlib.suppress(KVCacheError):
            lease = self.tier.lease(names)
            assert there
            promised = {}
            for name in names:
                tensor = self.tier.get(name)
                assert tensor is not None
                promised[name] = tensor, self.values[name]
            self.leases.append((lease, promised))

    @rule(name=st.sampled_from("abcdefgh"))
    def get(self, name: str) -> None:
        assert (self.tier.get(name) is not None) == self.tier.has(name)

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
        assert self.tier.used_bytes <= self.tier.budget
        assert all(tensor.eq(value).all() for _, promised in self.leases for tensor, value in promised.values())

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.tier.check()
        assert self.tier.leased_bytes == 0


EvictionStorm.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestEvictionStorm = EvictionStorm.TestCase


def test_who_watches_holds_no_memory() -> None:
    """Neither what is told of blobs nor a listing keeps an evicted one's memory: the tier would empty itself for nothing."""
    tier, told = tier_of(4), []
    tier.watch(lambda held, gone: told.append(("-" if gone else "+") + held.key))
    for name in "abcd":
        tier.put(name, blob(1))
    held, mark = tier.holdings("", lambda: len(told))
    assert [(one.key, one.nbytes, one.shape) for one in held] == [(name, UNIT, (UNIT,)) for name in "abcd"]
    assert mark == 4
    tier.put("e", blob(1))
    assert told == ["+a", "+b", "+c", "+d", "-a", "+e"], "one goes for one that comes"
    tier.remove(["e", "nobody"])
    tier.pin("b", Pin.SOFT)
    tier.put("c", blob(1, value=2))
    assert told[6:] == ["-e"], "another pin or other bytes are no news"
    tier.check()
