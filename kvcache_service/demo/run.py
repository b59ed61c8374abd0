"""Run the agents over the questions: warm the pools, then measure every turn against dense prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_client.adapters.audit import compare, trials
from kvcache_client.adapters.transformers import Agent, Answer, SharedModel
from kvcache_client.errors import CacheError
from kvcache_proto.v1 import kvcache_pb2 as pb
from torch import Tensor

from kvcache_service.evaluation.dataset import read_rows
from kvcache_service.evaluation.team import Member

SCORED_TOKENS = 32


@dataclass(frozen=True)
class Measured:
    """One turn under one policy beside its dense twin. Times in seconds; kl in nats, mean over the scored tokens."""

    agent: str
    policy: str
    answer: Answer
    ttft_dense: float
    kl: float
    top1: float


def questions() -> list[str]:
    """The demo's own questions."""
    return [row.question for row in read_rows(Path(__file__).with_name("questions.jsonl"))]


class Team:
    """The agents of one demo and the questions they have answered so far."""

    def __init__(self, shared: SharedModel, members: Sequence[Member], answer_tokens: int) -> None:
        self.agents = [(m.name, shared.agent(m.template, produces=m.produces, decision=m.decision)) for m in members]
        self._client = shared.client
        self._answer_tokens = answer_tokens
        self._stop = min(shared.stop_ids, default=0)

    def warm(self, question: str) -> list[Answer]:
        samples: dict[str, str | Sequence[int]] = {"question": question}
        answers = []
        for name, agent in self.agents:
            answer = agent.run(_needed(agent, samples), max_new_tokens=self._answer_tokens)
            samples[name] = answer.token_ids
            answers.append(answer)
        return answers

    def audit(self, question: str) -> None:
        """Like warm(), with trials beside every turn before anything is learned from it."""
        samples: dict[str, str | Sequence[int]] = {"question": question}
        for place, (name, agent) in enumerate(self.agents):
            needed = _needed(agent, samples)
            call = agent.begin(needed, max_new_tokens=self._answer_tokens, policy="off")
            call.prefill()
            answer = call.decode()
            if place:  # the first agent has nothing to reuse
                scored = [*answer[: SCORED_TOKENS - 1], *([self._stop] if call.stopped else [])] or [self._stop]
                encoded = {n: s if isinstance(s, tuple) else agent.shared.encode(str(s)) for n, s in needed.items()}
                trials(agent, encoded, scored, call.score(scored))
            call.settle()
            samples[name] = answer

    def calibrate(self) -> dict[str, pb.Calibration]:
        """Thresholds of every agent that can reuse something and has seen enough trials; the others stay dense."""
        found = {}
        for name, agent in self.agents[1:]:
            try:
                found[name] = self._client.calibrate(agent.template_id())
            except CacheError as error:
                if error.code != "STATE":
                    raise
        return found

    def measure(self, question: str, policies: Sequence[str]) -> list[Measured]:
        """One request through all agents, each turn also dense. The first policy's answers are what the others read."""
        samples: dict[str, str | Sequence[int]] = {"question": question}
        measured = []
        for name, agent in self.agents:
            needed = _needed(agent, samples)
            tokens, reference, ttft_dense = self._dense(agent, needed)
            for policy in policies[1:]:
                call = agent.begin(needed, max_new_tokens=SCORED_TOKENS, policy=policy, trial=pb.Trial())
                call.prefill()
                distance = compare(reference, call.score(tokens))
                measured.append(Measured(name, policy, call.answer, ttft_dense, distance.kl, distance.top1))
                call.abort()  # beside the real run, and before it: neither teaches the other
            call = agent.begin(needed, max_new_tokens=max(self._answer_tokens, SCORED_TOKENS), policy=policies[0])
            call.prefill()
            distance = compare(reference, call.score(tokens))
            samples[name] = call.decode(limit=self._answer_tokens)
            measured.append(Measured(name, policies[0], call.settle(), ttft_dense, distance.kl, distance.top1))
        return measured

    def _dense(self, agent: Agent, samples: Mapping[str, str | Sequence[int]]) -> tuple[list[int], Tensor, float]:
        """Greedy continuation without any cache: tokens, log-probabilities [tokens, vocabulary], TTFT."""
        call = agent.begin(samples, max_new_tokens=SCORED_TOKENS, cache=False)
        call.prefill()
        tokens = list(call.decode())
        if call.stopped:
            tokens.append(self._stop)
        return tokens, call.score(tokens), call.ttft


def _needed(agent: Agent, samples: Mapping[str, Any]) -> dict[str, Any]:
    return {s: samples[s] for s in agent.segments if isinstance(s, str)}
