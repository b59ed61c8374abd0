"""Sessions and turns: who holds what, until when. State only; the engine's lock guards it."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvcache_service.engine.plan import Plan, Reason, Trial
from kvcache_service.geometry import Geometry
from kvcache_service.kernels.cpu import Rotations
from kvcache_service.prompt import Template
from kvcache_service.tiers.host import Lease
from kvcache_service.tiers.shared import Buffer, BufferPool


class Phase(enum.Enum):
    """Observe -> Plan -> AnchorMatch -> Align -> Approximate -> Act -> Verify -> Update, or Fallback -> Update.

    PLANNED    samples observed, anchors matched, tensors leased
    ASSEMBLED  re-aligned and approximated KV lies in the buffer; the worker acts
    SETTLED    verified and updated (or fallen back), everything given back
    RELEASED   aborted or expired: nothing changed, everything given back
    """

    PLANNED = enum.auto()
    ASSEMBLED = enum.auto()
    SETTLED = enum.auto()
    RELEASED = enum.auto()


class Verdict(enum.Enum):
    """Names equal the protocol's."""

    ACCEPTED = enum.auto()
    REJECTED = enum.auto()
    ABORTED = enum.auto()
    AUDITED = enum.auto()


@dataclass(frozen=True)
class Distance:
    """Of a trial from dense: mean KL in nats and top-1 agreement over `tokens` next-token positions."""

    kl: float
    top1: float
    tokens: int

    @property
    def sound(self) -> bool:
        return math.isfinite(self.kl) and self.kl >= 0 and 0 <= self.top1 <= 1 and self.tokens > 0


@dataclass(frozen=True)
class Probe:
    """Squared residuals of one segment's probe tokens, relative to the energy of the fresh KV."""

    segment: int
    corrected: float
    repositioned: float


@dataclass(frozen=True)
class Settlement:
    """What the worker says of a turn. times in seconds."""

    verdict: Verdict
    reason: Reason
    finished: bool
    output_token_ids: tuple[int, ...]
    output_kv_tokens: int
    probes: Sequence[Probe] = ()
    ttft: float = 0.0
    first_forward: float = 0.0
    fetch: float = 0.0
    distance: Distance | None = None


@dataclass(frozen=True)
class Settled:
    """What became of it."""

    candidates: int
    accepted: int
    refused: tuple[str, ...]
    committed: bool
    repeated: bool = False


@dataclass(eq=False)
class Turn:
    """One agent call in flight. staged: observed position-free KV by first column."""

    turn_id: str
    tenant: str
    session_id: str
    template: Template
    geometry: Geometry
    rotations: Rotations
    plan: Plan
    reserve: int
    buffer: Buffer
    lease: Lease
    deadline: float
    trial: Trial | None = None
    audit: bool = False  # the worker is asked for a trial of the same samples
    phase: Phase = Phase.PLANNED
    assembly_seconds: float = 0.0
    staged: dict[int, Tensor] = field(default_factory=dict)
    observed: int = 0  # columns [0, observed) end where the farthest observation did
    verdict: Verdict | None = None
    result: Settled | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def holdout(self) -> bool:
        """A dense turn that will be audited must not have been learned from."""
        return self.audit and not self.plan.approximated

    @property
    def columns(self) -> int:
        return self.plan.prompt_tokens + self.reserve + len(self.plan.probe)

    @property
    def tensor(self) -> Tensor:
        return self.buffer.view(self.geometry.shape(self.columns), self.geometry.dtype)


@dataclass(eq=False)
class Session:
    """One attached worker: its buffers and its turns end with it."""

    session_id: str
    tenant: str
    shared: BufferPool
    private: BufferPool
    turns: dict[str, Turn] = field(default_factory=dict)
    requests: dict[str, tuple[str, object]] = field(default_factory=dict)  # request id -> turn id, what was asked

    @property
    def held_bytes(self) -> int:
        return self.shared.held_bytes + self.private.held_bytes
