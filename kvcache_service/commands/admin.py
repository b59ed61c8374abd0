"""What admins ask of a running service besides its anchors: models, templates, quotas, clear, drain."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvcache_service.commands import common


def models(
    target: common.Target = "127.0.0.1:50051",
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """Models that workers have registered."""
    with common.connected(target, ca, certificate, key, token_file) as client:
        found = client.status().models
    if json_output:
        common.print_messages(found)
        return
    columns = ("model", "name", "layers", "KV heads", "head dim", "bytes a token", "templates", "host bytes")
    rows = (
        [m.model_id[:12], m.name, m.layers, m.kv_heads, m.head_dim, f"{m.token_bytes:,}", m.templates, f"{m.host_bytes:,}"]
        for m in found
    )
    common.print_table(common.console(), f"{len(found)} models", columns, rows)


def templates(
    target: common.Target = "127.0.0.1:50051",
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """Templates that workers have registered: their segments and whether they reuse."""
    with common.connected(target, ca, certificate, key, token_file) as client:
        found = client.status().templates
    if json_output:
        common.print_messages(found)
        return
    columns = ("template", "model", "produces", "segments", "calibration")
    rows = ([t.template_id[:12], t.model_id[:12], t.produces, _segments(t), _calibration(t)] for t in found)
    common.print_table(common.console(), f"{len(found)} templates", columns, rows)


def quota(
    target: common.AdminTarget = common.ADMIN_TARGET,
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """What your tenant holds and may hold; an operator sees every tenant. Limits are settings: `kvcache config show`."""
    with common.admin(target, ca, certificate, key, token_file) as client:
        found = client.quotas()
    if json_output:
        common.print_messages(found)
        return
    names = [quota.name for quota in found[0].quotas]
    rows = ([t.tenant, *(f"{q.used:,} of {q.limit:,}" if q.limit else f"{q.used:,}" for q in t.quotas)] for t in found)
    common.print_table(common.console(), "used, and the limit where there is one", ("tenant", *names), rows)


def clear(
    model: Annotated[str, typer.Option("--model-id", help="First characters of a model's id; without it all models.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    target: common.AdminTarget = common.ADMIN_TARGET,
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """Forget all KV of your tenant and all that was learned from it: pools, predictors, calibrations, audits.

    Open turns end as they would have. Models and templates stay registered.
    """
    if not yes:
        typer.confirm(f"forget everything of {f'models {model}…' if model else 'all models'}?", abort=True)
    with common.admin(target, ca, certificate, key, token_file) as client:
        reply = client.clear(model)
    common.report(json_output, {"models": reply.models, "host_bytes": reply.host_bytes})


def drain(
    target: common.AdminTarget = common.ADMIN_TARGET,
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """End a service as SIGTERM does: nothing new begins, open turns have `drain_seconds`, then it exits with 0.

    What supervises it (systemd, Docker, Kubernetes) may start it again.
    """
    with common.admin(target, ca, certificate, key, token_file) as client:
        turns = client.drain()
    common.report(json_output, {"open_turns": turns})


def _segments(template: Any) -> str:
    return " · ".join(f"{{{s.placeholder}}}" if s.placeholder else f"{s.fixed_tokens} tokens" for s in template.segments)


def _calibration(template: Any) -> str:
    if not template.HasField("calibration"):
        return "none: dense"
    return "reuse" if template.calibration.usable else "no threshold meets the target: dense"
