"""Writes the dashboards beside this file: `python deploy/grafana/build.py`. A test compares what is checked in.

A panel is a line: title, unit, queries with their legends. Grafana's JSON is made from it, so that all panels look alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).with_name("dashboards")
WINDOW = "[$__rate_interval]"


class Panel(NamedTuple):
    """unit: Grafana's name of it. queries: legend -> PromQL; $w stands for the window of a rate."""

    title: str
    unit: str
    queries: dict[str, str]
    about: str = ""


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    """Median and tail of a histogram."""
    keep, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return {
        f"{name}{legend}": f"histogram_quantile({q}, sum by ({keep}) (rate({metric}_bucket$w)))"
        for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }


def ratio(part: str, whole: str, by: str = "") -> str:
    """Of two rates."""
    over = f"sum by ({by})" if by else "sum"
    return f"{over} (rate({part}$w)) / {over} (rate({whole}$w))"


GATES = "uncalibrated|warming|novelty|residual|quality|entropy|length|taint|cost"
DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "overview": (
        "KV cache: overview",
        [
            Panel(
                "Reuse rate",
                "percentunit",
                {
                    "tokens": ratio("kvcache_reused_tokens_total", "kvcache_prompt_tokens_total"),
                    "calls": ratio('kvcache_turns_total{outcome="reuse"}', 'kvcache_turns_total{outcome!="aborted"}'),
                },
                "Prompt tokens that no worker had to compute, and calls that reused all that they could.",
            ),
            Panel(
                "Turns", "reqps", {"{{outcome}}": "sum by (outcome) (rate(kvcache_turns_total$w))"}, "Outcomes add up to turns."
            ),
            Panel(
                "Time to first token, median",
                "s",
                {"{{outcome}}": "histogram_quantile(0.5, sum by (le, outcome) (rate(kvcache_ttft_seconds_bucket$w)))"},
                "As workers measured it, everything included.",
            ),
            Panel("Time to first token, all outcomes", "s", quantiles("kvcache_ttft_seconds")),
            Panel(
                "Fallbacks",
                "reqps",
                {"{{reason}}": "sum by (reason) (rate(kvcache_fallbacks_total$w))"},
                "Turns with a dense segment, by the first reason.",
            ),
            Panel("Refused calls", "reqps", {"{{code}}": "sum by (code) (rate(kvcache_errors_total$w))"}),
            Panel(
                "Sessions and open turns", "short", {"sessions": "sum(kvcache_sessions)", "open turns": "sum(kvcache_open_turns)"}
            ),
            Panel("Metadata store", "bool_on_off", {"up": "min(kvcache_catalog_up)"}),
        ],
    ),
    "quality": (
        "KV cache: quality",
        [
            Panel(
                "KL to dense of audited turns",
                "none",
                quantiles("kvcache_audit_kl"),
                "Nats; the target is `target_kl` at the 95 % quantile.",
            ),
            Panel(
                "KL to dense, mean",
                "none",
                {"{{policy}}": ratio("kvcache_audit_kl_sum", "kvcache_audit_kl_count", "policy")},
            ),
            Panel(
                "Top-1 agreement with dense",
                "percentunit",
                {"{{policy}}": ratio("kvcache_audit_top1_total", "kvcache_audit_kl_count", "policy")},
            ),
            Panel("Audits", "reqps", {"{{policy}}": "sum by (policy) (rate(kvcache_audit_kl_count$w))"}),
            Panel("Calibrated templates", "short", {"reuse allowed": "sum(kvcache_templates_calibrated)"}),
            Panel("Slots", "short", {"with a predictor": "sum(kvcache_slots)", "switched to dense": "sum(kvcache_slots_off)"}),
            Panel(
                "Gates",
                "reqps",
                {"{{reason}}": f'sum by (reason) (rate(kvcache_fallbacks_total{{reason=~"{GATES}"}}$w))'},
                "Decisions against reuse.",
            ),
            Panel(
                "Worst slots, mean KL", "none", {"{{template}} {{placeholder}}": "topk(8, kvcache_slot_audit_kl) or vector(0)"}
            ),
        ],
    ),
    "pools": (
        "KV cache: pools and tiers",
        [
            Panel(
                "Host tier",
                "bytes",
                {
                    "used": "sum(kvcache_host_used_bytes)",
                    "budget": "sum(kvcache_host_budget_bytes)",
                    "pinned": "sum(kvcache_host_pinned_bytes)",
                    "leased": "sum(kvcache_leased_bytes)",
                },
            ),
            Panel(
                "Largest free block",
                "bytes",
                {
                    "block": "min(kvcache_host_largest_free_bytes)",
                    "free": "min(kvcache_host_budget_bytes - kvcache_host_used_bytes)",
                },
            ),
            Panel("Evictions", "short", {"a second": "sum(deriv(kvcache_host_evictions$w))"}),
            Panel("Leases", "short", {"leases": "sum(kvcache_leases)", "open turns": "sum(kvcache_open_turns)"}),
            Panel(
                "Disk tier",
                "bytes",
                {
                    "used": "sum(kvcache_disk_used_bytes)",
                    "budget": "sum(kvcache_disk_budget_bytes)",
                    "waits": "sum(kvcache_disk_pending_bytes)",
                },
            ),
            Panel("Disk trouble", "short", {"refused": "sum(kvcache_disk_refused)", "damaged": "sum(kvcache_disk_damaged)"}),
            Panel("Pools and anchors", "short", {"pools": "sum(kvcache_pools)", "anchors": "sum(kvcache_anchors)"}),
            Panel(
                "What was learned",
                "bytes",
                {"predictors": "sum(kvcache_predictor_bytes)", "anchors": "sum(kvcache_anchor_bytes)"},
            ),
            Panel("Candidates", "reqps", {"{{result}}": "sum by (result) (rate(kvcache_candidates_total$w))"}),
            Panel("Session buffers", "bytes", {"shared and private": "sum(kvcache_buffer_bytes)"}),
        ],
    ),
    "latency": (
        "KV cache: latency",
        [
            Panel("Match", "s", quantiles("kvcache_match_seconds"), "Plan and anchor match of one turn."),
            Panel("Assembly", "s", quantiles("kvcache_assembly_seconds"), "Align and approximate one turn into its buffer."),
            Panel("Fetch", "s", quantiles("kvcache_fetch_seconds"), "As workers saw it, assembly included."),
            Panel("Settle", "s", quantiles("kvcache_settle_seconds"), "Verify and update, the metadata store included."),
            Panel("Time to first token", "s", quantiles("kvcache_ttft_seconds", "outcome")),
            Panel("Lost commits", "reqps", {"commits": "sum(rate(kvcache_catalog_commit_failures_total$w))"}),
        ],
    ),
    "tenants": (
        "KV cache: tenants",
        [
            Panel("Calls", "reqps", {"{{tenant}}": "sum by (tenant) (rate(kvcache_tenant_calls_total$w))"}),
            Panel("Refused calls", "reqps", {"{{tenant}}": "sum by (tenant) (rate(kvcache_tenant_refused_total$w))"}),
            Panel("Prompt tokens", "short", {"{{tenant}}": "sum by (tenant) (rate(kvcache_tenant_prompt_tokens_total$w))"}),
            Panel(
                "Reuse rate",
                "percentunit",
                {"{{tenant}}": ratio("kvcache_tenant_reused_tokens_total", "kvcache_tenant_prompt_tokens_total", "tenant")},
                "Prompt tokens that no worker had to compute.",
            ),
            Panel("Host tier", "bytes", {"{{tenant}}": "sum by (tenant) (kvcache_tenant_host_bytes)"}),
            Panel(
                "Quotas",
                "percentunit",
                {"{{tenant}} {{quota}}": "max by (tenant, quota) (kvcache_tenant_quota_share)"},
                "What is in use of each; 0 without a limit. A full share of the host tier is no trouble: it evicts its own.",
            ),
            Panel("Sessions", "short", {"{{tenant}}": "sum by (tenant) (kvcache_tenant_sessions)"}),
            Panel("Open turns", "short", {"{{tenant}}": "sum by (tenant) (kvcache_tenant_open_turns)"}),
        ],
    ),
}


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    """Grafana's own form, two panels in a row."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "uid": f"kvcache-{uid}",
        "title": title,
        "tags": ["kvcache"],
        "timezone": "browser",
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]},
        "links": [{"type": "dashboards", "tags": ["kvcache"], "title": "KV cache", "asDropdown": False, "keepTime": True}],
        "panels": [
            {
                "id": number + 1,
                "title": panel.title,
                "description": panel.about,
                "type": "timeseries",
                "datasource": source,
                "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": [
                    {
                        "refId": chr(ord("A") + i),
                        "datasource": source,
                        "expr": query.replace("$w", WINDOW),
                        "legendFormat": legend,
                    }
                    for i, (legend, query) in enumerate(panel.queries.items())
                ],
            }
            for number, panel in enumerate(panels)
        ],
    }


def rendered() -> dict[Path, str]:
    """What belongs into every file."""
    return {
        FOLDER / f"{uid}.json": json.dumps(dashboard(uid, title, panels), indent=1) + "\n"
        for uid, (title, panels) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in rendered().items():
        path.write_text(text)
