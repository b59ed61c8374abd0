"""Dockerfile and compose file: right for their linters, and what runs inside the containers runs here without Docker."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcache_service.commands.demo import _work
from kvcache_service.config import Config, read_settings, refuse_exposure
from kvcache_service.evaluation.service import ServiceProcess
from tests.commands import parse
from tests.conftest import ByteTokenizer, tiny_llama
from tests.deploy.image import DOCKERFILE, ROOT, stages

COMPOSE = ROOT / "docker-compose.yml"
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
BIN = Path(sys.executable).parent


def check(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_linters_agree() -> None:
    check(BIN / "hadolint", DOCKERFILE)
    check(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_images_run_as_nobody_in_particular() -> None:
    found = stages()
    assert {found[name].user for name in ("cpu", "cuda", "demo")} == {"10001:10001"}
    assert list(found)[-1] == "cpu", "what `docker build .` makes"


@pytest.mark.parametrize("name", SERVICES)
def test_containers_can_do_little(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "ipc", "network_mode", "pid"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_everything_that_compose_names_is_there() -> None:
    for service in SERVICES.values():
        if "build" in service:
            assert service["build"]["target"] in stages()
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (ROOT / source).is_dir(), source
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    for address in (*scraped["static_configs"][0]["targets"], source["url"].removeprefix("http://")):
        assert address.partition(":")[0] in SERVICES, address
    shared = {name for name, service in SERVICES.items() if "shared:/shared" in service.get("volumes", [])}
    assert shared == {"service", "demo"}


def settings() -> Config:
    return read_settings(stages()["cpu"].environment | SERVICES["service"]["environment"]).config


def test_the_settings_of_the_container_are_accepted() -> None:
    refuse_exposure(settings())


def test_the_image_alone_refuses_to_serve_strangers() -> None:
    config = settings().model_copy(update={"insecure": False})
    with pytest.raises(ValueError, match="KVCACHE_INSECURE"):
        refuse_exposure(config)


def test_commands_of_containers_are_commands_of_ours() -> None:
    """Parsed as they stand, with every option."""
    for name in ("cpu", "demo"):
        stage = stages()[name]
        for line in filter(None, (stage.entrypoint + stage.command, stage.health)):
            parse(line)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as the image has it: copied as .dockerignore lets it, installed from its wheel, nothing else."""
    context, target = tmp_path_factory.mktemp("context"), tmp_path_factory.mktemp("installed")
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source = ROOT / line[1:]
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, context / line[1:])
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    check(sys.executable, "-m", "pip", "install", *options, "--target", target, context)
    return target


def test_the_entry_point_serves_is_healthy_and_ends_at_sigterm(installed: Path, tmp_path: Path) -> None:
    """Read-only but for /tmp, as in the containers: all that is written goes where the image says."""
    stage = stages()["cpu"]
    inside = {"PATH": os.environ["PATH"], "PYTHONPATH": str(installed), "HOME": str(tmp_path)}
    inside |= {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    own = {"KVCACHE_LISTEN": "0.0.0.0:0", "KVCACHE_METRICS_LISTEN": "127.0.0.1:0", "KVCACHE_INSECURE": "true"}
    own["KVCACHE_ADMIN_LISTEN"] = "127.0.0.1:0"
    kvcache = [sys.executable, installed / "bin" / "kvcache"]
    assert stage.entrypoint == ["kvcache"]
    with subprocess.Popen(
        [*kvcache, *stage.command], env=inside | own, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ready = re.match(r"kvcache ready grpc=0\.0\.0\.0:(\d+) ", process.stdout.readline())
            assert ready
            probe = [word.replace(":50051", f":{ready[1]}") for word in stage.health[1:]]
            done = subprocess.run([*kvcache, *probe], env=inside, cwd=tmp_path, capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (0, "SERVING\n"), done.stderr
            done = subprocess.run([*kvcache, *probe, "--service", "unheard-of"], env=inside, capture_output=True, text=True)
            assert done.returncode == 1
            assert "NOT_FOUND" in done.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
    done = subprocess.run([*kvcache, *probe], env=inside, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stderr


def test_health_says_what_does_not_fit(tmp_path: Path) -> None:
    done = subprocess.run([BIN / "kvcache", "health", "--tls-ca", tmp_path / "none.pem"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "none.pem" in done.stderr


def test_the_demo_worker_answers_round_after_round(start_service: Callable[..., ServiceProcess]) -> None:
    model = tiny_llama(max_position_embeddings=16384)
    with start_service() as service:
        _work(service.target, (model, ByteTokenizer()), ["one?", "two?"], 2, 2, "auto", 4)
        turns = {name: count for name, count in service.metrics().items() if name.startswith("kvcache_turns_total") and count}
        assert sum(turns.values()) == 2 * 2 * 2
        assert any('outcome="reuse"' in name for name in turns), "the second round was heard before"
