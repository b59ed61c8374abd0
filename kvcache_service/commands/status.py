"""`kvcache status`."""

from __future__ import annotations

from typing import Any

import typer

from kvcache_service.commands import common


def status(
    target: common.Target = "127.0.0.1:50051",
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """Templates of a running service: their slots, calibration and audited quality."""
    from google.protobuf.json_format import MessageToJson

    with common.connected(target, ca, certificate, key, token_file) as client:
        reply = client.status()
    if json_output:
        typer.echo(MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    _show(common.console(), reply)


_COLUMNS = ("slot", "base from", "samples", "held-out error", "bytes", "audits", "KL mean", "KL p95", "top-1", "state")


def _show(screen: Any, reply: Any) -> None:
    from rich.table import Table

    screen.print(f"boot {reply.boot_id}, up {reply.uptime_seconds:.0f} s, {len(reply.templates)} templates")
    for template in reply.templates:
        table = Table(title=f"template {template.template_id[:12]} {template.produces}: {_state(template)}")
        for column in _COLUMNS:
            table.add_column(column)
        for slot in template.slots:
            origin, _, where = slot.origin.rpartition(":")
            table.add_row(
                f"{slot.ordinal} {slot.placeholder}",
                f"{origin[:12]} {where}",
                str(slot.samples),
                f"{slot.error:.3f}",
                f"{slot.bytes:,}",
                str(slot.audits),
                f"{slot.kl_mean:.4f}",
                f"{slot.kl_p95:.4f}",
                f"{slot.top1:.3f}",
                "dense: left the target" if slot.off else "on",
            )
        screen.print(table)


def _state(template: Any) -> str:
    if not template.HasField("calibration"):
        return f"not calibrated, {template.audits} audits so far; `kvcache calibrate` does it"
    found = template.calibration
    verdict = "reuse" if found.usable else "no reuse: no threshold meets the target"
    return f"{verdict}; gate {found.signal}, KL p95 {found.kl_p95:.4f} and top-1 {found.top1:.3f} over {found.audits} audits"
