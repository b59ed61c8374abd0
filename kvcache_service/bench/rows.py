"""What a benchmark yields: each case beside its floor, both timed in turns within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
Track = Callable[[Iterable[Item], int, str], Iterator[Item]]
Timer = Callable[[], float]  # does the work, returns its seconds
WARMUP = 3


@dataclass(frozen=True)
class Row:
    """One case. floor: what `floor_seconds_p50` is the time of; ratio: seconds_p50 over it. bytes: 0 where none count."""

    bench: str
    case: str
    bytes: int
    clients: int
    seconds_p50: float
    seconds_p99: float
    floor: str
    floor_seconds_p50: float
    ratio: float


def compare(
    track: Track[int], bench: str, case: str, floor: str, run: Timer, beneath: Timer, *, size: int = 0, rounds: int = 30
) -> Row:
    """Time `run` and its floor `beneath` alternately, so that a noisy machine slows both."""
    own, low = [], []
    for number in track(range(rounds + WARMUP), rounds + WARMUP, f"{bench}: {case}"):
        pair = run(), beneath()
        if number >= WARMUP:
            own.append(pair[0])
            low.append(pair[1])
    return row(bench, case, floor, own, low, size=size)


def row(bench: str, case: str, floor: str, own: list[float], low: list[float], *, size: int = 0, clients: int = 1) -> Row:
    p50, beneath = statistics.median(own), statistics.median(low)
    return Row(bench, case, size, clients, p50, percentile(own, 0.99), floor, beneath, p50 / beneath)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
