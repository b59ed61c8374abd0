"""What is asked of whom: the settings of the evaluation as plain lists of steps, with every text fixed beforehand.

All policies see the same turns: answers are the model's own greedy ones without any cache, generated in batches first.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from kvcache_client.adapters.transformers import Agent, SharedModel

from kvcache_service.evaluation.dataset import Row
from kvcache_service.evaluation.team import Member, span_members

SPAN = 64  # tokens of the reused text in settings A, B and C
SPAN_SCORED = 13  # next-token positions that count there
TEAM_SCORED = 32
CONTINUATION = 64  # greedy tokens in which the first divergence is looked for
_BATCH = 8


@dataclass(frozen=True)
class Step:
    """One turn. answer: what the agent says, stop: whether a stop token followed; continuation: the dense greedy run that
    is scored. measured: counts in the figures."""

    agent: str
    samples: Mapping[str, tuple[int, ...]]
    answer: tuple[int, ...]
    stopped: bool
    continuation: tuple[int, ...]
    measured: bool


Scene = list[Step]


@dataclass(frozen=True)
class Generated:
    tokens: tuple[int, ...]
    stopped: bool


@torch.no_grad()
def generate(shared: SharedModel, prompts: Sequence[Sequence[int]], limit: int) -> list[Generated]:
    """Greedy continuations of up to `limit` tokens, several prompts at once."""
    stop = min(shared.stop_ids, default=0)
    out: list[Generated] = []
    for first in range(0, len(prompts), _BATCH):
        batch = prompts[first : first + _BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[stop] * (width - len(p)) + list(p) for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        rows = shared.model.generate(
            ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=stop, temperature=None, top_p=None
        )[:, width:]
        for row in rows.tolist():
            end = next((i for i, token in enumerate(row) if token in shared.stop_ids), len(row))
            out.append(Generated(tuple(row[:end]), end < len(row)))
    return out


class Setting(ABC):
    """A named way to turn dataset rows into scenes. agents: by name; scored: positions that count."""

    def __init__(self, name: str, shared: SharedModel, members: Sequence[Member], scored: int) -> None:
        self.name = name
        self.shared = shared
        self.scored = scored
        self.members = list(members)
        self.agents = {m.name: shared.agent(m.template, produces=m.produces, decision=m.decision) for m in members}

    @abstractmethod
    def scenes(self, rows: Sequence[Row], seed: int) -> Iterator[Scene]:
        """One scene per row."""

    def prompt(self, agent: str, samples: Mapping[str, tuple[int, ...]]) -> list[int]:
        return self.agents[agent].prompt(samples)

    def _needed(self, agent: Agent, samples: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {s: samples[s] for s in agent.segments if isinstance(s, str)}


class Spans(Setting):
    """A: a fixed prefix before a question that another agent has read. B: a prefix and a question, exact, before an answer
    text that another agent has decoded. One span of 64 tokens is reused and nothing else."""

    def __init__(self, name: str, shared: SharedModel, answers: bool) -> None:
        super().__init__(name, shared, span_members(answers), SPAN_SCORED)
        self._answers = answers

    def scenes(self, rows: Sequence[Row], seed: int) -> Iterator[Scene]:
        encode = self.shared.encode
        samples = [{"question": encode(r.question)[:SPAN], "answer": encode(r.answer)[:SPAN]} for r in rows]
        first, *between, last = self.members
        needed = [self._needed(self.agents[last.name], s) for s in samples]
        greedy = generate(self.shared, [self.prompt(last.name, s) for s in needed], CONTINUATION)
        for own, use, generated in zip(samples, needed, greedy, strict=True):
            continuation = _scored(self.shared, generated)
            question, brief = {"question": own["question"]}, continuation[:1]
            if self._answers:  # the producer has said the span and stopped there
                scene = [Step(first.name, question, own["answer"], True, continuation, False)]
            else:
                scene = [Step(first.name, question, brief, False, continuation, False)]
            scene += [Step(m.name, question, brief, False, continuation, False) for m in between]
            scene.append(Step(last.name, use, brief, False, continuation, True))
            yield scene


class Agents(Setting):
    """Several agents that read the question and what others said. The first has nothing to reuse and is not measured; where
    one of them judges, only the judge is."""

    def __init__(self, name: str, shared: SharedModel, members: Sequence[Member], answer_tokens: int) -> None:
        super().__init__(name, shared, members, TEAM_SCORED)
        self._answer_tokens = answer_tokens

    def scenes(self, rows: Sequence[Row], seed: int) -> Iterator[Scene]:
        """Answers are generated a batch of questions at a time. Candidates before a judge come in a random order."""
        draw = random.Random(seed)
        for first in range(0, len(rows), _BATCH):
            batch = rows[first : first + _BATCH]
            said: list[dict[str, tuple[int, ...]]] = [{"question": self.shared.encode(r.question)} for r in batch]
            scenes: list[Scene] = [[] for _ in batch]
            for place, member in enumerate(self.members):
                measured = member.shuffled if any(m.shuffled for m in self.members) else place > 0
                needed = [self._arranged(member, own, draw) for own in said]
                greedy = generate(self.shared, [self.prompt(member.name, n) for n in needed], CONTINUATION)
                for scene, own, use, full in zip(scenes, said, needed, greedy, strict=True):
                    answer = full.tokens[: self._answer_tokens]
                    stopped = full.stopped and len(full.tokens) <= self._answer_tokens
                    scene.append(Step(member.name, use, answer, stopped, _scored(self.shared, full), measured))
                    own[member.name] = answer
            yield from scenes

    def _arranged(self, member: Member, said: Mapping[str, tuple[int, ...]], draw: random.Random) -> dict[str, tuple[int, ...]]:
        needed = self._needed(self.agents[member.name], said)
        if not member.shuffled:
            return needed
        names = [n for n in needed if n != "question"]
        texts = [needed[n] for n in names]
        draw.shuffle(texts)
        return needed | dict(zip(names, texts, strict=True))


def _scored(shared: SharedModel, generated: Generated) -> tuple[int, ...]:
    stop = (min(shared.stop_ids, default=0),) if generated.stopped else ()
    return (*generated.tokens, *stop)
