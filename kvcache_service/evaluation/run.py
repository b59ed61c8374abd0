"""`kvcache eval`: every setting on a service of its own, every policy on the same turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from kvcache_client import KVCacheClient
from kvcache_client.adapters.transformers import SharedModel

from kvcache_service.evaluation import summary
from kvcache_service.evaluation.dataset import Dataset, Row
from kvcache_service.evaluation.policies import Policy
from kvcache_service.evaluation.runner import Runner
from kvcache_service.evaluation.scenes import Agents, Setting, Spans
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.evaluation.team import team

Item = TypeVar("Item")
Track = Callable[[Iterable[Item], int, str], Iterator[Item]]
# Of the service while it is measured: nothing runs beside, and whether reuse pays is measured, not assumed.
MEASURING = {"audit_rate": "0", "trial_rate": "0", "max_cost_ratio": "1e9"}
# For timing alone: what is reused is planned, fetched and computed, good or not.
OPEN_GATES = {"require_calibration": "false", "max_error": "1e9", "residual_limit": "1e9"}
SETTINGS = ("A", "B", "C", "agents")


@dataclass(frozen=True)
class Options:
    """How much of what. agents, topology and answer_tokens belong to the setting `agents`."""

    agents: int = 4
    topology: str = "full"
    answer_tokens: int = 40
    warmup: int = 32
    calibration: int = 12
    requests: int = 22
    controls: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """One setting to run: where its pools learn, and what is measured."""

    name: str
    build: Callable[[SharedModel], Setting]
    learn: list[Row]
    test: list[Row]


def plans(names: Sequence[str], datasets: Sequence[Dataset], options: Options) -> list[Plan]:
    """A and B on the first dataset; C learns on the first and is measured on the second; agents on each.

    Raises ValueError when a dataset is missing or too small.
    """
    out = []
    for name in names:
        if name == "agents":
            for data in datasets:
                out.append(Plan(f"agents-{data.name}", _team(f"agents-{data.name}", options), data.train, data.test))
        elif name in ("A", "B"):
            out.append(Plan(name, _spans(name), datasets[0].train, datasets[0].test))
        elif name == "C" and len(datasets) > 1:
            out.append(Plan(name, _spans(name), datasets[0].train, datasets[1].train + datasets[1].test))
        else:
            raise ValueError(f"setting {name!r}: use {', '.join(SETTINGS)}; C needs a second dataset")
    for plan in out:
        if plan.name == "B" and not all(r.answer for r in plan.learn + plan.test):
            raise ValueError(f"setting B reuses answers, but {datasets[0].name} has rows without a field `answer`")
        learn = options.warmup + options.calibration
        if len(plan.learn) < learn or len(plan.test) < options.requests:
            raise ValueError(
                f"setting {plan.name}: {learn} rows to learn from and {options.requests} to measure are needed, "
                f"{len(plan.learn)} and {len(plan.test)} are there"
            )
    return out


def _team(name: str, options: Options) -> Callable[[SharedModel], Setting]:
    return lambda shared: Agents(name, shared, team(options.agents, options.topology), options.answer_tokens)


def _spans(name: str) -> Callable[[SharedModel], Setting]:
    return lambda shared: Spans(name, shared, answers=name == "B")


def run(
    plan: Plan, policies: Sequence[Policy], model: Any, tokenizer: Any, options: Options, track: Track[Any], **settings: str
) -> dict[str, Any]:
    """One setting: its figures as documented. settings: of the service, beside those for measuring."""
    with ServiceProcess(**(MEASURING | settings)) as service, KVCacheClient(service.target) as client:
        shared = SharedModel(model, tokenizer, client)
        setting = plan.build(shared)
        runner = Runner(setting, policies, options.controls)
        learn, seed = plan.learn[: options.warmup + options.calibration], options.seed
        scenes = setting.scenes(learn, seed)
        runner.warm(track(_take(scenes, options.warmup), options.warmup, f"{plan.name}: warming the pools"))
        fitted = runner.calibrate(track(scenes, options.calibration, f"{plan.name}: calibrating"), client.calibrate)
        test = setting.scenes(plan.test[: options.requests], seed)
        measured = runner.measure(track(test, options.requests, f"{plan.name}: measuring"))
        gauges = service.metrics()
        held = {"anchors": gauges["kvcache_anchor_bytes"], "guarded": gauges["kvcache_predictor_bytes"]}
    target = next(iter(fitted.values())).target_kl
    out: dict[str, Any] = {
        "policies": summary.figures(measured, target, held),
        "paired": {p.name: summary.paired(measured.rows, p.name) for p in policies if p.policy == "guarded"},
        "controls": summary.controls(measured),
        "calibration": {name: summary.calibration(value) for name, value in fitted.items()},
        "target_kl": target,
        "turns": [summary.turn(row) for row in measured.rows],
    }
    return out


def _take(items: Iterator[Item], count: int) -> Iterator[Item]:
    for _, item in zip(range(count), items, strict=False):
        yield item


def describe(options: Options, policies: Sequence[Policy]) -> dict[str, Any]:
    return vars(options) | {"policies": [p.name for p in policies]}


def failed_controls(settings: dict[str, Any]) -> list[str]:
    """Names of controls that scored too well."""
    return list(
        chain.from_iterable(
            (f"{name}: {control}" for control, figures in setting["controls"].items() if not figures["passed"])
            for name, setting in settings.items()
        )
    )
