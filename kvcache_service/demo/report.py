"""What the demo prints, draws and writes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from rich.console import Console
from rich.table import Table

from kvcache_service.demo.run import Measured
from kvcache_service.quality import quantile


class Summary(TypedDict):
    """One policy over all measured turns. speedup: dense TTFT / TTFT; *_reuse: shares."""

    token_reuse: float
    call_reuse: float
    speedup_p50: float
    kl_mean: float
    kl_p95: float
    top1: float


def summarise(turns: Sequence[Measured]) -> Summary:
    prompt = sum(t.answer.prompt_tokens for t in turns)
    return {
        "token_reuse": sum(t.answer.reused_tokens for t in turns) / prompt,
        "call_reuse": sum(t.answer.outcome == "reuse" for t in turns) / len(turns),
        "speedup_p50": statistics.median(t.ttft_dense / t.answer.ttft for t in turns),
        "kl_mean": statistics.fmean(t.kl for t in turns),
        "kl_p95": quantile([t.kl for t in turns], 0.95),
        "top1": statistics.fmean(t.top1 for t in turns),
    }


def as_json(policy: str, turns: Sequence[Measured]) -> dict[str, object]:
    """The documented layout; policies that ran beside the first stand under `beside`."""
    by_policy = {name: [t for t in turns if t.policy == name] for name in dict.fromkeys(t.policy for t in turns)}
    main = by_policy.pop(policy)
    out: dict[str, object] = {"policy": policy, "turns": [_row(t) for t in main], "summary": summarise(main)}
    out["beside"] = {name: {"turns": [_row(t) for t in rows], "summary": summarise(rows)} for name, rows in by_policy.items()}
    return out


def _row(turn: Measured) -> dict[str, object]:
    answer = turn.answer
    return {
        "agent": turn.agent,
        "prompt_tokens": answer.prompt_tokens,
        "outcome": answer.outcome,
        "reason": answer.reason,
        "ttft_dense_s": turn.ttft_dense,
        "ttft_s": answer.ttft,
        "overhead_s": answer.overhead,
        "first_forward_s": answer.first_forward,
        "reused_tokens": answer.reused_tokens,
        "recomputed_tokens": answer.recomputed_tokens,
        "kl": turn.kl,
        "top1": turn.top1,
    }


def show(console: Console, policy: str, turns: Sequence[Measured]) -> None:
    """A table per policy, and the totals."""
    for name in dict.fromkeys(t.policy for t in turns):
        rows = [t for t in turns if t.policy == name]
        beside = "" if name == policy else " (beside, for comparison)"
        table = Table(title=f"Policy {name}{beside}: {len(rows)} measured turns, medians per agent and outcome")
        for column in (
            "agent",
            "turns",
            "outcome",
            "reason",
            "prompt",
            "TTFT dense",
            "TTFT",
            "speedup",
            "overhead",
            "KL",
            "top-1",
        ):
            table.add_column(column, justify="left" if column in ("agent", "outcome", "reason") else "right")
        groups = dict.fromkeys((t.agent, t.answer.outcome, t.answer.reason) for t in rows)
        for agent, outcome, reason in groups:
            mine = [t for t in rows if (t.agent, t.answer.outcome, t.answer.reason) == (agent, outcome, reason)]
            table.add_row(
                agent,
                str(len(mine)),
                outcome,
                reason,
                f"{statistics.median(t.answer.prompt_tokens for t in mine):.0f}",
                f"{statistics.median(t.ttft_dense for t in mine) * 1e3:.0f} ms",
                f"{statistics.median(t.answer.ttft for t in mine) * 1e3:.0f} ms",
                f"{statistics.median(t.ttft_dense / t.answer.ttft for t in mine):.1f}x",
                f"{statistics.median(t.answer.overhead for t in mine) * 1e3:.0f} ms",
                f"{statistics.fmean(t.kl for t in mine):.4f}",
                f"{statistics.fmean(t.top1 for t in mine):.3f}",
            )
        console.print(table)
        total = summarise(rows)
        console.print(
            f"  total: reuse {total['token_reuse']:.0%} of prompt tokens, {total['call_reuse']:.0%} of calls; "
            f"TTFT {total['speedup_p50']:.1f}x faster (median); KL {total['kl_mean']:.4f} mean, {total['kl_p95']:.4f} p95; "
            f"top-1 {total['top1']:.3f}"
        )
        long = [t for t in rows if t.answer.outcome == "reuse" and t.answer.prompt_tokens >= 300]
        if long:
            console.print(
                f"  reuse turns with 300 tokens or more: {len(long)}; "
                f"TTFT {statistics.median(t.ttft_dense / t.answer.ttft for t in long):.1f}x faster (median); service, transport "
                f"and assembly {statistics.median(t.answer.overhead / t.answer.first_forward for t in long):.2f} of the first "
                "forward"
            )


def show_metrics(console: Console, metrics: Mapping[str, float]) -> None:
    """The service's own figures, from /metrics."""
    table = Table(title="Prometheus, all turns of this run", show_header=False)
    for name, value in metrics.items():
        if value and "_bucket" not in name and "_created" not in name:
            table.add_row(name, f"{value:,.4f}".rstrip("0").rstrip("."))
    console.print(table)


def draw(path: Path, policy: str, turns: Sequence[Measured]) -> None:
    """TTFT per agent, dense against reuse, and the KL of every turn."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(t.agent for t in turns))
    policies = list(dict.fromkeys(t.policy for t in turns))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    width = 0.8 / (1 + len(policies))
    series = [("dense prefill", [[t.ttft_dense for t in turns if t.agent == n and t.policy == policy] for n in names])]
    series += [(p, [[t.answer.ttft for t in turns if t.agent == n and t.policy == p] for n in names]) for p in policies]
    for index, (label, values) in enumerate(series):
        places = [i + index * width for i in range(len(names))]
        left.bar(places, [1e3 * statistics.median(v) for v in values], width, label=label)
    left.set_xticks([i + 0.4 - width / 2 for i in range(len(names))], names)
    left.set_ylabel("TTFT, median (ms)")
    left.set_title("Time to first token, everything counted")
    left.legend()
    for index, p in enumerate(policies):
        for place, name in enumerate(names):
            kls = [max(t.kl, 1e-7) for t in turns if t.agent == name and t.policy == p]
            right.scatter([place + 0.15 * index] * len(kls), kls, s=14, color=f"C{index + 1}", label=p if place == 0 else None)
    right.set_yscale("log")
    right.set_xticks(range(len(names)), names)
    right.set_ylabel("KL to dense (nats, mean of 32 tokens)")
    right.set_title("Distance from dense output, one dot per turn")
    right.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
