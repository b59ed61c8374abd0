"""Times clients that store new bytes and read them back, several at once. Every system is timed by this very code.

Standard library only: peers run it with a Python of their own.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

WARMUP = 3
CLIENTS = (1, 8)

Times = dict[int, dict[int, list[list[float]]]]  # bytes -> clients -> seconds of every store, of every retrieve


class Client(Protocol):
    def put(self) -> float:
        """Store new bytes; seconds that it took."""

    def get(self) -> float:
        """Read them back; seconds that it took."""


def measure(
    make: Callable[[int], AbstractContextManager[Client]],
    rounds: int,
    sizes: Sequence[int],
    step: Callable[[str], None] = lambda _: None,
) -> Times:
    """make: a client for values of so many bytes. step: told what is being timed, before every round."""
    found: Times = {}
    for size in sizes:
        found[size] = {}
        for count in CLIENTS:
            stores, retrieves = found[size][count] = [[], []]
            with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as threads:
                clients = [stack.enter_context(make(size)) for _ in range(count)]
                for number in range(rounds + WARMUP):
                    step(f"{size >> 10} KiB, {count} clients")
                    put, got = (
                        list(threads.map(lambda act: act(), [getattr(c, name) for c in clients])) for name in ("put", "get")
                    )
                    if number >= WARMUP:
                        stores += put
                        retrieves += got
    return found


def main(make: Callable[[int], AbstractContextManager[Client]], rounds: str, *sizes: str) -> None:
    """For a script with the arguments `rounds size size …`: prints the times as JSON."""
    json.dump(measure(make, int(rounds), [int(size) for size in sizes]), sys.stdout)
