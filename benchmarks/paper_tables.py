"""The tables of the KVCOMM paper on SmolLM2-135M, by the real service: figures for docs/results.md.

    .venv/bin/python benchmarks/paper_tables.py ../shared/data/gsm8k.jsonl
    .venv/bin/python benchmarks/results.py

Tables 1, 5 and 6 come from one run of five fully connected agents: every variant sees the same turns, and pools learn on
the training half. Table 4 starts cold, as an online service does. Tables 2 and 3 measure time on text of given lengths.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from kvcache_client import KVCacheClient
from kvcache_client.adapters.transformers import SharedModel
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.commands import common
from kvcache_service.evaluation import dataset as data
from kvcache_service.evaluation import run, summary
from kvcache_service.evaluation.dataset import Row
from kvcache_service.evaluation.policies import Policy, parse
from kvcache_service.evaluation.runner import Runner
from kvcache_service.evaluation.scenes import Agents, Scene, Step
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.evaluation.team import Member, team

GAMMAS = (0.0003, 0.003, 0.03, 0.1, 0.3, 0.9)
BOUNDS = (2, 5, 10, 20)
ORDERS = ("ascending", "descending", "random")
LENGTHS = ((64, 32), (64, 128), (256, 32), (256, 128), (512, 32), (512, 128))  # (in, out) tokens
PREFIX = 128  # tokens of a role prompt in tables 2 and 3
UNGATED = 1e9  # γ that passes every sample


def _paper(name: str, **blending: Any) -> Policy:
    return Policy(name, "paper", pb.Trial(blending=pb.Blending(**blending)))


def _alignment() -> list[Policy]:
    """Table 5: rotation / placeholder offsets / following-segment offsets, all combinations."""
    out = []
    for rotation in (True, False):
        for placeholder in (True, False):
            for following in (True, False):
                name = "".join("✓" if on else "–" for on in (rotation, placeholder, following))
                out.append(
                    _paper(
                        name,
                        gamma=UNGATED,
                        no_rotation=not rotation,
                        no_placeholder_offsets=not placeholder,
                        no_following_offsets=not following,
                    )
                )
    return out


def _policies() -> list[Policy]:
    gammas = [_paper(f"γ={gamma}", gamma=gamma) for gamma in GAMMAS]
    bounds = [_paper(f"V={bound}", gamma=UNGATED, max_anchors=bound) for bound in BOUNDS]
    return [parse("guarded"), parse("paper"), parse("reference"), *_alignment(), *gammas, *bounds]


def _order(rows: Sequence[Row], name: str) -> list[Row]:
    return list(rows) if name == "random" else sorted(rows, key=lambda r: len(r.question), reverse=name == "descending")


def request_order(model: Any, tokenizer: Any, rows: Sequence[Row], bars: common.Bars) -> list[dict[str, Any]]:
    """Table 4: from cold pools, dense turns and reused ones as they come."""
    out = []
    for name in ORDERS:
        settings = run.MEASURING | {"require_calibration": "false"}
        with ServiceProcess(**settings) as service, KVCacheClient(service.target) as client:
            setting = Agents(name, SharedModel(model, tokenizer, client), team(3, "full"), 40)
            ordered = _order(rows, name)
            scenes = bars.track(setting.scenes(ordered, 0), len(ordered), f"table 4, {name}")
            measured = Runner(setting, [parse("guarded"), parse("paper")], 0).measure(scenes)
        for policy in ("guarded", "paper"):
            mine = [r for r in measured.rows if r.policy == policy]
            reused = [r for r in mine if r.answer.outcome == "reuse"]
            out.append(
                {
                    "order": name,
                    "policy": policy,
                    "n": len(mine),
                    "call_reuse": len(reused) / len(mine),
                    "token_reuse": sum(r.answer.reused_tokens for r in mine) / sum(r.answer.prompt_tokens for r in mine),
                    "kl_mean": statistics.fmean(r.kl for r in mine),
                    "top1": statistics.fmean(r.top1 for r in mine),
                }
            )
    return out


class Lengths(Agents):
    """Five fully connected agents whose texts have given lengths."""

    def __init__(self, shared: SharedModel, text: Sequence[int], into: int, out: int) -> None:
        roles = [" ".join(["Role"] * PREFIX)] * 5
        names = [f"agent{n}" for n in range(1, 6)]
        members = [
            Member(name, f"{n} {role}\n{{question}}" + "".join(f"\n{{{other}}}" for other in names[:n]) + "\nNow:", name)
            for n, (name, role) in enumerate(zip(names, roles, strict=True))
        ]
        super().__init__(f"{into}x{out}", shared, members, out)
        self._text, self._into, self._out = text, into, out

    def slices(self, count: int, first: int) -> Iterator[Scene]:
        place = first * (self._into + 5 * self._out)
        for _ in range(count):
            said: dict[str, tuple[int, ...]] = {"question": tuple(self._text[place : place + self._into])}
            place += self._into
            scene = []
            for index, member in enumerate(self.members):
                answer = tuple(self._text[place : place + self._out])
                place += self._out
                needed = self._needed(self.agents[member.name], said)
                scene.append(Step(member.name, needed, answer, True, answer[:1], index > 0))
                said[member.name] = answer
            yield scene


def lengths(
    model: Any, tokenizer: Any, rows: Sequence[Row], warmup: int, requests: int, bars: common.Bars
) -> list[dict[str, Any]]:
    """Tables 2 and 3: TTFT by agent and by length. Time does not depend on what the pools have learned."""
    out = []
    for into, length in LENGTHS:
        settings = run.MEASURING | run.OPEN_GATES | {"min_samples": str(warmup)}
        with ServiceProcess(**settings) as service, KVCacheClient(service.target) as client:
            shared = SharedModel(model, tokenizer, client)
            text = [token for row in rows for token in shared.encode(row.question)]
            setting = Lengths(shared, text, into, length)
            runner = Runner(setting, [parse("ungated"), _paper("paper", gamma=UNGATED)], 0)
            runner.warm(bars.track(setting.slices(warmup, 0), warmup, f"table 3, {into} in, {length} out: warming"))
            measured = runner.measure(bars.track(setting.slices(requests, warmup), requests, "  measuring"))
        for policy in ("ungated", "paper"):
            for agent in list(setting.agents)[1:]:
                mine = [r for r in measured.rows if r.policy == policy and r.agent == agent]
                speedups = [r.ttft_dense / r.answer.ttft for r in mine]
                out.append(
                    {
                        "in": into,
                        "out": length,
                        "policy": "guarded" if policy == "ungated" else policy,
                        "agent": agent,
                        "n": len(mine),
                        "prompt_tokens": statistics.median(r.answer.prompt_tokens for r in mine),
                        "ttft_dense_s": statistics.median(r.ttft_dense for r in mine),
                        "ttft_s": statistics.median(r.answer.ttft for r in mine),
                        "speedup": statistics.median(speedups),
                        "speedup_min": min(speedups),
                        "speedup_max": max(speedups),
                    }
                )
    return out


def main(
    dataset: Path,
    warmup: int = 20,
    calibration: int = 6,
    requests: int = 6,
    order_requests: int = 14,
    length_warmup: int = 3,
    length_requests: int = 3,
    json_path: Annotated[Path, typer.Option("--json")] = Path("out/paper_tables.json"),
) -> None:
    screen = common.console()
    loaded, tokenizer = common.load_model(screen, None)
    rows = data.read(dataset, seed=0)
    options = run.Options(5, "full", 40, warmup, calibration, requests, 0, 0)
    policies = _policies()
    result: dict[str, Any] = {"options": run.describe(options, policies)}
    with common.Bars(screen) as bars:
        result["lengths"] = lengths(loaded, tokenizer, rows.train + rows.test, length_warmup, length_requests, bars)
        _write(json_path, result)
        [plan] = run.plans(["agents"], [rows], options)
        team_run = run.run(plan, policies, loaded, tokenizer, options, bars.track)
        result["variants"], turns = team_run["policies"], team_run["turns"]
        result["agents"] = [_agents(turns, count, policy) for count in range(2, 6) for policy in ("guarded", "paper")]
        _write(json_path, result)
        result["order"] = request_order(loaded, tokenizer, rows.test[-order_requests:], bars)
    _write(json_path, result)
    screen.print(f"figures: {json_path}; `benchmarks/results.py` writes docs/results.md from them")


def _agents(turns: Sequence[dict[str, Any]], count: int, policy: str) -> dict[str, Any]:
    """Table 1: of fully connected agents the first `count` are a team of `count`."""
    names = [m.name for m in team(5, "full")][1:count]
    mine = [t for t in turns if t["policy"] == policy and t["agent"] in names]
    tops = [t["top1"] for t in mine]
    return {
        "agents": count,
        "policy": policy,
        "n": len(mine),
        "top1": statistics.fmean(tops),
        "top1_interval": summary.interval(tops),
        "kl_mean": statistics.fmean(t["kl"] for t in mine),
        "identical": sum(t["divergence"] is None for t in mine) / len(mine),
        "token_reuse": sum(t["reused_tokens"] for t in mine) / sum(t["prompt_tokens"] for t in mine),
    }


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
