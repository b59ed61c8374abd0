"""Admins through the real service: samples are listed, pinned, forgotten, carried to another service; a drained one ends."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcache_client import AdminClient, CacheError, Credentials, KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb
from safetensors.torch import load, save
from typer.testing import CliRunner, Result

from kvcache_service.cli import app
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.predictor import RidgeStatistics
from kvcache_service.prompt import tokens_key
from tests.chaos.test_restart import served
from tests.e2e.test_agents import TOKENS, WARM, Team, question
from tests.e2e.test_prefix import written
from tests.security.conftest import entry

HOST = 400_000  # bytes: the tiny model's samples take more than the half of it that hard pins may
Start = Callable[..., ServiceProcess]


@pytest.fixture
def admin(service: ServiceProcess) -> Iterator[AdminClient]:
    with AdminClient(service.admin_target) as connected:
        yield connected


@pytest.fixture
def team(model: Any, service: ServiceProcess) -> Iterator[Team]:
    with KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        yield team


def kvcache(service: ServiceProcess, *words: str) -> Result:
    option = "--target" if words[0] in ("models", "templates") else "--admin-target"
    return CliRunner().invoke(app, [*words, option, service.target if option == "--target" else service.admin_target])


def anchored(admin: AdminClient) -> list[pb.PooledSample]:
    """Answers that the second agent's slot has offsets of, oldest first."""
    return [s for s in admin.anchors(placeholder="first") if s.anchor]


def answer_hash(team: Team, seed: int) -> str:
    return tokens_key(team.first.run({"question": question(seed)}, max_new_tokens=TOKENS).token_ids)


def outcome(team: Team, seed: int) -> tuple[str, str]:
    answer = team.ask(question(seed))[1]
    return answer.outcome, answer.reason


def test_listed_samples_are_what_was_said(team: Team, admin: AdminClient, service: ServiceProcess) -> None:
    said = {answer_hash(team, seed) for seed in range(WARM)}
    found = list(admin.anchors(placeholder="first"))
    assert {s.sample for s in found} == said
    learned = anchored(admin)
    assert 0 < len(learned) < WARM, "reuse turns teach nothing"
    assert len([s for s in admin.anchors() if s.anchor]) == service.metrics()["kvcache_anchors"]
    second = team.second.template_id()
    assert {slot for s in learned for slot in s.slots} == {f"{second}:3"}
    assert all(s.host_bytes > 0 and s.tokens == TOKENS - 1 and s.pin == pb.PIN_NONE for s in found)
    one = found[3]
    assert [s.sample for s in admin.anchors(sample=one.sample[:20])] == [one.sample]
    shown = json.loads(kvcache(service, "anchors", "show", one.sample[:20]).stdout)
    assert [s["sample"] for s in shown] == [one.sample]
    assert kvcache(service, "anchors", "show", "zz").exit_code == 1
    listed = json.loads(kvcache(service, "anchors", "list", "--placeholder", "first", "--json").stdout)
    assert [s["sample"] for s in listed] == [s.sample for s in found]
    (registered,) = json.loads(kvcache(service, "models", "--json").stdout)
    assert (registered["layers"], registered["kv_heads"], registered["templates"]) == (3, 2, 2)
    templates = json.loads(kvcache(service, "templates", "--json").stdout)
    assert [s["placeholder"] for t in templates if t["produces"] == "second" for s in t["segments"]] == [
        "",
        "question",
        "",
        "first",
        "",
    ]
    for words in (("models",), ("templates",), ("anchors", "list"), ("quota",)):
        assert kvcache(service, *words).exit_code == 0


def test_a_deleted_sample_is_gone_and_the_others_serve(team: Team, admin: AdminClient, service: ServiceProcess) -> None:
    gone = anchored(admin)[-1].sample
    before = service.metrics()["kvcache_anchors"]
    with pytest.raises(CacheError) as caught:
        admin.delete()
    assert (caught.value.code, caught.value.field) == ("INVALID", "selection")
    count = len(list(admin.anchors(sample=gone)))
    assert count > 0
    assert admin.delete(sample=gone).samples == count
    assert list(admin.anchors(sample=gone)) == []
    assert service.metrics()["kvcache_anchors"] == before - 1
    assert service.metrics()["kvcache_leases"] == 0
    assert outcome(team, 100) == ("reuse", "none"), "predictors stay"
    assert admin.delete(sample=gone).samples == 0


def test_a_deleted_sample_stays_gone_after_a_restart(start_service: Start, model: Any, tmp_path: Path) -> None:
    with start_service(disk_dir=str(tmp_path)) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        with AdminClient(service.admin_target) as admin:
            gone = anchored(admin)[-1].sample
            assert admin.delete(sample=gone).samples
        written(service)
    with start_service(disk_dir=str(tmp_path)) as service, AdminClient(service.admin_target) as admin:
        found = {s.sample for s in admin.anchors(placeholder="first")}  # before any worker has registered
        assert gone not in found
        assert len(found) == WARM - 1


def test_pins(team: Team, admin: AdminClient, service: ServiceProcess) -> None:
    one = answer_hash(team, 2)
    assert admin.pin("hard", sample=one) == len(list(admin.anchors(sample=one)))
    assert {s.pin for s in admin.anchors(sample=one)} == {pb.PIN_HARD}
    held = service.metrics()["kvcache_host_pinned_bytes"]
    assert admin.pin("none", sample=one)
    assert {s.pin for s in admin.anchors(sample=one)} == {pb.PIN_NONE}
    assert service.metrics()["kvcache_host_pinned_bytes"] < held


def test_pins_that_do_not_all_fit_change_nothing(start_service: Start, model: Any) -> None:
    with start_service(host_bytes=str(HOST)) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        before = service.metrics()["kvcache_host_pinned_bytes"]
        with AdminClient(service.admin_target) as admin:
            found = list(admin.anchors())
            with pytest.raises(CacheError) as caught:
                admin.pin("hard")
            assert caught.value.code == "QUOTA"
            assert [(s.sample, s.pin) for s in admin.anchors()] == [(s.sample, s.pin) for s in found]
        assert service.metrics()["kvcache_host_pinned_bytes"] == before


def test_cleared_is_forgotten_and_learned_anew(start_service: Start, model: Any, tmp_path: Path) -> None:
    kept = ("kvcache_anchors", "kvcache_slots", "kvcache_predictor_bytes", "kvcache_host_used_bytes", "kvcache_anchor_bytes")
    with start_service(disk_dir=str(tmp_path)) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        assert service.metrics()["kvcache_disk_used_bytes"] > 0
        assert CliRunner().invoke(app, ["clear", "--admin-target", service.admin_target], input="n\n").exit_code == 1
        with AdminClient(service.admin_target) as admin:
            assert list(admin.anchors())
            with pytest.raises(CacheError) as caught:
                admin.clear("nobody's")
            assert caught.value.code == "UNKNOWN_MODEL"
        reply = json.loads(kvcache(service, "clear", "--yes", "--json").stdout)
        assert reply["models"] == 1
        assert reply["host_bytes"] > 0
        written(service)
        assert {name: service.metrics()[name] for name in kept} == dict.fromkeys(kept, 0)
        assert service.metrics()["kvcache_disk_used_bytes"] == 0
        assert outcome(team, 100) == ("dense", "warming")
        for seed in range(200, 200 + WARM):
            team.ask(question(seed))
        assert outcome(team, 300) == ("reuse", "none")


def carried(service: ServiceProcess, path: Path) -> None:
    done = kvcache(service, "anchors", "export", str(path))
    assert done.exit_code == 0, done.output


def test_what_was_learned_serves_elsewhere(start_service: Start, model: Any, tmp_path: Path) -> None:
    """The other service's first turn reuses, and its KV is the same to the bit; imported twice, nothing changes."""
    file = tmp_path / "pools.tar"
    with start_service(gamma="1e9") as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        answers = [team.first.run({"question": question(seed)}, max_new_tokens=TOKENS).token_ids for seed in (0, 100)]
        asked = [{"question": question(100), "first": answer} for answer in reversed(answers)]
        before = [served(team.second, samples, policy) for samples, policy in zip(asked, ("guarded", "paper"), strict=True)]
        slots = sorted(str(s) for t in client.status().templates for s in t.slots)
        carried(service, file)
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry("boss", "other", admin="true"))
    with start_service(gamma="1e9", tokens_file=str(tokens), disk_dir=str(tmp_path / "disk")) as service:
        credentials = Credentials(token="boss")
        with (
            KVCacheClient(service.target, credentials=credentials) as client,
            AdminClient(service.admin_target, credentials=credentials) as admin,
        ):
            with pytest.raises(CacheError) as caught:
                list(admin.import_(file))
            assert caught.value.code == "UNKNOWN_MODEL"
            team = Team(model, client)
            team.first.template_id(), team.second.template_id()
            replies = [reply for _, reply in admin.import_(file)]
            assert sum(r.samples for r in replies) >= WARM
            assert sum(r.predictors for r in replies) == len(slots)
            assert all(r.known for _, r in admin.import_(file))
            assert sorted(str(s) for t in client.status().templates for s in t.slots) == slots
            after = [served(team.second, samples, policy) for samples, policy in zip(asked, ("guarded", "paper"), strict=True)]
    for (actions, kv), (again, same) in zip(before, after, strict=True):
        assert pb.ACTION_REUSE in actions
        assert actions == again
        assert torch.equal(kv, same)


def records(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]


def test_records_that_do_not_fit_are_refused(team: Team, admin: AdminClient, service: ServiceProcess, tmp_path: Path) -> None:
    """Kernels read without looking at bounds: shapes, dtypes, counts and numbers are checked before anything is taken."""
    answers = [team.first.run({"question": question(seed)}, max_new_tokens=TOKENS).token_ids for seed in (0, 100)]
    samples = {"question": question(100), "first": answers[0]}
    before = served(team.second, samples, "guarded")
    carried(service, tmp_path / "pools.tar")
    whole = records(tmp_path / "pools.tar")
    admin.clear()
    sample = next(data for name, data in whole.items() if "sample-" in name)
    template = max((data for name, data in whole.items() if "template-" in name), key=len)

    def spoilt(data: bytes, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> bytes:
        tensors = load(data)
        described = json.loads(tensors.pop("record").numpy().tobytes())
        change(tensors, described)
        return save(tensors | {"record": torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)})

    def shorten(tensors: dict[str, torch.Tensor], _: object) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor[..., :-1].contiguous() if tensor.dim() else tensor

    def poison(tensors: dict[str, torch.Tensor], _: object) -> None:
        for tensor in tensors.values():
            if tensor.is_floating_point() and tensor.dim():
                tensor.view(-1)[0] = float("nan")

    bad = {
        "no record": b"nothing",
        "an empty file": save({}),
        "shapes": spoilt(sample, shorten),
        "nan": spoilt(sample, poison),
        "too many tokens": spoilt(sample, lambda _, d: d["bases"][0].update(covered=999)),
        "a key of its own": spoilt(sample, lambda _, d: d["bases"][0].update(key="other")),
        "an unknown field": spoilt(sample, lambda _, d: d.update(more=1)),
        "predictors' shapes": spoilt(template, shorten),
        "predictors' nan": spoilt(template, poison),
        "a segment that is none": spoilt(template, lambda _, d: d["predictors"][0].update(ordinal=77)),
        "a segment that is fixed": spoilt(template, lambda _, d: d["predictors"][0].update(ordinal=0)),
        "quality of another layout": spoilt(template, lambda _, d: d.update(quality="[]")),
    }
    for what, data in bad.items():
        with pytest.raises(CacheError) as caught:
            list(admin.import_(tarred(tmp_path, data)))
        assert (caught.value.code, caught.value.field) == ("INVALID", "frame"), what
    assert list(admin.anchors()) == []
    assert service.metrics()["kvcache_slots"] == 0
    for data in whole.values():
        list(admin.import_(tarred(tmp_path, data)))
    (role, *actions), kv = served(team.second, samples, "guarded")
    assert role == pb.ACTION_DENSE, "role prompts are no part of an export"
    assert pb.ACTION_REUSE in actions
    assert actions == before[0][1:]
    assert torch.equal(kv, before[1][:, :, -kv.shape[2] :])


def tarred(folder: Path, data: bytes) -> Path:
    path = folder / "one.tar"
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("x")
        entry.size = len(data)
        archive.addfile(entry, BytesIO(data))
    return path


def test_a_layout_is_that_of_a_state() -> None:
    made = RidgeStatistics()
    made.add(torch.randn(3, 2, 20, 2, 16), torch.randn(3, 2, 20, 2, 16))
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.state().items()} == RidgeStatistics.layout(3, 2, 16)


def test_who_may(start_service: Start, tmp_path: Path, model: Any) -> None:
    """Nothing for strangers and workers; an admin reaches his own tenant, an operator sees all and may end the service."""
    file = tmp_path / "tokens.toml"
    worker, boss = entry("worker", "a"), entry("boss", "a", admin="true", name='"boss"')
    file.write_text(worker + boss + entry("other", "b", admin="true") + entry("op", "ops", operator="true"))
    with (
        start_service(tokens_file=str(file)) as service,
        KVCacheClient(service.target, credentials=Credentials(token="worker")) as w,
    ):
        Team(model, w).warm()
        for token, code in (("", "UNAUTHENTICATED"), ("worker", "PERMISSION")):
            with (
                AdminClient(service.admin_target, credentials=Credentials(token=token)) as admin,
                pytest.raises(CacheError) as caught,
            ):
                list(admin.anchors())
            assert caught.value.code == code
        with AdminClient(service.admin_target, credentials=Credentials(token="other")) as other:
            assert list(other.anchors()) == []
            assert other.clear().models == 0
            assert [t.tenant for t in other.quotas()] == ["b"]
            with pytest.raises(CacheError) as caught:
                other.drain()
            assert caught.value.code == "PERMISSION"
        with AdminClient(service.admin_target, credentials=Credentials(token="boss")) as admin:
            assert list(admin.anchors())
            used = {q.name: q.used for t in admin.quotas() for q in t.quotas}
            assert (used["sessions"], used["templates"], used["models"]) == (1, 2, 1)
        with (
            AdminClient(service.target, credentials=Credentials(token="boss")) as wrong_door,
            pytest.raises(CacheError) as caught,
        ):
            list(wrong_door.anchors())
        assert caught.value.code == "UNIMPLEMENTED"
        with AdminClient(service.admin_target, credentials=Credentials(token="op")) as operator:
            assert {"a", "ops"} <= {t.tenant for t in operator.quotas()}
            assert operator.drain() == 0
        assert service.process.wait(timeout=30) == 0
