"""kill -9 of a service with a disk: what was learned serves again at once, and nothing half-written is ever served."""

from __future__ import annotations

import itertools
import json
import random
import resource
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from kvcache_client import KVCacheClient
from kvcache_client.adapters.slots import SlotCache
from kvcache_client.adapters.transformers import Agent, Call
from kvcache_proto.v1 import kvcache_pb2 as pb
from torch import Tensor

from kvcache_service.catalog.embedded import EmbeddedServer
from kvcache_service.catalog.keys import Group
from kvcache_service.engine.durable import Durable
from kvcache_service.engine.records import Place
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.prompt import tokens_key
from kvcache_service.tiers.disk import DiskTier
from tests.conftest import tiny_llama
from tests.e2e.test_agents import TOKENS, WARM, Team, dense, question
from tests.e2e.test_prefix import written
from tests.e2e.test_quality import calibrate, try_out

Start = Callable[..., ServiceProcess]
ANCHORS = 6  # fewer than WARM: every pool has pruned
KEPT = ("kvcache_anchors", "kvcache_pools", "kvcache_slots", "kvcache_predictor_bytes", "kvcache_templates_calibrated")


def kill(service: ServiceProcess) -> None:
    service.process.kill()
    service.process.wait()


@pytest.fixture(params=["embedded", "external"])
def catalog(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Settings of a metadata store that dies with the service, or of one that lives on."""
    if request.param == "embedded":
        yield {}
    else:
        with EmbeddedServer() as server:
            yield {"redis_url": server.url}


def known_anchors(service: ServiceProcess) -> dict[tuple[str, str], tuple[int, ...]]:
    with redis.Redis.from_url(service.catalog_url, decode_responses=True) as server:
        return {
            (key, sample): tuple(json.loads(text)[name] for name in ("length", "sequence", "uses"))
            for key in server.scan_iter("kvcache:1:*:pool:*")
            for sample, text in server.hgetall(key).items()
        }


def served(agent: Agent, samples: dict[str, Any], policy: str) -> tuple[list[int], Tensor]:
    """Actions of a turn's segments, and its assembled KV where the worker computes nothing."""
    call = agent.begin(samples, max_new_tokens=TOKENS, policy=policy)
    assert call._turn is not None
    call._turn.fetch()
    taken = sorted(set(range(call._turn.plan.prompt_tokens)) - set(call._turn.fresh))
    kv = call._shared.view(call._turn)[:, :, taken].clone()
    actions = [segment.action for segment in call._turn.plan.segments]
    call.abort()
    return actions, kv


def test_what_was_learned_serves_at_once(
    start_service: Start, catalog: dict[str, str], model: Any, tmp_path: Path, transport: str
) -> None:
    settings = {"disk_dir": str(tmp_path), "pool_anchors": str(ANCHORS), "gamma": "1e9"} | catalog
    with start_service(**settings) as service, KVCacheClient(service.target, transport=transport) as client:
        team = Team(model, client)
        team.warm()
        answers = {seed: team.first.run({"question": question(seed)}, max_new_tokens=TOKENS).token_ids for seed in (9, 100)}
        new = {"question": question(100), "first": answers[100]}
        pair = {"question": question(100), "first": answers[9]}  # an anchor's sample: the paper policy takes its offsets
        before = [served(team.second, samples, policy) for samples, policy in ((new, "guarded"), (pair, "paper"))]
        status, metrics, anchors = client.status().templates, service.metrics(), known_anchors(service)
        written(service)
        kill(service)
    with start_service(**settings) as service, KVCacheClient(service.target, transport=transport) as client:
        team = Team(model, client)
        after = [served(team.second, samples, policy) for samples, policy in ((new, "guarded"), (pair, "paper"))]
        for (actions, kv), (again, same) in zip(before, after, strict=True):
            assert pb.ACTION_REUSE in actions
            assert actions == again
            assert torch.equal(kv, same)
        answer = team.ask(question(200))[1]
        assert (answer.outcome, answer.reason) == ("reuse", "none")
        team.first.template_id()
        assert sorted(map(str, client.status().templates)) == sorted(map(str, status))
        assert {name: service.metrics()[name] for name in KEPT} == {name: metrics[name] for name in KEPT}
        assert known_anchors(service) == anchors, "pruned ones are gone, the others as old as they were"
        assert service.metrics()["kvcache_disk_damaged"] == service.metrics()["kvcache_disk_refused"] == 0


def test_coded_kv_serves_whatever_the_setting_has_become(start_service: Start, model: Any, tmp_path: Path) -> None:
    """Bases of answers and offsets are coded, exact KV never is; what was coded serves the same bits under another setting."""
    settings = {"disk_dir": str(tmp_path), "gamma": "1e9"}
    found = []
    for codec in ("int8", "fp8"):
        with start_service(host_codec=codec, **settings) as service, KVCacheClient(service.target) as client:
            team = Team(model, client)
            if codec == "int8":
                team.warm()
                said = team.first.run({"question": question(100)}, max_new_tokens=TOKENS)
                written(service)
                heads = [json.loads(path.read_bytes().partition(b"\n")[0].partition(b" ")[2]) for path in tmp_path.glob("*.kv")]
                kinds = {(kind, h["dtype"]) for h in heads for kind in ("exact", "base", "offset") if f":{kind}:" in h["key"]}
                assert kinds == {("exact", "torch.float32"), ("base", "torch.int8"), ("offset", "torch.int8")}
            samples = {"question": question(100), "first": said.token_ids}
            found.append([served(team.second, samples, policy) for policy in ("guarded", "paper")])
            again = team.first.run({"question": question(100)}, max_new_tokens=TOKENS)
            assert again.reused_tokens == again.prompt_tokens - 1
            assert again.token_ids == said.token_ids == dense(team.first, {"question": question(100)}).token_ids
    for (actions, kv), (same, bits) in zip(*found, strict=True):
        assert pb.ACTION_REUSE in actions
        assert actions == same
        assert torch.equal(kv, bits)


def test_a_restarted_pool_prunes_and_learns_on(start_service: Start, catalog: dict[str, str], model: Any, tmp_path: Path) -> None:
    """Once more killed, and again the same: what one boot restored the next one has too."""
    settings = {"disk_dir": str(tmp_path), "pool_anchors": str(ANCHORS), "min_samples": "1000"} | catalog
    seen: set[tuple[str, str]] = set()
    for boot in range(3):
        with start_service(**settings) as service, KVCacheClient(service.target) as client:
            team = Team(model, client)
            team.second.template_id()
            restored = known_anchors(service)
            assert restored.keys() <= seen
            assert bool(restored) == (boot > 0)
            for seed in range(10 * boot, 10 * boot + 4):
                team.ask(question(seed))
            now = known_anchors(service)
            assert not now.keys() & (seen - restored.keys()), "pruned anchors came back"
            assert service.metrics()["kvcache_anchors"] == len(now)
            seen |= now.keys()
            samples = {s.samples for t in client.status().templates for s in t.slots}
            assert samples == {4 * (boot + 1) - 1, 4 * (boot + 1)} or samples == {4 * (boot + 1)}
            written(service)
            kill(service)


def test_a_calibration_and_its_audits_survive_the_embedded_catalog(start_service: Start, model: Any, tmp_path: Path) -> None:
    settings = {"disk_dir": str(tmp_path), "require_calibration": "true"}
    with start_service(**settings) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        try_out(team, range(200, 206))
        fitted = calibrate(team)
        written(service)
        kill(service)
    with start_service(**settings) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        answer = team.ask(question(100))[1]
        assert (answer.outcome, answer.reason) == ("reuse", "none")
        [template] = [t for t in client.status().templates if t.template_id == team.second.template_id()]
        assert (template.calibration, template.audits) == (fitted, 6)
        assert sum(s.audits for s in template.slots if s.placeholder == "first") == 6


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink], ids=["truncated", "bit flipped", "deleted"])
@pytest.mark.parametrize("when", ["down", "up"])
def test_damaged_files_are_misses(
    start_service: Start, model: Any, tmp_path: Path, harm: Callable[[Path], None], when: str
) -> None:
    """Every blob, before the restart or under the running service: turns are dense and right, and learn anew."""
    with start_service(disk_dir=str(tmp_path)) as service, KVCacheClient(service.target) as client:
        Team(model, client).warm()
        written(service)
        kill(service)
    blobs = list(tmp_path.glob("*.kv"))
    if when == "down":
        for blob in blobs:
            harm(blob)
    with start_service(disk_dir=str(tmp_path)) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        if when == "up":
            for blob in blobs:
                harm(blob)
        for policy in ("guarded", "paper"):
            samples = {
                "question": question(1),
                "first": team.first.run({"question": question(0)}, max_new_tokens=TOKENS).token_ids,
            }
            answer = team.second.run(samples, max_new_tokens=TOKENS, policy=policy)
            assert answer.token_ids == dense(team.second, samples).token_ids
            assert answer.outcome != "reuse" or policy == "paper"
        assert not team.shared.faults.by_code
        assert bool(service.metrics()["kvcache_disk_damaged"]) == (harm is not Path.unlink)
        for seed in range(300, 300 + WARM):  # samples that no anchor in the catalog stands for
            team.ask(question(seed))
        assert team.ask(question(100))[1].outcome == "reuse"
        assert service.metrics()["kvcache_leased_bytes"] == 0


class Committed:
    """Values of what full turns handed over, by the tokens that they belong to."""

    def __init__(self) -> None:
        self.behind: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)  # prompts up to the end of a segment -> all of it
        self.runs: dict[str, list[Tensor]] = defaultdict(list)  # key of a segment's or an answer's own tokens

    def take_role(self, agent: Agent) -> None:
        """The role prompt's KV, as the adapter stores it beside all turns."""
        run = agent.segments[0]
        kv = agent.shared.buffer(len(run))
        SlotCache(kv).forward(agent.shared.model, torch.tensor(run), torch.arange(len(run)), len(run), logits=1)
        self.behind[tuple(run)].append(kv[:, 1])

    def take(self, call: Call) -> None:
        """Of a call that has decoded and is about to settle."""
        tokens = tuple(call._prompt.tolist()) + tuple(call._tokens)
        values = call._cache.buffer[:, 1, : len(tokens) - 1].clone()
        start = 0
        for segment in call._agent.segments:
            run = call._samples[segment] if isinstance(segment, str) else segment
            start += len(run)
            self.behind[tokens[:start]].append(values[:, :start])
            self.runs[tokens_key(run)].append(values[:, start - len(run) : start])
        self.runs[tokens_key(call._tokens)].append(values[:, start:])

    def check_disk(self, directory: Path, client: KVCacheClient, model_id: str) -> int:
        """Every record names whole blobs, and every blob holds what one turn handed over. Returns how many were looked at."""
        Durable(DiskTier(directory, 1 << 30)).close()  # sweeps
        durable = Durable(DiskTier(directory, 1 << 30))
        durable.check()
        known = durable.group(Group("default", model_id))
        for sample, base in known.bases:
            blob = durable.get(base.key)
            assert blob is not None
            assert any(torch.equal(blob[:, 1], v[:, : base.covered]) for v in self.runs[sample])
        for (pool, sample), slots in known.offsets.items():
            assert any(anchor.sample == sample for anchor in known.anchors[pool])
            for name, kept in slots.items():
                base, offset = durable.get(kept.base), durable.get(kept.placeholder)
                assert base is not None
                assert offset is not None
                assert offset.shape[2] == kept.length
                moved = (base[:, :, : kept.length] + offset)[:, 1]
                assert any(torch.allclose(moved, v[:, : kept.length], atol=1e-5) for v in self.runs[sample])
                template_id, _, ordinal = name.rpartition(":")
                learned = durable.template(pool.group, template_id)
                fixed = learned.fixed_bases[Place(pool.group, template_id, int(ordinal) + 1)]
                assert fixed.key == kept.fixed
                values = fixed.kv[:, 1]
                known_runs = [v for runs in self.runs.values() for v in runs if v.shape == values.shape]
                assert any(torch.equal(values, v) for v in known_runs)
                assert all(statistics.map is not None for statistics, _ in learned.predictors.values())
        durable.close()
        return len(known.bases) + len(known.offsets)

    def check_turn(self, call: Call) -> int:
        """Every value that the turn moves or takes as it is was handed over by a full turn. Returns the reused tokens."""
        turn = call._turn
        assert turn is not None
        if not turn.reuses:
            return 0
        turn.fetch()
        values, prompt = call._shared.view(turn)[:, 1], tuple(call._prompt.tolist())
        checked = 0
        for segment in turn.plan.segments:
            start, end = segment.start, segment.start + segment.tokens
            places = sorted(set(range(start, end)) - set(segment.fresh))
            if segment.action == pb.ACTION_EXACT:
                known = [v[:, places] for v in self.behind[prompt[:end]]]
            else:
                within = [place - start for place in places]
                known = [v[:, within] for v in self.runs[tokens_key(prompt[start:end])] if v.shape[1] > max(within, default=0)]
            assert not places or any(torch.equal(values[:, places], v) for v in known), "bytes that no turn handed over"
            checked += len(places)
        return checked


ROUNDS, MOST_ROUNDS = 8, 24  # more, where kills have come before much was written


def test_killed_at_arbitrary_points(start_service: Start, catalog: dict[str, str], model: Any, tmp_path: Path) -> None:
    """The service is killed when the disk has just taken the n-th file of a run of teaching turns."""
    settings = {"disk_dir": str(tmp_path), "pool_anchors": str(ANCHORS)} | catalog
    draw = random.Random(20)
    committed, reused, looked_at = Committed(), 0, 0
    answers: dict[int, tuple[int, ...]] = {}
    for boot in range(MOST_ROUNDS):
        if boot >= ROUNDS and reused > 1000 and looked_at > 100:
            break
        with start_service(**settings) as service, KVCacheClient(service.target) as client:
            team = Team(model, client)
            committed.take_role(team.second)
            for seed in answers:
                for said in (answers[seed], draw.choice(list(answers.values()))):
                    call = team.second.begin({"question": question(seed), "first": said}, max_new_tokens=1, policy="reposition")
                    reused += committed.check_turn(call)
                    call.abort()
            assert service.metrics()["kvcache_disk_damaged"] == 0
            model_id = client.register_model(team.shared.request)
            files = len(list(tmp_path.iterdir())) + draw.randrange(1, 40)
            killer = threading.Thread(target=kill_when, args=(service, tmp_path, files))
            killer.start()
            for seed in itertools.count(100 * boot):
                if not killer.is_alive():
                    break
                samples: dict[str, Any] = {"question": question(seed)}
                for agent in (team.first, team.second):
                    call = agent.begin(samples, max_new_tokens=TOKENS, policy="off")
                    call.prefill()
                    samples = samples | {"first": call.decode()}
                    committed.take(call)
                    answers.setdefault(seed, samples["first"])
                    call.settle()
            killer.join()
        looked_at += committed.check_disk(tmp_path, client, model_id)
    assert reused > 1000
    assert looked_at > 100


def kill_when(service: ServiceProcess, directory: Path, files: int) -> None:
    while len(list(directory.iterdir())) < files:
        pass
    kill(service)


def limit_files(service: ServiceProcess, size: int) -> None:
    """No file of the service may grow beyond `size`, as on a full disk."""
    resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_costs_no_turn(start_service: Start, model: Any, tmp_path: Path) -> None:
    with start_service(disk_dir=str(tmp_path)) as service, KVCacheClient(service.target, transport="stream") as client:
        team = Team(model, client)
        team.ask(question(0))
        limit_files(service, 1)
        for seed in range(1, WARM):
            team.ask(question(seed))
        answer = team.ask(question(100))[1]
        assert (answer.outcome, answer.reason) == ("reuse", "none")
        assert not team.shared.faults.by_code
        written(service)
        assert service.metrics()["kvcache_disk_refused"] > WARM
        limit_files(service, resource.RLIM_INFINITY)
        for seed in range(200, 204):
            team.ask(question(seed), policy="off")
        metrics = service.metrics()
        written(service)
        kill(service)
    with start_service(disk_dir=str(tmp_path)) as service, KVCacheClient(service.target, transport="stream") as client:
        team = Team(model, client)
        assert team.ask(question(101))[1].outcome == "reuse", "predictors that changed after the disk was back are there"
        assert 0 < service.metrics()["kvcache_anchors"] < metrics["kvcache_anchors"]
        assert service.metrics()["kvcache_disk_damaged"] == 0


def test_a_disk_too_small_for_anything(start_service: Start, model: Any, tmp_path: Path) -> None:
    with start_service(disk_dir=str(tmp_path), disk_bytes="30000") as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        team.warm()
        assert team.ask(question(100))[1].outcome == "reuse"
        assert not team.shared.faults.by_code
        written(service)
        assert service.metrics()["kvcache_disk_used_bytes"] <= 30000
        kill(service)
    with start_service(disk_dir=str(tmp_path), disk_bytes="30000") as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        samples = {"question": question(3), "first": [50, 51, 52]}
        assert team.second.run(samples, max_new_tokens=TOKENS).token_ids == dense(team.second, samples).token_ids
        assert not team.shared.faults.by_code


def test_a_base_that_only_the_disk_has_is_used(start_service: Start, tmp_path: Path) -> None:
    """A host tier of a few turns: bases and anchors of the others come back from disk, as the plan needs them."""
    model = tiny_llama()
    settings = {"disk_dir": str(tmp_path), "host_bytes": "800000", "pool_anchors": str(ANCHORS), "gamma": "1e9"}
    with start_service(**settings) as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        first = [team.ask(question(seed))[0].token_ids for seed in range(2 * WARM)]
        written(service)
        assert service.metrics()["kvcache_host_evictions"] > WARM
        for seed in range(WARM):
            samples = {"question": question(seed + 1), "first": first[seed]}
            for policy in ("guarded", "paper"):
                actions, _ = served(team.second, samples, policy)
                assert actions[3] == pb.ACTION_REUSE, (seed, policy)
