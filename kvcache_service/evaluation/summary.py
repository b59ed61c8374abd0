"""From rows to the figures of the documented JSON: means with bootstrap intervals, rates, and paired comparisons."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

import torch
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.evaluation.controls import FACTOR
from kvcache_service.evaluation.runner import Measured, Row
from kvcache_service.evaluation.scenes import CONTINUATION
from kvcache_service.quality import quantile

_RESAMPLES = 2000
Figures = dict[str, object]


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    data = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(data), (_RESAMPLES, len(data)), generator=torch.Generator().manual_seed(seed))
    means = data[draws].mean(1)
    return float(means.quantile(0.025)), float(means.quantile(0.975))


def figures(measured: Measured, target_kl: float, pool_bytes: dict[str, float]) -> dict[str, Figures]:
    """Per policy; pool_bytes: what each policy's pools hold at the end."""
    by_policy = {name: [r for r in measured.rows if r.policy == name] for name in dict.fromkeys(r.policy for r in measured.rows)}
    out = {}
    for name, rows in by_policy.items():
        plain, _, budget = name.partition(":")
        same_budget = f"reposition:{budget}" if budget else "recompute" if plain in ("guarded", "ungated") else "reposition"
        moved = {(r.scene, r.agent): r.kl for r in by_policy.get(same_budget, by_policy.get("reposition", []))}
        out[name] = _policy(rows, measured.others, moved, target_kl) | {
            "pool_bytes": pool_bytes["anchors"] if plain in ("paper", "reference") else pool_bytes.get(plain, 0)
        }
    return out


def _policy(rows: list[Row], others: list[Row], moved: dict[tuple[int, str], float], target_kl: float) -> Figures:
    kls, tops = [r.kl for r in rows], [r.top1 for r in rows]
    prompt = sum(r.answer.prompt_tokens for r in rows)
    accepted = [r for r in rows if r.answer.outcome != "dense"]
    refused = [r for r in rows if r.refused_kl is not None]
    paired = [(r.kl, moved[r.scene, r.agent]) for r in rows if (r.scene, r.agent) in moved]
    ratios = [r.answer.ttft / r.ttft_dense for r in rows]
    calls = len(rows) + len(others)
    return {
        "n": len(rows),
        "kl_mean": statistics.fmean(kls),
        "kl_mean_interval": interval(kls),
        "kl_p95": quantile(kls, 0.95),
        "top1": statistics.fmean(tops),
        "top1_interval": interval(tops),
        "first_divergence_p50": statistics.median(CONTINUATION if r.divergence is None else r.divergence for r in rows),
        "identical": sum(r.divergence is None for r in rows) / len(rows),
        "nll_delta": statistics.fmean(r.nll for r in rows),
        "perplexity_ratio": math.exp(statistics.fmean(r.nll for r in rows)),
        "token_reuse": sum(r.answer.reused_tokens for r in rows) / prompt,
        "call_reuse": sum(r.answer.outcome == "reuse" for r in rows) / calls,
        "fresh_tokens": statistics.fmean(r.answer.prompt_tokens - r.answer.reused_tokens for r in rows),
        "harm_rate": sum(kl > 1.01 * base + 1e-5 for kl, base in paired) / len(paired) if paired else 0.0,
        "accept": len(accepted) / len(rows),
        "wrong_accept": sum(r.kl > target_kl for r in accepted) / len(rows),
        "wrong_reject": sum((r.refused_kl or 0.0) <= target_kl for r in refused) / len(rows),
        "ttft_ratio_p50": quantile(ratios, 0.5),
        "ttft_ratio_p90": quantile(ratios, 0.9),
        "reasons": dict(Counter(r.answer.reason for r in rows if r.answer.reason != "none")),
    }


def paired(rows: Sequence[Row], mine: str) -> dict[str, Figures]:
    """Mean KL of `mine` minus that of every other policy on the same turns, with its 95 % interval."""
    kl = {(r.policy, r.scene, r.agent): r.kl for r in rows}
    turns = [(r.scene, r.agent) for r in rows if r.policy == mine]
    out: dict[str, Figures] = {}
    for other in dict.fromkeys(r.policy for r in rows if r.policy != mine):
        differences = [kl[mine, *t] - kl[other, *t] for t in turns if (other, *t) in kl]
        if differences:
            out[other] = {"difference": statistics.fmean(differences), "interval": interval(differences)}
    return out


def controls(measured: Measured) -> dict[str, Figures]:
    """Spoilt KV beside moved KV; passed: far worse, as it must be."""
    out: dict[str, Figures] = {}
    for name, pairs in measured.controls.items():
        if pairs:
            spoilt, moved = (statistics.fmean(side) for side in zip(*pairs, strict=True))
            out[name] = {"n": len(pairs), "kl_mean": spoilt, "reposition_kl_mean": moved, "passed": spoilt > FACTOR * moved}
    return out


def calibration(value: pb.Calibration) -> Figures:
    return {
        "usable": value.usable,
        "signal": value.signal,
        "residual_limit": value.residual_limit,
        "ratio_limit": value.ratio_limit,
        "novelty_limit": value.novelty_limit,
        "reposition": value.reposition,
        "audits": value.audits,
        "kl_p95": value.kl_p95,
        "top1": value.top1,
        "accepted": value.accepted,
        "auc": dict(value.auc),
        "min_samples": value.min_samples,
    }


def turn(row: Row) -> Figures:
    """One turn under one policy, for whoever wants to look closer."""
    answer = row.answer
    return {
        "scene": row.scene,
        "agent": row.agent,
        "policy": row.policy,
        "outcome": answer.outcome,
        "reason": answer.reason,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "ttft_s": answer.ttft,
        "ttft_dense_s": row.ttft_dense,
        "overhead_s": answer.overhead,
        "kl": row.kl,
        "top1": row.top1,
        "nll_delta": row.nll,
        "divergence": row.divergence,
        "refused_kl": row.refused_kl,
        "residual": answer.residual,
        "unaided": answer.unaided,
        "novelty": answer.novelty,
    }
