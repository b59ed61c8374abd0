"""The turn: open, assemble, observe, settle. The only module that touches tiers and catalog together."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcache_service.catalog.keys import Group
from kvcache_service.catalog.store import Catalog, Change
from kvcache_service.engine import assembly
from kvcache_service.engine.archive import Archive
from kvcache_service.engine.cost import CostModel
from kvcache_service.engine.durable import Durable
from kvcache_service.engine.events import Events, EventSettings
from kvcache_service.engine.memory import Memory
from kvcache_service.engine.plan import Action, Plan, Reason, Trial
from kvcache_service.engine.planning import Planner, PlanSettings, bypass
from kvcache_service.engine.pools import Pools
from kvcache_service.engine.prefixes import Prefixes, refuse_non_finite
from kvcache_service.engine.quotas import Quotas, limits, refuse_more, reports
from kvcache_service.engine.sessions import Phase, Session, Settled, Settlement, Turn, Verdict
from kvcache_service.engine.trust import ProbeLimits, TemplateStatus, Trust, TrustSettings
from kvcache_service.engine.update import Update
from kvcache_service.errors import Code, KVCacheError, invalid
from kvcache_service.geometry import Geometry
from kvcache_service.kernels import cpu
from kvcache_service.kernels.backend import Backend
from kvcache_service.kernels.codec import Codec
from kvcache_service.prompt import Fixed, Policy, Span, Template, check_tokens, chunked, context_keys, lay_out, tokens_key
from kvcache_service.quality import Calibration
from kvcache_service.telemetry import SlotReport, Telemetry, TurnReport
from kvcache_service.tenants import TenantReport
from kvcache_service.tiers.host import HostTier, Pin
from kvcache_service.tiers.shared import BufferPool, SharedDirectory

audit = logging.getLogger("kvcache.audit")
Finished = tuple[Verdict, Settled]  # what a turn was settled with
_REMEMBERED = 20_000  # finished turns, so that a repeated call gets its first answer


@dataclass(frozen=True)
class EngineSettings:
    """Bounds of the service; seconds and bytes."""

    plan: PlanSettings
    session_bytes: int
    max_prompt_tokens: int
    lease_seconds: float
    max_cost_ratio: float
    coding: Codec | None  # of stored KV that promises nothing exact
    trust: TrustSettings
    quotas: Quotas
    events: EventSettings


@dataclass(frozen=True)
class Opened:
    turn: Turn
    match_seconds: float
    limits: ProbeLimits


@dataclass(frozen=True)
class ModelStatus:
    """A registered model: how many templates a tenant has for it, and what its KV takes in host memory."""

    geometry: Geometry
    templates: int
    host_bytes: int


class Engine:
    """Thread-safe. Every public call either does all that it says or raises KVCacheError and changes nothing."""

    def __init__(
        self,
        settings: EngineSettings,
        tier: HostTier,
        catalog: Callable[[Callable[[Sequence[Change]], None], Callable[[Group, str], None]], Catalog],
        shared: SharedDirectory,
        telemetry: Telemetry,
        *,
        backend: Backend,
        durable: Durable,
        boot_id: str,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings
        self.boot_id = boot_id
        self._started = clock()
        self._tier = tier
        self._backend = backend
        self._shared = shared
        self._telemetry = telemetry
        self._clock = clock
        self._lock = threading.RLock()
        self._learning = threading.Lock()
        self._restoring = threading.Lock()
        self._durable = durable
        self._memory = Memory(tier, durable, settings.coding)
        self._prefixes = Prefixes(self._memory, self._lock, backend)
        self._catalog = catalog(self._anchors_changed, durable.keep_epoch)
        self._catalog_up = True
        self.events = Events(tier, boot_id, settings.events)
        self._trust = Trust(settings.trust, self._catalog, durable, telemetry, draw)
        self._models: dict[str, Geometry] = {}
        self._rotations: dict[str, cpu.Rotations] = {}
        self._costs: dict[Group, CostModel] = {}  # also: which tenant has registered which model
        self._groups: set[Group] = set()
        self._templates: dict[tuple[str, str], Template] = {}
        self._sessions: dict[str, Session] = {}
        self._turns: dict[str, Turn] = {}
        self._finished: OrderedDict[str, tuple[str, Finished | None]] = OrderedDict()  # tenant, and how it ended
        self.pools = Pools(
            self._memory,
            self._catalog,
            self._trust,
            self._lock,
            self._learning,
            groups=self._known_groups,
            templates=self._of_group,
        )
        self.archive = Archive(
            self._memory,
            self._catalog,
            self._trust,
            self.pools,
            self._lock,
            self._learning,
            geometry=self.model,
            template=self._template,
            templates=self._of_group,
        )
        telemetry.watch(self.gauges)
        telemetry.watch_slots(self.audited_slots)
        telemetry.tenants.watch(self.tenants)

    @property
    def device(self) -> str:
        """Where KV is computed."""
        return self._backend.device

    # Sessions

    def open_session(self, tenant: str) -> str:
        session_id = secrets.token_hex(16)
        limit = self.settings.session_bytes
        with self._lock:
            mine = (session.tenant == tenant for session in self._sessions.values())
            refuse_more("quota_sessions", self.settings.quotas.sessions, mine, "sessions", "close sessions")
            self._sessions[session_id] = Session(session_id, tenant, BufferPool(self._shared, limit), BufferPool(None, limit))
        return session_id

    def close_session(self, session_id: str) -> None:
        """Free all that the session holds. Unknown sessions are ignored."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            turns = list(session.turns.values()) if session else []
        for turn in turns:
            self._release(turn)
        if session:
            session.shared.close()
            session.private.close()

    def sweep(self) -> None:
        """Release turns whose lease has run out, and drop what has been idle for too long."""
        now = self._clock()
        with self._lock:
            expired = [t for t in self._turns.values() if t.deadline <= now]
        for turn in expired:
            self._release(turn, lost=True)
        self._tier.expire()

    # Registration

    def register_model(self, tenant: str, geometry: Geometry) -> str:
        group = Group(tenant, geometry.model_id)
        with self._lock:
            mine = (known.tenant == tenant and known != group for known in self._costs)
            refuse_more("quota_models", self.settings.quotas.models, mine, "models", "use one that is registered")
            known = geometry.model_id in self._models
        if not known:  # every client that attaches registers its models
            self._backend.prepare(geometry.dtype, geometry.rope, geometry.head_dim, self.settings.coding)
            rotations = cpu.Rotations(geometry.rope, self._longest(geometry))
            with self._lock:
                self._rotations[geometry.model_id] = rotations
                self._models[geometry.model_id] = geometry
        with self._lock:
            self._costs.setdefault(group, CostModel())
        return geometry.model_id

    def register_template(self, tenant: str, template: Template) -> tuple[str, list[int]]:
        """Returns the template id and the ordinals of fixed segments without base KV."""
        geometry = self.model(tenant, template.model_id)
        for ordinal, segment in enumerate(template.segments):
            if isinstance(segment, Fixed):
                check_tokens(segment.token_ids, geometry.vocab_size, f"segments[{ordinal}].fixed")
        with self._lock:
            mine = (owner == tenant and known != template.template_id for owner, known in self._templates)
            refuse_more("quota_templates", self.settings.quotas.templates, mine, "templates", "use one that is registered")
        group = Group(tenant, template.model_id)
        first = template.segments[0]
        with self._restoring:
            quality = self._restore(group, template)
        self._trust.load(tenant, template, quality)
        key = self._memory.exact_key(group, tokens_key(first.token_ids), 0) if isinstance(first, Fixed) else ""
        self._memory.promote([key])
        with self._lock:
            prefix = self._tier.pin(key, Pin.SOFT, weaken=False)  # a role prompt serves every turn of its agent
            return template.template_id, self._memory.missing_fixed(group, template, prefix)

    def _restore(self, group: Group, template: Template) -> str | None:
        """Bring back what earlier boots learned, the first time that a group and a template are named. Reads files.

        Returns what was known of the template's quality.
        """
        self._restore_group(group)
        if (group.tenant, template.template_id) in self._templates:
            return None
        learned = self._durable.template(group, template.template_id)
        with self._lock:
            self._memory.restore_template(learned)
            self._templates[group.tenant, template.template_id] = template
        return learned.quality

    def _restore_group(self, group: Group) -> None:
        if group not in self._groups:
            known = self._durable.group(group)
            with self._lock:
                self._memory.restore_group(group, known)
            self._catalog.attach(group, known.anchors, known.epoch)
            self._groups.add(group)

    def _known_groups(self, tenant: str) -> list[Group]:
        """Everything of a tenant, of earlier boots too."""
        with self._restoring:
            for group in self._durable.groups(tenant):
                self._restore_group(group)
        return sorted(group for group in {*self._groups, *self._costs} if group.tenant == tenant)

    def _of_group(self, group: Group) -> list[Template]:
        """Templates that are registered, by id."""
        with self._lock:
            found = [t for (owner, _), t in self._templates.items() if owner == group.tenant and t.model_id == group.model_id]
        return sorted(found, key=lambda template: template.template_id)

    def model(self, tenant: str, model_id: str) -> Geometry:
        """A model that the tenant has registered; whether another one has is not told."""
        if Group(tenant, model_id) not in self._costs:
            raise KVCacheError(Code.UNKNOWN_MODEL, f"model {model_id!r}", field="model_id", fix="call RegisterModel first")
        return self._models[model_id]

    def _longest(self, geometry: Geometry) -> int:
        """Tokens of the longest prompt with its reserve."""
        return min(self.settings.max_prompt_tokens, geometry.max_positions)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host tier for KV that is about to be received. Raises QUOTA."""
        return self._tier.empty(shape, dtype)

    def check_put(self, tenant: str, model_id: str, tokens: int, shape: tuple[int, ...]) -> None:
        """Refuse a Put before its bytes are taken in. Raises UNKNOWN_MODEL, INVALID or QUOTA."""
        geometry = self.model(tenant, model_id)
        self._prefixes.check(geometry, tokens, shape, self._longest(geometry))

    def put_prefix(
        self, tenant: str, model_id: str, token_ids: tuple[int, ...], kv: Tensor, pin: Pin | None = None
    ) -> tuple[str, bool]:
        """Store exact KV of a prompt prefix; see Prefixes.put."""
        return self._prefixes.put(tenant, self.model(tenant, model_id), self._rotations[model_id], token_ids, kv, pin)

    # The turn

    def open_turn(
        self,
        tenant: str,
        session_id: str,
        request_id: str,
        template_id: str,
        samples: Mapping[str, tuple[int, ...]],
        *,
        reserve: int,
        share: bool,
        policy: Policy | None,
        trial: Trial | None = None,
    ) -> Opened:
        """Plan a turn and lease what the plan needs. The same request id returns the same turn."""
        started = self._clock()
        with self._lock:
            self._session(tenant, session_id)
            template = self._template(tenant, template_id)
            geometry = self._models[template.model_id]
        chosen = policy or template.policy
        spans = self._lay_out(template, geometry, samples, reserve, chosen)
        contexts = context_keys(spans)
        gate = self._trust.gate(tenant, template_id)
        planner = Planner(
            self.settings.plan, self._memory, self._catalog.anchors, geometry, tenant, template, gate, self._backend, trial
        )
        with self._lock:
            sources = list(planner.sources(spans, contexts, chosen))
        self._memory.promote(sources)
        with self._lock:
            session = self._session(tenant, session_id)
            asked = (template_id, tuple(sorted(samples.items())), reserve, share, policy, trial)
            if request_id in session.requests:
                turn_id, first_asked = session.requests[request_id]
                if first_asked != asked:
                    raise KVCacheError(
                        Code.CONFLICT, "the id belongs to another request", field="request_id", fix="send a new id"
                    )
                turn = self._find(tenant, turn_id)
                return Opened(turn, 0.0, self._trust.probe_limits(turn))
            mine = (turn.tenant == tenant for turn in self._turns.values())
            refuse_more("quota_turns", self.settings.quotas.turns, mine, "open turns", "settle open turns, or prefill")
            plan = planner.plan(spans, contexts, chosen)
            if trial is None:
                plan = self._weigh_cost(tenant, plan, geometry)
            columns = plan.prompt_tokens + reserve + len(plan.probe)
            buffer = (session.shared if share else session.private).take(columns * geometry.token_bytes)
            turn = Turn(
                turn_id=secrets.token_hex(16),
                tenant=tenant,
                session_id=session_id,
                template=template,
                geometry=geometry,
                rotations=self._rotations[geometry.model_id],
                plan=plan,
                reserve=reserve,
                buffer=buffer,
                lease=self._tier.lease(plan.keys),
                deadline=self._clock() + self.settings.lease_seconds,
                trial=trial,
                audit=trial is None and self._trust.wants_audit(plan),
            )
            self._turns[turn.turn_id] = session.turns[turn.turn_id] = turn
            session.requests[request_id] = (turn.turn_id, asked)
        elapsed = self._clock() - started
        self._telemetry.match.observe(elapsed)
        return Opened(turn, elapsed, self._trust.probe_limits(turn))

    def _lay_out(
        self, template: Template, geometry: Geometry, samples: Mapping[str, tuple[int, ...]], reserve: int, policy: Policy
    ) -> tuple[Span, ...]:
        """The prompt of a turn, checked."""
        for name, token_ids in samples.items():
            check_tokens(token_ids, geometry.vocab_size, f"samples[{name!r}].token_ids")
        spans = lay_out(template, samples)
        total = spans[-1].end + reserve
        longest = self._longest(geometry)
        if not spans[-1].end:
            raise invalid("samples", "the prompt is empty", "send at least one token")
        if total > longest:
            raise invalid("samples", f"{total} tokens with the reserve", f"stay within {longest}")
        return chunked([t for span in spans for t in span.token_ids]) if policy is Policy.EXACT else spans

    def turn(self, tenant: str, turn_id: str) -> Turn:
        """The open turn. Raises UNKNOWN_TURN or LEASE_EXPIRED."""
        return self._find(tenant, turn_id)

    def assemble(self, turn: Turn, band_bytes: int) -> Iterator[range]:
        """Write the turn's KV into its buffer, once, lowest layers first. Yields layers that are complete, in order."""
        with turn.lock:
            self._require(turn, Phase.PLANNED, Phase.ASSEMBLED)
            done = turn.phase is Phase.ASSEMBLED
            bands = assembly.assemble(
                self._backend, turn.tensor, turn.plan, turn.geometry, turn.rotations, turn.reserve, band_bytes
            )
        if done:
            yield range(turn.geometry.layers)
            return
        while True:
            with turn.lock:
                self._require(turn, Phase.PLANNED, Phase.ASSEMBLED)
                started = self._clock()
                layers = next(bands, None)
                turn.assembly_seconds += self._clock() - started
                if layers is None:
                    turn.phase = Phase.ASSEMBLED
                    break
            yield layers
        self._telemetry.assembly.observe(turn.assembly_seconds)

    def check_observation(self, tenant: str, turn_id: str, start: int, tokens: int, dtype: torch.dtype) -> Turn:
        """The turn, when [start, start + tokens) lies within prompt and reserve."""
        turn = self._find(tenant, turn_id)
        self._require(turn, Phase.PLANNED, Phase.ASSEMBLED)
        if dtype != turn.geometry.dtype:
            raise invalid("dtype", f"{dtype}", f"send {turn.geometry.dtype}")
        if start > turn.plan.prompt_tokens:
            raise invalid("start", f"{start}", f"start within the prompt or at its end, {turn.plan.prompt_tokens}")
        if not tokens or start + tokens > turn.plan.prompt_tokens + turn.reserve:
            raise invalid(
                "tokens",
                f"[{start}, {start + tokens})",
                f"stay within prompt and reserve, {turn.plan.prompt_tokens + turn.reserve} tokens",
            )
        return turn

    def observe(self, turn: Turn, start: int, tokens: int, received: Tensor | None) -> int:
        """Stage what the worker computed: pure dense segments and decoded tokens. Returns the staged bytes.

        received: [layers, 2, tokens, kv_heads, head_dim] from a stream; None: the KV lies in the shared buffer, at its own
        columns. Nothing outside the turn changes.
        """
        with turn.lock:
            self._require(turn, Phase.PLANNED, Phase.ASSEMBLED)
            return self._stage(turn, start, tokens, received)

    def _stage(self, turn: Turn, start: int, tokens: int, received: Tensor | None) -> int:
        end = start + tokens
        prompt = turn.plan.prompt_tokens
        if turn.plan.policy is Policy.EXACT:
            wanted = turn.plan.new_chunks(start, end)
        else:
            wanted = [(s.span.start, s.span.end) for s in turn.plan.pure() if start <= s.span.start and s.span.end <= end]
            wanted += [(prompt, end)] if end > prompt else []
        kv = turn.tensor[:, :, start:end] if received is None else received
        ranges = [(a, b) for a, b in wanted if a < b]
        staged = assembly.take_out(self._backend, self._tier, kv, start, ranges, turn.geometry, turn.rotations)
        for copied in staged:
            refuse_non_finite(copied)
        turn.staged.update(zip((a for a, _ in ranges), staged, strict=True))
        turn.observed = max(turn.observed, end)
        return sum(copied.nbytes for copied in staged)

    def settle(self, tenant: str, turn_id: str, settlement: Settlement, observed: tuple[int, int] | None = None) -> Settled:
        """Verify and update, or fall back: one commit for all pools of the turn; then everything is given back.

        observed: first position and number of tokens that lie in the shared buffer and are to be observed first.
        The same settlement again returns the first result; another one for a settled turn is a STATE error.
        """
        with self._lock:
            owner, done = self._finished.get(turn_id, ("", None))
        if done is not None and owner == tenant:
            return self._repeat(done, settlement)
        turn = self._find(tenant, turn_id)
        started = self._clock()
        with turn.lock:
            if turn.result is not None and turn.verdict is not None:
                return self._repeat((turn.verdict, turn.result), settlement)
            if observed is not None:
                if not turn.buffer.path:
                    raise invalid("observe_tokens", "the turn shares no memory", "send the KV by Observe before")
                self._stage(self.check_observation(tenant, turn_id, *observed, turn.geometry.dtype), *observed, None)
            self._require(turn, Phase.PLANNED, Phase.ASSEMBLED)
            update = Update(turn, settlement, self._memory, self.settings.plan.max_taint)
            update.validate()
            with self._lock:
                update.collect()
            if settlement.verdict is Verdict.AUDITED:
                self._trust.audited(turn, settlement)
            self._trust.settled(turn, settlement)
            committed = self._commit(update)
            for name, count in update.counts().items():
                self._telemetry.candidates.labels(name).inc(count)
            turn.result = Settled(update.candidates, len(update.accepted), tuple(update.refused), committed)
            turn.verdict = settlement.verdict
            turn.phase = Phase.SETTLED
        self._finish(turn, (settlement.verdict, turn.result))
        self._report(turn, settlement)
        self._telemetry.settle.observe(self._clock() - started)
        return turn.result

    def release(self, tenant: str, turn_id: str) -> bool:
        """Give the turn up. False when it was over already."""
        with self._lock:
            turn = self._turns.get(turn_id)
        if turn is None:
            return False
        if turn.tenant != tenant:
            audit.warning("%s would release a turn of another tenant: unknown to him", tenant)
            return False
        self._release(turn)
        return True

    # Quality

    def calibrate(self, tenant: str, template_id: str, kl: float | None, top1: float | None) -> Calibration:
        """Fit the template's thresholds to a target; see Trust.calibrate."""
        with self._lock:
            template = self._template(tenant, template_id)
        return self._trust.calibrate(tenant, template, kl, top1)

    def models(self, tenant: str) -> list[ModelStatus]:
        """All models that the tenant has registered."""
        held, _ = self._tier.holdings(tenant, lambda: None)
        with self._lock:
            mine = sorted(group for group in self._costs if group.tenant == tenant)
        return [
            ModelStatus(
                self._models[group.model_id],
                len(self._of_group(group)),
                sum(one.nbytes for one in held if one.key.startswith(f"{group.tag}:")),
            )
            for group in mine
        ]

    def status(self, tenant: str) -> list[TemplateStatus]:
        """All templates of the tenant with their slots and quality."""
        with self._lock:
            templates = [t for (owner, _), t in self._templates.items() if owner == tenant]
            return [self._trust.status(tenant, template, self._memory.statistics) for template in templates]

    @property
    def open_turns(self) -> int:
        return len(self._turns)

    def uptime(self) -> float:
        return self._clock() - self._started

    # Views

    def gauges(self) -> dict[str, float]:
        sizes = self._catalog.pool_sizes()
        with self._lock:
            return (
                {
                    "kvcache_sessions": len(self._sessions),
                    "kvcache_open_turns": len(self._turns),
                    "kvcache_leases": self._tier.leases,
                    "kvcache_leased_bytes": self._tier.leased_bytes,
                    "kvcache_host_used_bytes": self._tier.used_bytes,
                    "kvcache_host_budget_bytes": self._tier.budget,
                    "kvcache_host_pinned_bytes": self._tier.pinned_bytes,
                    "kvcache_host_largest_free_bytes": self._tier.largest_free_bytes,
                    "kvcache_host_evictions": self._tier.evictions,
                    "kvcache_buffer_bytes": sum(s.held_bytes for s in self._sessions.values()),
                    "kvcache_pools": len(sizes),
                    "kvcache_anchors": sum(sizes.values()),
                    "kvcache_slots": len(self._memory.statistics),
                    "kvcache_predictor_bytes": self._memory.predictor_bytes,
                    "kvcache_anchor_bytes": self._memory.anchor_bytes,
                    "kvcache_catalog_up": float(self._catalog_up),
                }
                | self._durable.gauges()
                | self._backend.gauges()
                | self._trust.gauges()
            )

    def audited_slots(self) -> list[SlotReport]:
        """Quality of every slot that was audited."""
        with self._lock:
            return self._trust.audited_slots(self._template)

    def limits(self) -> dict[str, int | None]:
        """What one tenant may hold, by the names of QUOTAS; None: no limit."""
        return limits(self.settings.quotas, self._tier)

    def tenants(self) -> list[TenantReport]:
        """What every tenant holds that holds anything."""
        with self._lock:
            sessions, turns = (s.tenant for s in self._sessions.values()), (t.tenant for t in self._turns.values())
            templates, models = (owner for owner, _ in self._templates), (group.tenant for group in self._costs)
            return reports(self.settings.quotas, self._tier, sessions, turns, templates, models)

    def check_catalog(self) -> bool:
        """A real call to the metadata store; for health."""
        self._catalog_up = self._catalog.ping()
        return self._catalog_up

    def close(self) -> None:
        for session_id in list(self._sessions):
            self.close_session(session_id)
        self._catalog.close()
        self._shared.close()
        self._durable.close()

    def check(self) -> None:
        """Assert the invariants; for tests and post-mortems."""
        with self._lock:
            self._tier.check()
            assert self._turns.keys() == {t for s in self._sessions.values() for t in s.turns}
            assert self._tier.leases == len(self._turns)

    # Inside

    def _template(self, tenant: str, template_id: str) -> Template:
        template = self._templates.get((tenant, template_id))
        if template is None:
            raise KVCacheError(
                Code.UNKNOWN_TEMPLATE, f"template {template_id!r}", field="template_id", fix="call RegisterTemplate first"
            )
        return template

    def _session(self, tenant: str, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is not None and session.tenant != tenant:
            audit.warning("%s asked for a session of another tenant: unknown to him", tenant)
        if session is None or session.tenant != tenant:
            raise KVCacheError(Code.STALE_BOOT, "unknown session", field="session_id", fix="call Attach, then register again")
        return session

    def _find(self, tenant: str, turn_id: str) -> Turn:
        with self._lock:
            turn = self._turns.get(turn_id)
            owner, _ = self._finished.get(turn_id, (turn.tenant if turn is not None else "", None))
        if turn is not None and turn.tenant == tenant:
            return turn
        if owner and owner != tenant:
            audit.warning("%s asked for a turn of another tenant: unknown to him", tenant)
        if owner == tenant:
            raise KVCacheError(
                Code.LEASE_EXPIRED, f"turn {turn_id!r} is over", field="turn_id", fix="prefill, or open a new turn"
            )
        raise KVCacheError(Code.UNKNOWN_TURN, f"turn {turn_id!r}", field="turn_id", fix="call OpenTurn first")

    def _require(self, turn: Turn, *phases: Phase) -> None:
        if turn.phase is Phase.RELEASED or turn.deadline <= self._clock():
            raise KVCacheError(
                Code.LEASE_EXPIRED, "the turn's lease has run out", field="turn_id", fix="prefill, or open a new turn"
            )
        if turn.phase not in phases:
            raise KVCacheError(Code.STATE, f"the turn is {turn.phase.name.lower()}", field="turn_id", fix="open a new turn")

    def _weigh_cost(self, tenant: str, plan: Plan, geometry: Geometry) -> Plan:
        model = self._costs[Group(tenant, geometry.model_id)]
        exact = sum(len(s.span.token_ids) for s in plan.segments if s.action is Action.EXACT)
        fetched = assembly.fetched_tokens(plan) * geometry.token_bytes
        reuse = model.predict(len(plan.fresh), plan.prompt_tokens, fetched)
        dense = model.predict(plan.prompt_tokens - exact, plan.prompt_tokens, exact * geometry.token_bytes)
        plan = replace(plan, predicted_reuse=reuse, predicted_dense=dense)
        return bypass(plan, Reason.COST) if plan.approximated and reuse > self.settings.max_cost_ratio * dense > 0.0 else plan

    def _commit(self, update: Update) -> bool:
        """Pools first (one atomic step), then what only this node holds. Losing the catalog loses only the pools' part."""
        commit, committed = update.commit(), True
        if commit is not None:
            try:
                with self._telemetry.tracing.span("kvcache.commit", inserts=len(commit.inserts), uses=len(commit.uses)):
                    outcome = self._catalog.commit(commit)
                update.accepted = outcome.accepted
                self._catalog_up = True
            except KVCacheError:
                self._catalog_up = committed = False
                self._telemetry.commit_failures.inc()
        update.pack()
        with self._lock:
            update.keep_local()
        with self._learning:
            update.learn(self._lock)
        return committed

    def _repeat(self, done: Finished, settlement: Settlement) -> Settled:
        verdict, settled = done
        if verdict is not settlement.verdict:
            raise KVCacheError(
                Code.STATE, f"the turn was settled as {verdict.name.lower()}", field="verdict", fix="settle a turn once"
            )
        return replace(settled, repeated=True)

    def _release(self, turn: Turn, *, lost: bool = False) -> None:
        """lost: the worker has not said that it is done with the buffer."""
        with turn.lock:
            if turn.phase in (Phase.SETTLED, Phase.RELEASED):
                return
            turn.phase = Phase.RELEASED
        self._finish(turn, None, lost=lost)
        if turn.trial is None:
            policy, tokens = turn.plan.policy.value, turn.plan.prompt_tokens
            self._telemetry.turn(TurnReport(turn.tenant, "aborted", policy, "none", tokens, 0, 0, 0.0))

    def _finish(self, turn: Turn, done: Finished | None, *, lost: bool = False) -> None:
        turn.lease.release()
        turn.staged.clear()
        with self._lock:
            del self._turns[turn.turn_id]
            session = self._sessions.get(turn.session_id)
            if session is not None:
                del session.turns[turn.turn_id]
                session.requests = {r: known for r, known in session.requests.items() if known[0] != turn.turn_id}
                pool = session.shared if turn.buffer.path else session.private
                (pool.discard if lost else pool.give_back)(turn.buffer)
            self._finished[turn.turn_id] = turn.tenant, done
            while len(self._finished) > _REMEMBERED:
                self._finished.popitem(last=False)

    def _report(self, turn: Turn, settlement: Settlement) -> None:
        if turn.trial is not None:
            return  # it served nobody; audits have metrics of their own
        plan, geometry = turn.plan, turn.geometry
        fresh = len(plan.fresh)
        reused = plan.prompt_tokens - fresh
        dense = sum(len(s.fresh) for s in plan.segments if s.action is Action.DENSE)
        outcome, reason = "partial" if dense and reused else "dense" if dense else "reuse", plan.reason
        if settlement.verdict is Verdict.ABORTED:
            outcome = "aborted"
        elif settlement.verdict is Verdict.REJECTED:
            outcome, reason, reused = "dense", settlement.reason, 0
        name, policy, ttft = reason.name.lower(), plan.policy.value, settlement.ttft
        self._telemetry.turn(TurnReport(turn.tenant, outcome, policy, name, plan.prompt_tokens, reused, fresh - dense, ttft))
        if settlement.fetch > 0:
            self._telemetry.fetch.observe(settlement.fetch)
        if settlement.verdict is Verdict.ACCEPTED and settlement.first_forward > 0:
            overhead = max(0.0, settlement.ttft - settlement.first_forward)
            fetched = assembly.fetched_tokens(plan) * geometry.token_bytes
            with self._lock:
                cost = self._costs[Group(turn.tenant, geometry.model_id)]
                cost.report(fresh, plan.prompt_tokens, settlement.first_forward, fetched, overhead)

    def _anchors_changed(self, changes: Sequence[Change]) -> None:
        with self._lock:
            for change in changes:
                if change.anchor is None:
                    self._memory.drop_anchor(change.pool, change.sample)
        self._durable.keep_anchors(changes)
