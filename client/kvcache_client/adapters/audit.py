"""Audits: how far a reuse turn is from dense, measured off the critical path."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from kvcache_proto.v1 import kvcache_pb2 as pb
from torch import Tensor

from kvcache_client.errors import CacheError

if TYPE_CHECKING:
    from kvcache_client.adapters.transformers import Agent

log = logging.getLogger(__name__)

AUDITED_TOKENS = 32
_WAITING = 16  # audits beyond these are dropped: a sample is a sample
_POLICIES = ("guarded", "reposition")


@dataclass(frozen=True)
class Distance:
    """Of one next-token run from dense, over the same continuation. kl in nats."""

    kl: float
    top1: float
    tokens: int


def compare(reference: Tensor, other: Tensor) -> Distance:
    """Mean KL(reference || other) and top-1 agreement of [tokens, vocabulary] log-probabilities."""
    kl = torch.nn.functional.kl_div(other, reference, reduction="none", log_target=True).sum(-1)
    agree = (reference.argmax(-1) == other.argmax(-1)).float()
    return Distance(max(0.0, float(kl.mean())), float(agree.mean()), len(reference))


def trial(
    agent: Agent,
    samples: dict[str, tuple[int, ...]],
    continuation: Sequence[int],
    reference: Tensor,
    *,
    policy: str = "guarded",
    options: pb.Trial | None = None,
) -> Distance:
    """One trial turn beside its dense twin, reported to the service. Raises CacheError when the service is lost.

    reference: dense log-probabilities [len(continuation), vocabulary].
    """
    call = agent.begin(samples, max_new_tokens=len(continuation), policy=policy, trial=options or pb.Trial())
    try:
        call.prefill()
        distance = compare(reference, call.score(continuation))
        call.audited(distance)
    finally:
        call.abort()
    return distance


def trials(
    agent: Agent,
    samples: dict[str, tuple[int, ...]],
    continuation: Sequence[int],
    reference: Tensor,
    *,
    options: pb.Trial | None = None,
) -> None:
    """What a calibration learns from one turn: a corrected trial and one without offsets. Raises CacheError."""
    for policy in _POLICIES:
        trial(agent, samples, continuation, reference, policy=policy, options=options)


class Auditor:
    """Runs the audits that the service asks for, one by one, in a thread, while no call of this worker is in flight."""

    def __init__(self, count: Callable[[CacheError], None]) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Agent, dict[str, tuple[int, ...]], tuple[int, ...]]] = deque()
        self._calls = 0
        self._busy = False
        self._thread: threading.Thread | None = None
        self.done = 0

    def call_begins(self) -> None:
        with self._changed:
            self._calls += 1

    def call_ends(self) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def submit(self, agent: Agent, samples: dict[str, tuple[int, ...]], continuation: Sequence[int]) -> None:
        """Audit this turn later. Dropped when too many wait."""
        with self._changed:
            if len(self._waiting) >= _WAITING or not continuation:
                return
            self._waiting.append((agent, samples, tuple(continuation[:AUDITED_TOKENS])))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcache-audit", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout: float = 60.0) -> bool:
        """Wait until no audit waits or runs; False when `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) and not self._calls)
                agent, samples, continuation = self._waiting.popleft()
                self._busy = True
            try:
                self._audit(agent, samples, continuation)
                self.done += 1
            except CacheError as error:
                self._count(error)
            except Exception:
                log.exception("audit failed")  # a measurement must not take the worker down
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    @torch.no_grad()
    def _audit(self, agent: Agent, samples: dict[str, tuple[int, ...]], continuation: Sequence[int]) -> None:
        dense = agent.begin(samples, max_new_tokens=len(continuation), cache=False)
        dense.prefill()
        reference = dense.score(continuation)
        # The turn was settled: its own dense KV, if it has any, must not answer for the approximation.
        trials(agent, samples, continuation, reference, options=pb.Trial(ignore_exact=True))
