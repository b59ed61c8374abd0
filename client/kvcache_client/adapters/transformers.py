"""Agents on a transformers causal LM that share KV through the service.

shared = SharedModel(model, tokenizer, KVCacheClient("127.0.0.1:50051"))
solver = shared.agent("<|im_start|>system\\nYou solve.<|im_end|>\\n<|im_start|>user\\n{question}", produces="answer")
answer = solver.run({"question": "What is 3 * 7?"}, max_new_tokens=64)
"""

from __future__ import annotations

import logging
import string
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kvcache_proto.v1 import kvcache_pb2 as pb
from torch import Tensor

from kvcache_client import tracing
from kvcache_client.adapters.audit import Auditor, Distance
from kvcache_client.adapters.description import model_request
from kvcache_client.adapters.slots import SlotCache
from kvcache_client.client import KVCacheClient
from kvcache_client.errors import CacheError
from kvcache_client.turn import Turn

log = logging.getLogger(__name__)

Sampler = Callable[[Tensor], int]


def greedy(logits: Tensor) -> int:
    """The most likely token of logits [vocabulary]."""
    return int(logits.argmax())


@dataclass(frozen=True)
class Answer:
    """What one agent said, and what it cost. Times in seconds; ttft counts everything from the call to the first token."""

    token_ids: tuple[int, ...]
    text: str
    outcome: str  # reuse, partial or dense
    reason: str  # why a segment was dense; "none"
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    ttft: float
    first_forward: float
    overhead: float
    residual: float  # of the probe: |fresh - corrected|^2 / |fresh|^2, mean over corrected segments; 0 without a probe
    unaided: float  # the same without correction
    novelty: float  # largest of the corrected segments


@dataclass
class Faults:
    """Cache faults that became dense prefills, by error code."""

    by_code: Counter[str] = field(default_factory=Counter)

    def count(self, error: CacheError) -> None:
        self.by_code[error.code] += 1
        log.warning("cache fault %s, prefilling: %s", error.code, error)


class SharedModel:
    """A model, its tokenizer and a client. Raises UnsupportedModel when the model's KV cannot be shared."""

    def __init__(
        self, model: Any, tokenizer: Any, client: KVCacheClient, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.client = client
        self.clock = clock
        self.faults = Faults()
        self.auditor = Auditor(self.faults.count)
        self.request = model_request(model, tokenizer)
        self.dtype: torch.dtype = model.dtype
        eos = model.generation_config.eos_token_id
        self.stop_ids = frozenset([eos] if isinstance(eos, int) else eos or [])

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of one segment; segments are tokenised once and never merged."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def agent(self, template: str, *, produces: str = "", decision: str = "reuse", policy: str = "guarded") -> Agent:
        """An agent with a prompt template; {name} is a placeholder, {{ and }} are braces.

        produces: the placeholder that this agent's answer fills in other templates. decision: "dense" for judges and
        critics that compare candidates. policy: guarded, paper, reposition, exact or off. An agent "{prompt}" with policy
        exact is plain prefix caching: whatever prompt or answer begins like an earlier one is not computed again.
        """
        segments: list[tuple[int, ...] | str] = []
        text = ""
        for literal, name, _, _ in string.Formatter().parse(template):
            text += literal  # an escaped brace splits literals: one fixed segment all the same
            if name is not None:
                segments += [self.encode(text), name] if text else [name]
                text = ""
        if text:
            segments.append(self.encode(text))
        return Agent(self, segments, produces, decision, policy)

    def buffer(self, columns: int) -> Tensor:
        """Private KV memory for a turn without the service."""
        r = self.request
        return torch.empty(r.layers, 2, columns, r.kv_heads, r.head_dim, dtype=self.dtype)

    def view(self, turn: Turn) -> Tensor:
        """The turn's buffer as KV [layers, 2, columns, kv_heads, head_dim], in place."""
        r = self.request
        flat = torch.frombuffer(turn.buffer, dtype=torch.uint8).view(self.dtype)
        return flat.view(r.layers, 2, turn.plan.buffer_tokens, r.kv_heads, r.head_dim)


class Agent:
    """One role: a template whose fixed segments are tokenised once."""

    def __init__(
        self, shared: SharedModel, segments: Sequence[tuple[int, ...] | str], produces: str, decision: str, policy: str
    ) -> None:
        self.shared = shared
        self.segments = list(segments)
        self._request = pb.RegisterTemplateRequest(
            segments=[
                pb.Segment(placeholder=s) if isinstance(s, str) else pb.Segment(fixed=pb.TokenIds(ids=s)) for s in segments
            ],
            decision=f"DECISION_{decision.upper()}",
            policy=f"POLICY_{policy.upper()}",
            produces=produces,
        )
        self._template_id = ""
        self._generation = -1
        self._lock = threading.Lock()

    @torch.no_grad()
    def run(
        self,
        samples: Mapping[str, str | Sequence[int]],
        *,
        max_new_tokens: int,
        policy: str | None = None,
        cache: bool = True,
        sampler: Sampler = greedy,
    ) -> Answer:
        """Open, fetch, recompute, probe, generate, settle. A cache fault becomes a dense prefill, never an exception.

        samples: text, or the token_ids of another agent's Answer. cache=False prefills without asking the service.
        """
        call = self.begin(samples, max_new_tokens=max_new_tokens, policy=policy, cache=cache)
        try:
            call.prefill()
            call.decode(sampler)
        except BaseException:
            call.abort()  # the model or the sampler failed: the service must not wait for this turn
            raise
        return call.settle()

    def begin(
        self,
        samples: Mapping[str, str | Sequence[int]],
        *,
        max_new_tokens: int,
        policy: str | None = None,
        cache: bool = True,
        trial: pb.Trial | None = None,
    ) -> Call:
        """The steps of run(), one by one. trial: a call that measures and teaches nothing; end it audited() or abort()."""
        return Call(self, samples, max_new_tokens, policy, cache, trial)

    def prompt(self, samples: Mapping[str, tuple[int, ...]]) -> list[int]:
        return [t for s in self.segments for t in (samples[s] if isinstance(s, str) else s)]

    def open(self, samples: Mapping[str, tuple[int, ...]], reserve: int, policy: str | None, trial: pb.Trial | None) -> Turn:
        """Register where needed and open a turn. Raises CacheError."""
        with self._lock:
            self._prime()
        return self.shared.client.open_turn(
            self._template_id, samples, reserve_tokens=reserve, policy=policy, trial=trial, fetch=True
        )

    def template_id(self) -> str:
        """The service's name for this template. Raises CacheError."""
        with self._lock:
            self._prime()
        return self._template_id

    def _prime(self) -> None:
        """Once per session of the client: register, and store the KV of the role prompt if the service lacks it."""
        client = self.shared.client
        client.connect()
        if self._generation == client.generation:
            return
        self._request.model_id = client.register_model(self.shared.request)
        reply = client.register_template(self._request)
        first = self.segments[0]
        if 0 in reply.missing and not isinstance(first, str):
            buffer = self.shared.buffer(len(first))
            ids, positions = torch.tensor(first), torch.arange(len(first))
            SlotCache(buffer).forward(self.shared.model, ids, positions, len(first), logits=1)
            try:
                client.put(self._request.model_id, first, buffer.view(torch.uint8).numpy().data.cast("B"), pin="soft")
            except CacheError as error:
                self.shared.faults.count(error)  # turns work without it; they teach the role prompt as well
        self._template_id, self._generation = reply.template_id, client.generation


class Call:
    """One turn in steps: prefill, (score,) decode, settle."""

    def __init__(
        self,
        agent: Agent,
        samples: Mapping[str, str | Sequence[int]],
        max_new_tokens: int,
        policy: str | None,
        cache: bool,
        trial: pb.Trial | None,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for one or more")
        self._shared = agent.shared
        self._clock = self._shared.clock
        self._started = self._clock()
        self._agent = agent
        self._trial = trial
        encoded = {n: self._shared.encode(s) if isinstance(s, str) else tuple(s) for n, s in samples.items()}
        needed = {s for s in agent.segments if isinstance(s, str)}
        if encoded.keys() != needed:
            raise ValueError(f"samples are {sorted(encoded)}; the template needs {sorted(needed)}")
        self._samples = encoded
        self._prompt = torch.tensor(agent.prompt(encoded), dtype=torch.long)
        self._n = len(self._prompt)
        self._max_new = max_new_tokens
        self._reason = pb.REASON_UNSPECIFIED
        self._rejected = False
        self._probes: list[pb.ProbeResidual] = []
        self._tokens: list[int] = []
        self._stopped = False
        self._logits = torch.empty(0)
        self.ttft = self.first_forward = 0.0
        self._turn: Turn | None = None
        self._work = tracing.begin("kvcache.turn")
        self._counted = cache and trial is None  # audits wait for the calls that serve somebody
        if self._counted:
            self._shared.auditor.call_begins()
        if cache:
            try:
                with self._work.current():
                    self._turn = agent.open(encoded, max_new_tokens, policy, trial)
                self._work.note(turn_id=self._turn.plan.turn_id)
            except CacheError as error:
                if trial is not None:
                    self._work.end()
                    raise
                self._lose(error)

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """Fetch, compute the fresh tokens in one forward, probe. Returns the first token's logits [vocabulary]."""
        turn = self._turn
        if turn is not None:
            try:
                if turn.reuses:
                    with self._work.current():
                        turn.fetch()
            except CacheError as error:
                self._lose(error)
                turn = None
        self._cache = SlotCache(self._shared.view(turn) if turn is not None else self._shared.buffer(self._n + self._max_new))
        fresh = torch.tensor(turn.fresh) if turn is not None else torch.arange(self._n)
        probe = [p for s in turn.plan.segments for p in s.probed] if turn is not None else []
        corrected = self._cache.buffer[1:, :, probe].clone() if probe else None
        begun = self._clock()
        with self._work.current(), tracing.step("kvcache.prefill"):
            tracing.note(fresh_tokens=len(fresh))
            self._logits = self._forward(fresh)
        if turn is not None and corrected is not None:
            with self._work.current(), tracing.step("kvcache.probe"):
                self._judge(turn, probe, corrected)
        self.first_forward = self._clock() - begun
        self.ttft = self._clock() - self._started
        return self._logits

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities [len(token_ids), vocabulary] of a given continuation; decode() may follow.

        The continuation may be no longer than max_new_tokens.
        """
        rows = [self._logits[None]]
        if len(token_ids) > 1:
            positions = torch.arange(self._n, self._n + len(token_ids) - 1)
            ids = torch.tensor(token_ids[:-1])
            rows.append(self._cache.forward(self._shared.model, ids, positions, int(positions[-1]) + 1, logits=len(ids)))
        return torch.cat(rows).float().log_softmax(-1)

    @torch.no_grad()
    def decode(self, sampler: Sampler = greedy, *, limit: int | None = None) -> tuple[int, ...]:
        """Generate up to max_new_tokens, or `limit` if that is less; a stop token ends it and is not part of the answer."""
        with self._work.current(), tracing.step("kvcache.decode"):
            self._generate(sampler, min(self._max_new, limit or self._max_new))
            tracing.note(output_tokens=len(self._tokens))
        return tuple(self._tokens)

    def _generate(self, sampler: Sampler, most: int) -> None:
        logits = self._logits
        while True:
            token = sampler(logits)
            if token in self._shared.stop_ids:
                self._stopped = True
                break
            self._tokens.append(token)
            if len(self._tokens) == most:
                break
            position = self._n + len(self._tokens) - 1
            ids, positions = torch.tensor([token]), torch.tensor([position])
            logits = self._cache.forward(self._shared.model, ids, positions, position + 1, logits=1)[0]

    def follow(self, token_ids: Sequence[int], *, stopped: bool) -> Tensor:
        """Instead of decode(): take a given answer for the call's own, in one forward. Returns score() of it.

        stopped: a stop token came after the answer; its row is scored too.
        """
        stop = [min(self._shared.stop_ids, default=0)] if stopped else []
        rows = self.score([*token_ids, *stop])
        self._tokens, self._stopped = list(token_ids), stopped
        return rows

    @property
    def stopped(self) -> bool:
        """True when decode() ended at a stop token."""
        return self._stopped

    def settle(self) -> Answer:
        """Hand over what was computed, with a verdict. A fault here is counted and changes nothing for the caller."""
        turn, answer = self._turn, self.answer
        if turn is not None:
            try:
                with self._work.current():
                    self._settle(turn)
                if turn.plan.audit:
                    self._shared.auditor.submit(self._agent, self._samples, self._tokens)
            except CacheError as error:
                self._shared.faults.count(error)
            finally:
                turn.release()
        self._work.note(
            outcome=answer.outcome,
            reason=answer.reason,
            prompt_tokens=answer.prompt_tokens,
            reused_tokens=answer.reused_tokens,
            recomputed_tokens=answer.recomputed_tokens,
            ttft=answer.ttft,
        )
        self._end()
        return answer

    def audited(self, distance: Distance) -> None:
        """End a trial with its distance from dense. Raises CacheError; a trial whose turn was lost reports nothing."""
        if self._turn is not None:
            measured = pb.Distance(kl=distance.kl, top1=distance.top1, tokens=distance.tokens)
            with self._work.current():
                self._turn.settle(pb.VERDICT_AUDITED, probes=self._probes, distance=measured)
        self._work.note(outcome="audited")
        self._end()

    def abort(self) -> None:
        """Leave without a verdict: nothing changes anywhere."""
        if self._turn is not None:
            with self._work.current():
                self._turn.release()
        self._work.note(outcome="aborted")
        self._end()

    def _end(self) -> None:
        self._work.end()
        if self._counted:
            self._counted = False
            self._shared.auditor.call_ends()

    def _settle(self, turn: Turn) -> None:
        # T - 1 rule: the last token of an answer cut by the length limit was never run and has no KV.
        kv_tokens = len(self._tokens) if self._stopped else max(0, len(self._tokens) - 1)
        first = self._first_pure(turn)
        turn.settle(
            pb.VERDICT_REJECTED if self._rejected else pb.VERDICT_ACCEPTED,
            reason=self._reason,
            finish_reason=pb.FINISH_REASON_STOP if self._stopped else pb.FINISH_REASON_LENGTH,
            output_token_ids=self._tokens,
            output_kv_tokens=0 if self._rejected else kv_tokens,
            probes=self._probes,
            ttft_seconds=self.ttft,
            first_forward_seconds=self.first_forward,
            observed=None if self._rejected else (first, self._n + kv_tokens - first),
        )

    def _first_pure(self, turn: Turn) -> int:
        """Where true dense KV begins that the service can learn from; the prompt's end when there is none."""
        for segment in turn.plan.segments:
            if segment.action == pb.ACTION_REUSE:
                break
            if segment.action == pb.ACTION_DENSE and segment.tokens:
                return int(segment.start)
        return self._n

    def _forward(self, fresh: Tensor) -> Tensor:
        return self._cache.forward(self._shared.model, self._prompt[fresh], fresh, self._n, logits=1)[0]

    def _judge(self, turn: Turn, probe: list[int], corrected: Tensor) -> None:
        """Verify before Act: is corrected KV closer to the recomputed one than re-positioned KV? If not, prefill."""
        fresh, corrected = self._cache.buffer[1:, :, probe].float(), corrected.float()
        done = 0
        for ordinal, segment in enumerate(turn.plan.segments):
            count = len(segment.probed)
            if count:
                rows = slice(done, done + count)
                plain = self._cache.buffer[1:, :, segment.probe : segment.probe + count].float()
                energy = fresh[:, :, rows].square().sum()
                residuals = [float((fresh[:, :, rows] - kv).square().sum() / energy) for kv in (corrected[:, :, rows], plain)]
                self._probes.append(pb.ProbeResidual(segment=ordinal, corrected=residuals[0], repositioned=residuals[1]))
                done += count
        mean, unaided = _mean([p.corrected for p in self._probes]), _mean([p.repositioned for p in self._probes])
        within = mean <= turn.plan.residual_limit and mean <= turn.plan.ratio_limit * unaided
        if self._trial is None and not within:  # so that NaN is refused too
            self._rejected, self._reason = True, pb.REASON_RESIDUAL
            self._logits = self._forward(torch.arange(self._n))

    def _lose(self, error: CacheError) -> None:
        """Go on without the service."""
        self._shared.faults.count(error)
        self._reason = pb.REASON_SERVICE
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    @property
    def answer(self) -> Answer:
        """What is known so far."""
        turn = self._turn
        fresh = dense = self._n
        reason = self._reason
        if turn is not None and not self._rejected:
            fresh = len(turn.fresh)
            dense = sum(len(s.fresh) for s in turn.plan.segments if s.action == pb.ACTION_DENSE)
            reason = next((s.reason for s in turn.plan.segments if s.action == pb.ACTION_DENSE), pb.REASON_UNSPECIFIED)
        outcome = "reuse" if not dense else "partial" if fresh < self._n else "dense"
        return Answer(
            token_ids=tuple(self._tokens),
            text=self._shared.tokenizer.decode(self._tokens),
            outcome=outcome,
            reason="none" if reason == pb.REASON_UNSPECIFIED else pb.Reason.Name(reason).removeprefix("REASON_").lower(),
            prompt_tokens=self._n,
            reused_tokens=self._n - fresh,
            recomputed_tokens=fresh - dense if outcome != "dense" else 0,
            ttft=self.ttft,
            first_forward=self.first_forward,
            overhead=self.ttft - self.first_forward,
            residual=_mean([p.corrected for p in self._probes]),
            unaided=_mean([p.repositioned for p in self._probes]),
            novelty=max((s.novelty for s in turn.plan.segments), default=0.0) if turn is not None else 0.0,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
