"""Play scenes through the real service and client: fill the pools, calibrate, measure every policy beside dense."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from kvcache_client.adapters.audit import compare, trial, trials
from kvcache_client.adapters.transformers import Agent, Answer, Call
from kvcache_proto.v1 import kvcache_pb2 as pb
from torch import Tensor

from kvcache_service.evaluation import controls
from kvcache_service.evaluation.policies import UNGATED, Policy
from kvcache_service.evaluation.scenes import Scene, Setting, Step

_GATES = ("novelty", "quality", "residual")


@dataclass(frozen=True)
class Row:
    """One turn under one policy beside its dense twin. Times in seconds; kl in nats, mean over the scored positions.

    divergence: first greedy token that differs from dense, None when all agree. nll: change of the mean negative
    log-likelihood of the continuation. refused_kl: what a turn that a gate refused would have had.
    """

    scene: int
    agent: str
    policy: str
    answer: Answer
    ttft_dense: float
    kl: float
    top1: float
    nll: float
    divergence: int | None
    refused_kl: float | None


@dataclass(frozen=True)
class Measured:
    """rows: turns that count. others: turns of agents that have nothing to reuse; they count for call reuse only."""

    rows: list[Row]
    others: list[Row]
    controls: dict[str, list[tuple[float, float]]]  # spoilt KL and re-position KL of the same turn


class Runner:
    """One setting on one service."""

    def __init__(self, setting: Setting, policies: Sequence[Policy], controlled: int) -> None:
        self._setting = setting
        self._policies = policies
        self._controlled = controlled

    def warm(self, scenes: Iterable[Scene]) -> None:
        """Teach the pools: every turn dense."""
        for scene in scenes:
            for step in scene:
                self._teach(step, self._begin(step, "off"))

    def calibrate(self, scenes: Iterable[Scene], fit: Callable[[str], pb.Calibration]) -> dict[str, pb.Calibration]:
        """Trials beside dense turns that nothing has learned from yet; then the thresholds of every measured agent."""
        measured = set()
        for scene in scenes:
            for step in scene:
                call = self._begin(step, "off")
                call.prefill()
                if step.measured:
                    measured.add(step.agent)
                    continuation = step.continuation[: self._setting.scored]
                    trials(self._agent(step), dict(step.samples), continuation, call.score(continuation))
                self._finish(step, call)
        return {name: fit(self._setting.agents[name].template_id()) for name in sorted(measured)}

    def measure(self, scenes: Iterable[Scene]) -> Measured:
        out = Measured([], [], {name: [] for name in controls.SPOILERS})
        for number, scene in enumerate(scenes):
            for step in scene:
                self._measure_step(number, step, out)
        return out

    def _measure_step(self, number: int, step: Step, out: Measured) -> None:
        agent, scored = self._agent(step), self._setting.scored
        if not step.measured:
            call = self._begin(step, None)
            call.prefill()
            self._finish(step, call)
            out.others.append(Row(number, step.agent, "guarded", call.answer, call.ttft, 0.0, 1.0, 0.0, None, None))
            return
        dense = agent.begin(dict(step.samples), max_new_tokens=len(step.continuation), cache=False)
        dense.prefill()
        reference = dense.score(step.continuation)
        dense.abort()
        if number < self._controlled:
            self._control(step, reference[:scored], out)
        ordered = sorted(self._policies, key=lambda p: p.options is None)  # the served turn is last: it changes the pools
        for policy in ordered:
            call = self._begin(step, policy.policy, policy.options)
            call.prefill()
            row = _row(number, step, policy.name, call, dense.ttft, reference, scored)
            if policy.options is not None:
                call.abort()
            else:
                if row.answer.outcome == "dense" and row.answer.reason in _GATES:
                    row = self._refused(step, row, reference[:scored])
                self._finish(step, call)
            out.rows.append(row)
        if all(policy.options is not None for policy in self._policies):
            self._teach(step, self._begin(step, "off"))  # nobody served the turn, but later agents read its answer

    def _refused(self, step: Step, row: Row, reference: Tensor) -> Row:
        """What the gate has prevented."""
        continuation = step.continuation[: len(reference)]
        distance = trial(
            self._agent(step), dict(step.samples), continuation, reference, policy=UNGATED.policy, options=UNGATED.options
        )
        return Row(**(vars(row) | {"refused_kl": distance.kl}))

    def _control(self, step: Step, reference: Tensor, out: Measured) -> None:
        spoilt = controls.run(self._agent(step), step.samples, step.continuation[: len(reference)], reference)
        for name, pair in spoilt.items():
            out.controls[name].append(pair)

    def _begin(self, step: Step, policy: str | None, options: pb.Trial | None = None) -> Call:
        room = max(len(step.continuation), len(step.answer) + 1)
        return self._agent(step).begin(dict(step.samples), max_new_tokens=room, policy=policy, trial=options)

    def _teach(self, step: Step, call: Call) -> None:
        call.prefill()
        self._finish(step, call)

    def _finish(self, step: Step, call: Call) -> None:
        call.follow(step.answer, stopped=step.stopped)
        call.settle()

    def _agent(self, step: Step) -> Agent:
        return self._setting.agents[step.agent]


def _row(number: int, step: Step, policy: str, call: Call, ttft_dense: float, reference: Tensor, scored: int) -> Row:
    rows = call.score(step.continuation)
    distance = compare(reference[:scored], rows[:scored])
    targets = torch.tensor(step.continuation[:scored])[:, None]
    nll = float((reference[:scored].gather(1, targets) - rows[:scored].gather(1, targets)).mean())
    differs = (reference.argmax(-1) != rows.argmax(-1)).nonzero()
    return Row(
        number,
        step.agent,
        policy,
        call.answer,
        ttft_dense,
        distance.kl,
        distance.top1,
        nll,
        int(differs[0]) if len(differs) else None,
        None,
    )
