"""docs/metrics.md names what the service exports, no more and no less, and all of it stands at zero before traffic."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvcache_service.__main__ import new_telemetry
from kvcache_service.engine.plan import Reason
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.telemetry import GAUGES, SLOT_GAUGES

DOC = Path(__file__).parents[1] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<type>\w+) \|", re.MULTILINE)


def documented() -> dict[str, str]:
    return {row["name"]: row["type"] for row in ROW.finditer(DOC.read_text())}


def test_the_table_equals_the_code() -> None:
    telemetry = new_telemetry(tenants=1)
    telemetry.watch(lambda: dict.fromkeys(GAUGES, 0.0))
    telemetry.watch_slots(list)
    telemetry.tenants.watch(list)
    exported = {}
    for family in telemetry.registry.collect():
        name = family.name + "_total" if family.type == "counter" else family.name
        exported[name] = family.type
    assert documented() == exported


def test_every_series_is_there_at_zero_before_traffic(service: ServiceProcess) -> None:
    import urllib.request

    with urllib.request.urlopen(service.metrics_url, timeout=5) as reply:
        families = {f.name: f for f in text_string_to_metric_families(reply.read().decode())}
    for name, kind in documented().items():
        family = families[name.removesuffix("_total") if kind == "counter" else name]
        if name in SLOT_GAUGES:
            assert not family.samples, "a slot has figures from its first audit on"
            continue
        assert family.samples, name
        if kind in ("counter", "histogram"):
            moved = [s for s in family.samples if s.value and not s.name.endswith("_created")]
            assert not moved, moved
    reasons = {s.labels["reason"] for s in families["kvcache_fallbacks"].samples if s.name.endswith("_total")}
    assert reasons == {r.name.lower() for r in Reason if r is not Reason.NONE}
