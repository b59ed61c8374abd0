"""Chart and manifests: valid for several versions of Kubernetes, hardened, and in step with settings, ports and commands."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvcache_service.config import Config, read_settings, refuse_exposure, refuse_unknown_environment
from kvcache_service.evaluation.service import ServiceProcess
from tests.deploy.image import ROOT, stages
from tests.security.conftest import Authority, entry

PLAIN = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "kvcache"
RENDER = runpy.run_path(str(PLAIN / "render.py"))
WAYS = ("central", "node-local")
VERSIONS = ("1.28", "1.31", "1.34", "1.37")
WORKLOADS = {"StatefulSet", "DaemonSet"}
Object = dict[str, Any]
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")
# Of values, what each changes beyond the defaults.
CHOICES = {
    "mutual-tls": ["--set=tls.clientCaKey=ca.crt,tokens.secret="],
    "insecure": ["--set=insecure=true,tls.secret=,tokens.secret="],
    "redis": ["--set=redis.secret=kvcache-redis"],
    "gpu": ["--set=gpu.enabled=true,nodeSelector.pool=gpu", '--set-json=tolerations=[{"operator":"Exists"}]'],
    "autoscaling": ["--set=autoscaling.enabled=true"],
    "memory-only": ["--set=persistence.enabled=false"],
    "node-local-stream": ["--set=mode=nodeLocal"],
    "open-network": ["--set=networkPolicy.enabled=false,podDisruptionBudget.enabled=false"],
    "settings": ["--set=config.host_bytes=17179869184,config.target_kl=0.02,config.host_codec=int8,config.host_touch=true"],
    "traces": ["--set=environment.OTEL_SERVICE_NAME=kvcache", '--set-json=networkPolicy.extraEgress=[{"ports":[{"port":4317}]}]'],
}


def objects(text: str) -> list[Object]:
    return [value for value in yaml.safe_load_all(text) if value]


def written(name: str) -> list[Object]:
    return objects((PLAIN / f"{name}.yaml").read_text())


def workload(found: list[Object]) -> Object:
    (value,) = (value for value in found if value["kind"] in WORKLOADS)
    return value


def pod(found: list[Object]) -> Object:
    spec: Object = workload(found)["spec"]["template"]["spec"]
    return spec


def environment(found: list[Object]) -> dict[str, str]:
    """What the container's process sees, with the image's own."""
    (settings,) = (value["data"] for value in found if value["kind"] == "ConfigMap" and "-settings" in value["metadata"]["name"])
    return stages()["cpu"].environment | settings


def validate(value: Object, version: str) -> None:
    if not value["apiVersion"].startswith("monitoring.coreos.com/"):  # the operator's own kinds are in no schema of Kubernetes
        kubernetes_validate.validate(value, version, strict=True)


def configured(found: dict[str, str]) -> Config:
    config = read_settings(found).config
    refuse_exposure(config)
    return config


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [*WAYS, "monitoring"])
def test_plain_manifests_are_valid(name: str, version: str) -> None:
    found = written(name)
    assert found
    for value in found:
        validate(value, version)


@needs_helm
def test_plain_manifests_are_what_the_chart_makes() -> None:
    made = RENDER["rendered"]()
    assert {path: path.read_text() for path in made} == made, "run `python deploy/kubernetes/render.py`"


@needs_helm
def test_helm_has_nothing_to_complain_of() -> None:
    done = subprocess.run(["helm", "lint", "--strict", CHART], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize("choice", CHOICES)
def test_choices_make_valid_objects_whose_settings_are_accepted(choice: str) -> None:
    plain, found = objects(RENDER["template"]([])), objects(RENDER["template"](CHOICES[choice]))
    assert found != plain, "the choice changes something"
    for value in found:
        for version in (VERSIONS[0], VERSIONS[-1]):
            validate(value, version)
    configured(environment(found))


@needs_helm
def test_the_example_of_the_documentation_is_accepted(tmp_path: Path) -> None:
    (example,) = re.findall("```yaml\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    (tmp_path / "values.yaml").write_text(example)
    found = objects(RENDER["template"]([f"--values={tmp_path / 'values.yaml'}"]))
    for value in found:
        validate(value, VERSIONS[-1])
    assert configured(environment(found)).quota_turns == 64
    kinds = {value["kind"] for value in found}
    assert {"DaemonSet", "ServiceMonitor", "PrometheusRule"} <= kinds


@needs_helm
def test_numbers_arrive_as_they_were_written() -> None:
    """Helm reads numbers as floats, which print large ones in powers of ten."""
    config = configured(environment(objects(RENDER["template"](CHOICES["settings"]))))
    assert (config.host_bytes, config.target_kl, config.host_codec, config.host_touch) == (1 << 34, 0.02, "int8", True)


@needs_helm
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("config.hostbytes=1", "hostbytes"),
        ("config.redis_url=redis://x", "redis_url"),
        ("replica=3", "replica"),
        ("tls.secret=", "say insecure: true"),
        ("tokens.secret=", "set tokens.secret or tls.clientCaKey"),
        ("insecure=true,tls.secret=,tls.clientCaKey=ca.crt", "clients' certificates need TLS"),
        ("mode=nodeLocal,autoscaling.enabled=true", "use mode: central"),
        ("sharedMemory.hostPath=/dev/shm/kvcache", "use mode: nodeLocal"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: str, words: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        RENDER["template"]([f"--set={values}"])
    assert words in refused.value.stderr


def test_the_chart_knows_the_settings() -> None:
    """All but those that its other values stand for."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    own = {
        "listen",
        "admin_listen",
        "metrics_listen",
        "insecure",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "tokens_file",
        "redis_url",
    }
    own |= {"shared_memory_dir", "disk_dir"}
    assert set(schema["config"]["propertyNames"]["enum"]) == Config.model_fields.keys() - own
    assert schema.keys() - {"global"} == yaml.safe_load((CHART / "values.yaml").read_text()).keys()


@pytest.mark.parametrize("way", WAYS)
def test_pods_can_do_little(way: str) -> None:
    found = pod(written(way))
    assert not found.keys() & {"hostIPC", "hostNetwork", "hostPID"}
    assert found["automountServiceAccountToken"] is False
    assert found["securityContext"]["runAsNonRoot"] is True
    assert f"{found['securityContext']['runAsUser']}:{found['securityContext']['runAsGroup']}" == stages()["cpu"].user
    for container in (*found["containers"], *found.get("initContainers", [])):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert not context.get("privileged")
        assert container["resources"]["limits"]["memory"]
        if container in found["containers"]:
            assert "runAsUser" not in context, "as the pod"
            assert "add" not in context["capabilities"]


def test_only_the_node_local_way_touches_the_node() -> None:
    mounted = {way: [v["hostPath"]["path"] for v in pod(written(way))["volumes"] if "hostPath" in v] for way in WAYS}
    assert mounted == {"central": [], "node-local": ["/var/lib/kvcache", "/dev/shm/kvcache"]}


@pytest.mark.parametrize("way", WAYS)
def test_the_settings_are_accepted_without_insecure(way: str) -> None:
    config = configured(environment(written(way)))
    assert not config.insecure
    assert config.drain_seconds < pod(written(way))["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("way", WAYS)
def test_variables_that_kubernetes_would_add_are_kept_out(way: str) -> None:
    """A Service named kvcache brings KVCACHE_PORT, which the service refuses as an unknown setting."""
    with pytest.raises(ValueError, match="KVCACHE_PORT"):
        refuse_unknown_environment({"KVCACHE_PORT": "tcp://10.0.0.1:50051"})
    assert pod(written(way))["enableServiceLinks"] is False


@pytest.mark.parametrize("way", WAYS)
def test_names_agree(way: str) -> None:
    found = [*written(way), *written("monitoring")]
    owner = workload(found)
    labels, spec = owner["spec"]["template"]["metadata"]["labels"], pod(found)
    (container,) = spec["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listening = {
        name: int(stages()["cpu"].environment[f"KVCACHE_{key}"].rpartition(":")[2])
        for name, key in (("grpc", "LISTEN"), ("metrics", "METRICS_LISTEN"))
    }
    assert ports == listening
    services = {value["metadata"]["name"]: value for value in found if value["kind"] == "Service"}
    for value in services.values():
        assert value["spec"]["selector"].items() <= labels.items()
        assert all(port["targetPort"] in ports for port in value["spec"]["ports"])
    seen = set()
    for value in found:
        kind, body = value["kind"], value.get("spec", {})
        seen.add(kind)
        if kind == "NetworkPolicy":
            assert body["podSelector"]["matchLabels"].items() <= labels.items()
            assert {p["port"] for rule in body["ingress"] for p in rule["ports"]} == ports.keys()
        elif kind == "PodDisruptionBudget":
            assert body["selector"]["matchLabels"].items() <= labels.items()
        elif kind == "ServiceMonitor":
            wanted = body["selector"]["matchLabels"].items()
            scraped = [s for s in services.values() if wanted <= s["metadata"]["labels"].items()]
            assert len(scraped) == 1, "each pod once"
            assert body["endpoints"][0]["port"] in {port["name"] for port in scraped[0]["spec"]["ports"]}
    assert {"NetworkPolicy", "ServiceMonitor", "PrometheusRule"} <= seen
    volumes = {volume["name"] for volume in spec["volumes"]} | {
        claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    paths = [mount["mountPath"] for mount in container["volumeMounts"]]
    for name, value in environment(found).items():
        if name.startswith("KVCACHE_") and value.startswith("/"):
            assert any(value == path or value.startswith(path + "/") for path in paths), name
    if way == "central":
        assert owner["spec"]["serviceName"] in services


def test_alerts_and_dashboards_arrive_unchanged() -> None:
    found = {value["kind"]: value for value in written("monitoring")}
    assert found["PrometheusRule"]["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    boards = {f"kvcache-{path.name}": path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
    assert found["ConfigMap"]["data"] == boards
    assert found["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def run_inside(
    found: list[Object], service: ServiceProcess, files: Mapping[str, Path], *words: str, told: str = ""
) -> subprocess.CompletedProcess[str]:
    """A command as it runs in the pod, whose files lie elsewhere. told: on its standard input."""
    here = {"localhost:50051": service.target, "localhost:50052": service.admin_target}
    here |= {f"/etc/kvcache/tls/{name}": str(path) for name, path in files.items()}
    settings = {name: here[value] for name, value in environment(found).items() if name.startswith("KVCACHE_CLIENT_")}
    command = [Path(sys.executable).with_name(words[0]), *words[1:]]
    return subprocess.run(command, env=os.environ | settings, input=told, capture_output=True, text=True)


@pytest.mark.parametrize("way", WAYS)
def test_commands_inside_reach_a_service_with_tls_and_tokens(
    way: str, start_service: Callable[..., ServiceProcess], tmp_path: Path
) -> None:
    """The probe needs no token, but the right authority; an admin's call brings a token along."""
    authority = Authority(tmp_path, "ours")
    certificate, key = authority.issue("service")
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry("one", "a") + entry("boss", "a", admin="true", name='"boss"'))
    found = written(way)
    (container,) = pod(found)["containers"]
    probes = [container[name]["exec"]["command"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes == [["kvcache", "health"]] * 3
    quota = ("kvcache", "quota", "--json", "--token-file", "/dev/stdin")
    with start_service(tls_cert=str(certificate), tls_key=str(key), tokens_file=str(tokens)) as service:
        files = {"ca.crt": authority.path}
        done = run_inside(found, service, files, *probes[0])
        assert (done.returncode, done.stdout) == (0, "SERVING\n"), done.stderr
        done = run_inside(found, service, files, *quota, told="boss")
        assert [shown["tenant"] for shown in json.loads(done.stdout)] == ["a"], done.stderr
        assert run_inside(found, service, files, *quota, told="one").returncode == 1
        assert run_inside(found, service, {"ca.crt": Authority(tmp_path, "other").path}, *probes[0]).returncode == 1


@needs_helm
def test_probes_of_mutual_tls_show_a_certificate(start_service: Callable[..., ServiceProcess], tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    certificate, key = authority.issue("service")
    found = objects(RENDER["template"](CHOICES["mutual-tls"]))
    (container,) = pod(found)["containers"]
    files = {"ca.crt": authority.path, "tls.crt": certificate, "tls.key": key}
    with start_service(tls_cert=str(certificate), tls_key=str(key), tls_client_ca=str(authority.path)) as service:
        done = run_inside(found, service, files, *container["livenessProbe"]["exec"]["command"])
        assert (done.returncode, done.stdout) == (0, "SERVING\n"), done.stderr
