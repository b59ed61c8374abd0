"""Run the agents over the questions: warm the pools, then measure every turn against dense prefill."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvcache_client.adapters.transformers import Agent, Answer, SharedModel
from torch import Tensor

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


def read_dataset(path: Path | None) -> list[str]:
    """Questions of a JSON-lines file with a field `question` or `prompt`; None: the demo's own.

    Raises ValueError that names the line at fault.
    """
    source = path or Path(__file__).with_name("questions.jsonl")
    out = []
    for number, line in enumerate(source.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            out.append(str(row.get("question") or row["prompt"]))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{source}, line {number}: needs a JSON object with a field `question` or `prompt`") from error
    return out


class Team:
    """The agents of one demo and the questions they have answered so far."""

    def __init__(self, shared: SharedModel, templates: Sequence[tuple[str, str]], answer_tokens: int) -> None:
        self.agents = [(name, shared.agent(template, produces=name)) for name, template in templates]
        self._answer_tokens = answer_tokens
        self._stop = min(shared.stop_ids, default=0)

    def warm(self, question: str) -> list[Answer]:
        """One request through all agents; what they compute fills the pools."""
        samples: dict[str, str | Sequence[int]] = {"question": question}
        answers = []
        for name, agent in self.agents:
            answer = agent.run(_needed(agent, samples), max_new_tokens=self._answer_tokens)
            samples[name] = answer.token_ids
            answers.append(answer)
        return answers

    def measure(self, question: str, policies: Sequence[str]) -> list[Measured]:
        """One request through all agents, each turn also dense. The first policy's answers are what the others read."""
        samples: dict[str, str | Sequence[int]] = {"question": question}
        measured = []
        for name, agent in self.agents:
            needed = _needed(agent, samples)
            tokens, reference, ttft_dense = self._dense(agent, needed)
            for policy in policies[1:]:
                call = agent.begin(needed, max_new_tokens=SCORED_TOKENS, policy=policy)
                call.prefill()
                kl, top1 = compare(reference, call.score(tokens))
                measured.append(Measured(name, policy, call.answer, ttft_dense, kl, top1))
                call.abort()  # beside the real run, and before it: neither teaches the other
            call = agent.begin(needed, max_new_tokens=max(self._answer_tokens, SCORED_TOKENS), policy=policies[0])
            call.prefill()
            kl, top1 = compare(reference, call.score(tokens))
            samples[name] = call.decode(limit=self._answer_tokens)
            measured.append(Measured(name, policies[0], call.settle(), ttft_dense, kl, top1))
        return measured

    def _dense(self, agent: Agent, samples: Mapping[str, str | Sequence[int]]) -> tuple[list[int], Tensor, float]:
        """Greedy continuation without any cache: tokens, log-probabilities [tokens, vocabulary], TTFT."""
        call = agent.begin(samples, max_new_tokens=SCORED_TOKENS, cache=False)
        call.prefill()
        tokens = list(call.decode())
        if call.stopped:
            tokens.append(self._stop)
        return tokens, call.score(tokens), call.ttft


def compare(reference: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean KL(reference || other) in nats and top-1 agreement, over [tokens, vocabulary] log-probabilities."""
    kl = torch.nn.functional.kl_div(other, reference, reduction="none", log_target=True).sum(-1)
    agree = (reference.argmax(-1) == other.argmax(-1)).float()
    return max(0.0, float(kl.mean())), float(agree.mean())


def _needed(agent: Agent, samples: Mapping[str, Any]) -> dict[str, Any]:
    return {s: samples[s] for s in agent.segments if isinstance(s, str)}
