"""Between protocol messages and domain values. Enum names agree, so the conversion is by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.engine.engine import ModelStatus, Opened
from kvcache_service.engine.plan import Action, Blending, Reason, Trial
from kvcache_service.engine.pools import Holding, Selection
from kvcache_service.engine.sessions import Distance, Phase, Probe, Settlement, Turn, Verdict
from kvcache_service.engine.trust import TemplateStatus
from kvcache_service.errors import Code, KVCacheError, invalid
from kvcache_service.geometry import Geometry, Pairing, Rope
from kvcache_service.prompt import Fixed, Placeholder, Policy, Role, Template
from kvcache_service.quality import Calibration
from kvcache_service.tenants import TenantReport
from kvcache_service.tiers.host import Pin

MAX_EXTENT = 8192  # layers, heads, dimensions of a head

_DTYPES: dict[pb.DType, torch.dtype] = {
    pb.DTYPE_FLOAT32: torch.float32,
    pb.DTYPE_FLOAT16: torch.float16,
    pb.DTYPE_BFLOAT16: torch.bfloat16,
}
_POLICIES: dict[int, Policy] = {
    pb.POLICY_OFF: Policy.OFF,
    pb.POLICY_PAPER: Policy.PAPER,
    pb.POLICY_GUARDED: Policy.GUARDED,
    pb.POLICY_REPOSITION: Policy.REPOSITION,
    pb.POLICY_EXACT: Policy.EXACT,
}
_PINS: dict[int, Pin] = {pb.PIN_NONE: Pin.NONE, pb.PIN_SOFT: Pin.SOFT, pb.PIN_HARD: Pin.HARD}
_PAIRINGS: dict[int, Pairing] = {pb.PAIRING_HALF_SPLIT: Pairing.HALF_SPLIT, pb.PAIRING_INTERLEAVED: Pairing.INTERLEAVED}


def dtype(value: pb.DType) -> torch.dtype:
    if value not in _DTYPES:
        raise invalid("dtype", f"{value}", "send FLOAT32, FLOAT16 or BFLOAT16")
    return _DTYPES[value]


def policy(value: int) -> Policy | None:
    """None: the template's own."""
    if value == pb.POLICY_UNSPECIFIED:
        return None
    if value not in _POLICIES:
        raise invalid("policy", f"{value}", "send OFF, PAPER, GUARDED, REPOSITION or EXACT")
    return _POLICIES[value]


def pin(value: int) -> Pin | None:
    """None: as it is."""
    if value == pb.PIN_UNSPECIFIED:
        return None
    if value not in _PINS:
        raise invalid("pin", f"{value}", "send NONE, SOFT or HARD")
    return _PINS[value]


def geometry(request: pb.RegisterModelRequest) -> Geometry:
    if request.attention != "full":
        raise KVCacheError(
            Code.UNSUPPORTED_MODEL,
            f"attention {request.attention!r}",
            field="attention",
            fix="only full attention is supported (no MLA, sliding windows or recurrence); prefill without the cache",
        )
    for name in ("layers", "kv_heads", "head_dim"):
        if getattr(request, name) > MAX_EXTENT:
            raise invalid(name, f"{getattr(request, name)}", f"send at most {MAX_EXTENT}")
    if request.rope.pairing not in _PAIRINGS:
        raise invalid("rope.pairing", f"{request.rope.pairing}", "send HALF_SPLIT or INTERLEAVED")
    rope = request.rope
    return Geometry(
        name=request.name,
        layers=request.layers,
        kv_heads=request.kv_heads,
        head_dim=request.head_dim,
        dtype=dtype(request.dtype),
        rope=Rope(rope.type, tuple(rope.inv_freq), rope.attention_scaling, _PAIRINGS[rope.pairing], rope.rotary_dim),
        weights_digest=request.weights_digest,
        tokenizer_digest=request.tokenizer_digest,
        vocab_size=request.vocab_size,
        max_positions=request.max_positions,
        tp_rank=request.tp_rank,
        tp_size=request.tp_size,
    )


def template(request: pb.RegisterTemplateRequest) -> Template:
    segments: list[Fixed | Placeholder] = []
    for ordinal, segment in enumerate(request.segments):
        kind = segment.WhichOneof("kind")
        if kind is None:
            raise invalid(f"segments[{ordinal}]", "neither fixed nor placeholder", "set one of them")
        segments.append(Fixed(tuple(segment.fixed.ids)) if kind == "fixed" else Placeholder(segment.placeholder))
    role = Role.DENSE if request.decision == pb.DECISION_DENSE else Role.REUSE
    return Template(request.model_id, tuple(segments), role, policy(request.policy) or Policy.GUARDED, request.produces)


def samples(request: pb.OpenTurnRequest) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    for sample in request.samples:
        if sample.placeholder in out:
            raise invalid("samples", f"{sample.placeholder!r} comes twice", "send one sample per placeholder name")
        out[sample.placeholder] = tuple(sample.token_ids)
    return out


def trial(request: pb.OpenTurnRequest) -> Trial | None:
    """None: an ordinary turn."""
    if not request.HasField("trial"):
        return None
    value, blending = request.trial, request.trial.blending
    if blending.HasField("gamma") and not blending.gamma > 0:
        raise invalid("trial.blending.gamma", f"{blending.gamma}", "send a positive number")
    return Trial(
        boundary=value.boundary if value.HasField("boundary") else None,
        trailing=value.trailing if value.HasField("trailing") else None,
        ignore_exact=value.ignore_exact,
        blending=Blending(
            gamma=blending.gamma if blending.HasField("gamma") else None,
            max_anchors=blending.max_anchors,
            reference_weights=blending.reference_weights,
            absolute_frame=blending.absolute_frame,
            rotation=not blending.no_rotation,
            placeholder_offsets=not blending.no_placeholder_offsets,
            following_offsets=not blending.no_following_offsets,
        ),
    )


def opened(value: Opened, lease_seconds: float) -> pb.OpenTurnReply:
    turn, plan = value.turn, value.turn.plan
    column = plan.prompt_tokens + turn.reserve
    segments = []
    for segment in plan.segments:
        segments.append(
            pb.SegmentPlan(
                start=segment.span.start,
                tokens=len(segment.span.token_ids),
                action=f"ACTION_{segment.action.name}",
                reason="REASON_UNSPECIFIED" if segment.reason is Reason.NONE else f"REASON_{segment.reason.name}",
                fresh=segment.fresh,
                anchors=segment.anchors,
                probe=column,
                probed=segment.probe,
                corrected=segment.corrected,
                novelty=segment.novelty,
            )
        )
        column += len(segment.probe)
    return pb.OpenTurnReply(
        turn_id=turn.turn_id,
        segments=segments,
        prompt_tokens=plan.prompt_tokens,
        claimable_prefix=plan.claimable_prefix,
        policy=f"POLICY_{plan.policy.name}",
        buffer_path=turn.buffer.path,
        buffer_bytes=turn.buffer.capacity,
        buffer_tokens=turn.columns,
        lease_seconds=lease_seconds,
        predicted_reuse_seconds=plan.predicted_reuse,
        predicted_dense_seconds=plan.predicted_dense,
        residual_limit=value.limits.residual,
        ratio_limit=value.limits.ratio,
        match_seconds=value.match_seconds,
        audit=turn.audit,
        fetched=pb.FetchSummary(assembly_seconds=turn.assembly_seconds) if turn.phase is Phase.ASSEMBLED else None,
    )


def fetch_ranges(turn: Turn) -> list[tuple[int, int]]:
    """Columns that a stream carries: those of cached segments and the probe columns."""
    cached = [(s.span.start, s.span.end) for s in turn.plan.segments if s.action is not Action.DENSE]
    return [*cached, (turn.plan.prompt_tokens + turn.reserve, turn.columns)]


def settlement(request: pb.SettleTurnRequest) -> Settlement:
    if request.verdict not in (pb.VERDICT_ACCEPTED, pb.VERDICT_REJECTED, pb.VERDICT_ABORTED, pb.VERDICT_AUDITED):
        raise invalid("verdict", f"{request.verdict}", "send ACCEPTED, REJECTED, ABORTED or AUDITED")
    sent = request.distance
    distance = Distance(sent.kl, sent.top1, sent.tokens) if request.HasField("distance") else None
    return Settlement(
        verdict=Verdict[pb.Verdict.Name(request.verdict).removeprefix("VERDICT_")],
        reason=_reason(request.reason),
        finished=request.finish_reason != pb.FINISH_REASON_UNSPECIFIED,
        output_token_ids=tuple(request.output_token_ids),
        output_kv_tokens=request.output_kv_tokens,
        probes=[Probe(p.segment, p.corrected, p.repositioned) for p in request.probes],
        ttft=request.timing.ttft_seconds,
        first_forward=request.timing.first_forward_seconds,
        fetch=request.timing.fetch_seconds,
        distance=distance,
    )


def _reason(number: int) -> Reason:
    if number == pb.REASON_UNSPECIFIED:
        return Reason.NONE
    if number not in pb.Reason.values():
        raise invalid("reason", f"{number}", "send a value of the Reason enum")
    return Reason[pb.Reason.Name(number).removeprefix("REASON_")]


def calibration(value: Calibration) -> pb.Calibration:
    return pb.Calibration(
        usable=value.usable,
        signal=value.signal,
        residual_limit=value.residual_limit,
        ratio_limit=value.ratio_limit,
        novelty_limit=value.novelty_limit,
        reposition=value.reposition,
        audits=value.audits,
        kl_p95=value.kl_p95,
        top1=value.top1,
        accepted=value.accepted,
        target_kl=value.target.kl,
        target_top1=value.target.top1,
        auc=value.auc,
        min_samples=value.min_samples,
    )


def template_status(value: TemplateStatus) -> pb.TemplateStatus:
    template = value.template
    return pb.TemplateStatus(
        template_id=template.template_id,
        model_id=template.model_id,
        produces=template.produces,
        decision=f"DECISION_{template.role.name}",
        policy=f"POLICY_{template.policy.name}",
        slots=[
            pb.SlotStatus(
                ordinal=s.slot.ordinal,
                placeholder=s.slot.pool.placeholder,
                origin=s.slot.pool.origin,
                samples=s.samples,
                error=s.error,
                bytes=s.nbytes,
                off=s.quality.off,
                audits=s.quality.audits,
                kl_mean=s.quality.kl_mean,
                kl_p95=s.quality.kl_p95,
                top1=s.quality.top1,
            )
            for s in value.slots
        ],
        calibration=calibration(value.calibration) if value.calibration else None,
        audits=value.audits,
        segments=[
            pb.SegmentStatus(fixed_tokens=len(s.token_ids)) if isinstance(s, Fixed) else pb.SegmentStatus(placeholder=s.name)
            for s in template.segments
        ],
    )


def model_status(value: ModelStatus) -> pb.ModelStatus:
    geometry = value.geometry
    return pb.ModelStatus(
        model_id=geometry.model_id,
        name=geometry.name,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=next(number for number, known in _DTYPES.items() if known == geometry.dtype),
        token_bytes=geometry.token_bytes,
        templates=value.templates,
        host_bytes=value.host_bytes,
    )


def selection(value: pb.AnchorSelection) -> Selection:
    return Selection(value.model_id, value.template_id, value.placeholder, value.sample)


def pooled_sample(value: Holding) -> pb.PooledSample:
    anchor, base = value.anchor, value.base
    return pb.PooledSample(
        model_id=value.pool.group.model_id,
        placeholder=value.pool.placeholder,
        origin=value.pool.origin,
        sample=value.sample,
        anchor=anchor is not None,
        tokens=anchor.length if anchor else base.covered if base else 0,
        sequence=anchor.sequence if anchor else 0,
        uses=anchor.uses if anchor else 0,
        slots=sorted(anchor.slots) if anchor else (),
        taint=base.taint if base else 0,
        host_bytes=value.nbytes,
        pin=f"PIN_{value.pin.name}",
    )


def tenant_quotas(report: TenantReport, limits: Mapping[str, int | None]) -> pb.TenantQuotas:
    quotas = [pb.Quota(name=name, used=used, limit=limits[name] or 0) for name, used in report.held.items()]
    return pb.TenantQuotas(tenant=report.tenant, quotas=quotas)
