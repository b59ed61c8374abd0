"""Dashboards and alerts against a real Prometheus that scrapes a live service."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvcache_client import KVCacheClient
from kvcache_client.adapters.transformers import SharedModel
from transformers import LlamaForCausalLM

from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.telemetry import SLOT_GAUGES
from tests.conftest import ByteTokenizer

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
SERIES = re.compile(r"\bkvcache_\w+")
pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")


def panels() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}: {target['legendFormat']}", target["expr"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


class Prometheus:
    """One server that scrapes `target` every half second."""

    def __init__(self, target: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(ALERTS)]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data"}
        options["web.listen-address"] = Path(self.url.removeprefix("http://"))
        self._process = subprocess.Popen(
            ["prometheus", *(f"--{name}={value}" for name, value in options.items())], stderr=subprocess.DEVNULL
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        return found

    def wait(self, expression: str) -> list[dict[str, Any]]:
        """Until the query returns something."""
        deadline = time.monotonic() + 60
        while True:
            try:
                if found := self.query(expression):
                    return found
            except OSError:
                pass
            assert time.monotonic() < deadline, expression

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)


@pytest.fixture(scope="module")
def scraped(
    start_service: Callable[..., ServiceProcess], model: LlamaForCausalLM, tokenizer: ByteTokenizer, tmp_path_factory: Any
) -> Iterator[Prometheus]:
    """Turns of two agents, some reused, some audited, with Prometheus looking on."""
    with start_service(audit_rate="1", trial_rate="1") as service:
        prometheus = Prometheus(
            service.metrics_url.removeprefix("http://").removesuffix("/metrics"), tmp_path_factory.mktemp("prometheus")
        )
        try:
            prometheus.wait("kvcache_sessions")
            with KVCacheClient(service.target) as client:
                shared = SharedModel(model, tokenizer, client)
                first = shared.agent("First. {question}", produces="answer")
                second = shared.agent("Second reads {answer} and says:", produces="end")
                for number in range(12):
                    said = first.run({"question": f"{number} and {number * 7919 % 101}?"}, max_new_tokens=12)
                    second.run({"answer": said.token_ids}, max_new_tokens=12)
                assert shared.auditor.drain()
                prometheus.wait("sum(rate(kvcache_turns_total[10s])) > 0")
                prometheus.wait('sum(kvcache_turns_total{outcome="reuse"}) > 0')
                prometheus.wait("sum(kvcache_audit_kl_count) > 0")
                yield prometheus
        finally:
            prometheus.stop()


def test_every_panel_returns_data(scraped: Prometheus) -> None:
    for name, expression in panels():
        found = scraped.query(expression.replace("$__rate_interval", "30s"))
        assert found, f"{name}: {expression}"
    reuse = scraped.query(dict(panels())["overview: Reuse rate: tokens"].replace("$__rate_interval", "30s"))
    assert 0 < float(reuse[0]["value"][1]) < 1


def test_every_series_of_an_alert_is_there(scraped: Prometheus) -> None:
    """Also before anything happened: a series that comes with the first fault is no use to an alert."""
    for rule in rules():
        for name in {*SERIES.findall(rule["expr"])} - SLOT_GAUGES.keys():
            assert scraped.query(name), f"{rule['alert']}: {name}"
    loaded = scraped.url + "/api/v1/rules"
    with urllib.request.urlopen(loaded, timeout=10) as reply:
        states = {rule["name"]: rule["health"] for group in json.load(reply)["data"]["groups"] for rule in group["rules"]}
    assert states.keys() == {rule["alert"] for rule in rules()}
    assert set(states.values()) <= {"ok", "unknown"}


def test_quantiles_are_numbers_once_there_is_traffic(scraped: Prometheus) -> None:
    for metric in ("match", "assembly", "settle", "ttft"):
        found = scraped.query(f"histogram_quantile(0.5, sum by (le) (rate(kvcache_{metric}_seconds_bucket[30s])))")
        assert not math.isnan(float(found[0]["value"][1])), metric


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inner = ",".join(f'{k}="{v}"' for k, v in ({"job": "kvcache", "instance": "a"} | labels).items())
    return {"series": f"{name}{{{inner}}}", "values": values}


# alert -> what makes it fire within two hours, and what must not.
CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    "KVCacheDown": ([series("up", "0x130")], [series("up", "1x130")]),
    "KVCacheCatalogDown": ([series("kvcache_catalog_up", "0x130")], [series("kvcache_catalog_up", "1x130")]),
    "KVCacheQualityLeft": (
        [
            series("kvcache_audit_kl_bucket", "0x130", le="0.1"),
            series("kvcache_audit_kl_bucket", "0+1x130", le="+Inf"),
            series("kvcache_audit_kl_bucket", "0+1x130", le="0.5"),
        ],
        [series("kvcache_audit_kl_bucket", "0+1x130", le="0.1"), series("kvcache_audit_kl_bucket", "0+1x130", le="+Inf")],
    ),
    "KVCacheSlotsOff": ([series("kvcache_slots_off", "2x130")], [series("kvcache_slots_off", "0x130")]),
    "KVCacheReuseFell": (
        [series("kvcache_reused_tokens_total", "0+90x65 5850+10x65"), series("kvcache_prompt_tokens_total", "0+100x130")],
        [series("kvcache_reused_tokens_total", "0+90x130"), series("kvcache_prompt_tokens_total", "0+100x130")],
    ),
    "KVCacheSlowerThanDense": (
        [
            *(
                series("kvcache_ttft_seconds_bucket", v, le=le, outcome="reuse")
                for le, v in (("1", "0x130"), ("5", "0+1x130"), ("+Inf", "0+1x130"))
            ),
            *(series("kvcache_ttft_seconds_bucket", "0+1x130", le=le, outcome="dense") for le in ("1", "5", "+Inf")),
        ],
        [
            series("kvcache_ttft_seconds_bucket", "0+1x130", le=le, outcome=o)
            for o in ("reuse", "dense")
            for le in ("1", "5", "+Inf")
        ],
    ),
    "KVCacheHostFull": (
        [
            series("kvcache_leased_bytes", "60x130"),
            series("kvcache_host_pinned_bytes", "35x130"),
            series("kvcache_host_budget_bytes", "100x130"),
        ],
        [
            series("kvcache_leased_bytes", "10x130"),
            series("kvcache_host_pinned_bytes", "35x130"),
            series("kvcache_host_budget_bytes", "100x130"),
        ],
    ),
    "KVCacheLeasesStay": (
        [series("kvcache_open_turns", "1x130"), series("kvcache_sessions", "0x130")],
        [series("kvcache_open_turns", "1x130"), series("kvcache_sessions", "1x130")],
    ),
    "KVCacheDiskDamaged": ([series("kvcache_disk_damaged", "0x100 1x30")], [series("kvcache_disk_damaged", "1x130")]),
    "KVCacheDiskSlow": (
        [series("kvcache_disk_pending_bytes", "200000000x130")],
        [series("kvcache_disk_pending_bytes", "1000x130")],
    ),
    "KVCacheErrors": (
        [series("kvcache_errors_total", "0+1x130", code="internal")],
        [series("kvcache_errors_total", "0+1x130", code="miss"), series("kvcache_errors_total", "0x130", code="internal")],
    ),
    "KVCacheStrangers": (
        [series("kvcache_errors_total", "0+120x130", code="unauthenticated")],
        [series("kvcache_errors_total", "0+10x130", code="permission")],
    ),
    "KVCacheTenantNearQuota": (
        [series("kvcache_tenant_quota_share", "0.95x130", tenant="a", quota="turns")],
        [
            series("kvcache_tenant_quota_share", "0.5x130", tenant="a", quota="turns"),
            series("kvcache_tenant_quota_share", "1x130", tenant="a", quota="host_bytes"),
        ],
    ),
}


def test_alerts_fire_when_they_must_and_not_otherwise(tmp_path: Path) -> None:
    summaries = {rule["alert"]: rule for rule in rules()}
    assert CASES.keys() == summaries.keys()
    tests = []
    for alert, cases in CASES.items():
        for fires, given in zip((True, False), cases, strict=True):
            expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
            samples = [{"labels": "{}", "value": 1}] if fires else []
            checks = [{"expr": expression, "eval_time": "125m", "exp_samples": samples}]
            tests.append({"interval": "1m", "name": f"{alert} {fires}", "input_series": given, "promql_expr_test": checks})
    file = tmp_path / "alerts.test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_agrees() -> None:
    for what, file in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        done = subprocess.run(["promtool", "check", what, file], cwd=ALERTS.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_runbook() -> None:
    page = (ROOT / "docs/runbooks/README.md").read_text()
    told = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert told == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/runbooks/README.md#{rule['alert'].lower()}"


def test_dashboards_are_what_the_script_writes() -> None:
    written = runpy.run_path(str(ROOT / "deploy/grafana/build.py"))["rendered"]()
    assert {path: path.read_text() for path in DASHBOARDS} == written
