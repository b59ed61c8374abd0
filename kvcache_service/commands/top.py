"""`kvcache top`: what a running service does now, from its metrics."""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from kvcache_service.commands import common

Samples = Mapping[str, float]


@dataclass(frozen=True)
class Figures:
    """turns, reuse, TTFT and fallbacks are of the time looked at; the rest is as it stands. None: nothing to tell.

    ttft: outcome -> median in seconds. fallbacks: reason -> turns.
    """

    turns: int
    token_reuse: float | None
    call_reuse: float | None
    ttft: dict[str, float | None]
    fallbacks: dict[str, float]
    sessions: int
    open_turns: int
    pools: int
    anchors: int
    calibrated_templates: int
    slots: int
    slots_off: int
    host_used_bytes: int
    host_budget_bytes: int
    catalog_up: bool


def figures(before: Samples, now: Samples) -> Figures:
    """before: the samples of an earlier look; {}: everything since the service began."""
    grown = {name: value - before.get(name, 0.0) for name, value in now.items()}
    turns = _by(grown, "kvcache_turns_total", "outcome")
    asked = sum(turns.values()) - turns.get("aborted", 0.0)
    tokens = grown["kvcache_prompt_tokens_total"]
    return Figures(
        turns=int(sum(turns.values())),
        token_reuse=grown["kvcache_reused_tokens_total"] / tokens if tokens else None,
        call_reuse=(turns.get("reuse", 0.0) + turns.get("partial", 0.0)) / asked if asked else None,
        ttft={outcome: _median(grown, outcome) for outcome in ("reuse", "partial", "dense")},
        fallbacks={reason: n for reason, n in _by(grown, "kvcache_fallbacks_total", "reason").items() if n},
        sessions=int(now["kvcache_sessions"]),
        open_turns=int(now["kvcache_open_turns"]),
        pools=int(now["kvcache_pools"]),
        anchors=int(now["kvcache_anchors"]),
        calibrated_templates=int(now["kvcache_templates_calibrated"]),
        slots=int(now["kvcache_slots"]),
        slots_off=int(now["kvcache_slots_off"]),
        host_used_bytes=int(now["kvcache_host_used_bytes"]),
        host_budget_bytes=int(now["kvcache_host_budget_bytes"]),
        catalog_up=bool(now["kvcache_catalog_up"]),
    )


def top(
    metrics: Annotated[str, typer.Option(help="Where the service serves its metrics.")] = "http://127.0.0.1:9464/metrics",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One look, at everything since the service began.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Machine-readable, one line a look.")] = False,
) -> None:
    """Watch a running service: reuse, time to first token, fallbacks, pools and memory. Ends with Ctrl-C.

    Example: kvcache top --metrics http://cache:9464/metrics
    """
    from rich.live import Live

    from kvcache_service.evaluation.service import read_metrics

    screen = common.console()
    with Live(console=screen, auto_refresh=False) as live:
        before: Samples = {}
        while True:
            try:
                now = read_metrics(metrics)
            except OSError as error:
                typer.echo(f"error: {metrics}: {error}", err=True)
                raise typer.Exit(1) from error
            if _finished(now) < _finished(before):
                before = {}  # the service was started anew
            found = figures(before, now)
            if json_output:
                typer.echo(json.dumps(asdict(found)))
            else:
                live.update(_table(found, f"last {every:g} s" if before else "since the start"), refresh=True)
            if once:
                return
            before = now
            time.sleep(every)


def _by(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Sums by one label's values."""
    found: dict[str, float] = defaultdict(float)
    for series, value in samples.items():
        if series.startswith(f"{name}{{"):
            found[re.findall(rf'{label}="(.*?)"', series)[0]] += value
    return dict(found)


def _finished(samples: Samples) -> float:
    return sum(_by(samples, "kvcache_turns_total", "outcome").values())


def _median(samples: Samples, outcome: str) -> float | None:
    """As Prometheus has it: linear within the bucket; the last bucket's lower end where it lies beyond all."""
    buckets = {}
    for series, count in samples.items():
        if series.startswith("kvcache_ttft_seconds_bucket{") and f'outcome="{outcome}"' in series:
            buckets[float(re.findall(r'le="(.*?)"', series)[0])] = count
    rank = max(buckets.values(), default=0.0) / 2
    if not rank:
        return None
    low = below = 0.0
    for bound, count in sorted(buckets.items()):
        if count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return None


def _table(found: Figures, span: str) -> Any:
    from rich.table import Table

    table = Table(title=f"kvcache, {span}", show_header=False)
    rows = {
        "turns": f"{found.turns}",
        "reused": f"{_percent(found.token_reuse)} of prompt tokens, {_percent(found.call_reuse)} of turns",
        "first token": ", ".join(f"{name} {_milliseconds(t)}" for name, t in found.ttft.items()),
        "fallbacks": ", ".join(f"{reason} {n:.0f}" for reason, n in sorted(found.fallbacks.items())) or "none",
        "open": f"{found.open_turns} turns of {found.sessions} sessions",
        "pools": f"{found.pools} with {found.anchors} anchors; {found.slots} slots, {found.slots_off} switched to dense",
        "calibrated": f"{found.calibrated_templates} templates",
        "host memory": f"{found.host_used_bytes / 2**20:,.0f} of {found.host_budget_bytes / 2**20:,.0f} MiB",
        "metadata store": "answers" if found.catalog_up else "does not answer",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.0f} ms"
