"""`kvcache demo`."""

from __future__ import annotations

import itertools
import json
import random
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_service.commands import common


class PolicyName(StrEnum):
    GUARDED = "guarded"
    PAPER = "paper"
    REPOSITION = "reposition"
    OFF = "off"


class TransportName(StrEnum):
    AUTO = "auto"
    SHARED_MEMORY = "shared_memory"
    STREAM = "stream"


def demo(
    agents: Annotated[int, typer.Option(min=2, max=5, help="Fully connected agents: each reads all earlier answers.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Measured questions.")] = 8,
    warmup: Annotated[int, typer.Option(min=0, help="Questions that fill the pools first.")] = 14,
    calibration: Annotated[int, typer.Option(min=6, help="Further questions that find the thresholds.")] = 6,
    policy: Annotated[PolicyName, typer.Option(help="Policy under test.")] = PolicyName.GUARDED,
    beside: Annotated[bool, typer.Option(help="Run the paper's policy on the same turns too.")] = True,
    transport: Annotated[TransportName, typer.Option(help="How KV travels between service and worker.")] = TransportName.AUTO,
    dataset: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="JSON lines with a field `question` or `prompt`.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A transformers model folder; default SmolLM2-135M.")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Longest answer of an agent, in tokens.")] = 40,
    seed: Annotated[int, typer.Option(help="Order of the questions.")] = 0,
    target: Annotated[
        str | None,
        typer.Option(help="Work for this running service, without measuring: the agents answer question after question."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="With --target: times through all questions; 0: until stopped.")] = 1,
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")] = Path("out/demo.json"),
    png: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/demo.png"),
) -> None:
    """Agents on a real model share KV through the service; every measured turn also runs dense, for comparison.

    First the pools learn, then the thresholds are calibrated: before that the service reuses nothing.
    TTFT counts everything: match, fetch, assembly, recomputed tokens and the first forward.
    """
    from kvcache_service.demo import report
    from kvcache_service.demo.run import questions as own_questions
    from kvcache_service.evaluation.dataset import read_rows

    try:
        questions = [row.question for row in read_rows(dataset)] if dataset else own_questions()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--dataset") from error
    if target is not None:
        random.Random(seed).shuffle(questions)
        _work(target, common.load_model(common.console(), model), questions, rounds, agents, transport.value, answer_tokens)
        return
    needed = warmup + calibration + requests
    if len(questions) < needed:
        raise typer.BadParameter(
            f"{needed} questions are needed (warmup + calibration + requests), {len(questions)} are there",
            param_hint="--dataset",
        )
    random.Random(seed).shuffle(questions)
    screen = common.console()
    loaded, tokenizer = common.load_model(screen, model)
    policies = [policy.value] + (["paper"] if beside and policy is not PolicyName.PAPER else [])
    start = warmup + calibration
    parts = questions[:warmup], questions[warmup:start], questions[start:needed]
    turns, metrics = _run(screen, loaded, tokenizer, *parts, agents, policies, transport.value, answer_tokens)
    report.show(screen, policy.value, turns)
    report.show_metrics(screen, metrics)
    for path in (json_path, png):
        path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(report.as_json(policy.value, turns), indent=1))
    report.draw(png, policy.value, turns)
    screen.print(f"figures: {json_path}   picture: {png}")


def _work(
    target: str, loaded: tuple[Any, Any], questions: list[str], rounds: int, agents: int, transport: str, answer_tokens: int
) -> None:
    """Live traffic: dense turns teach, idle moments audit, and after enough audits the service calibrates itself."""
    from kvcache_client import KVCacheClient
    from kvcache_client.adapters.transformers import SharedModel

    from kvcache_service.demo.run import Team
    from kvcache_service.evaluation.team import team

    with KVCacheClient(target, transport=transport) as client:
        players = Team(SharedModel(*loaded, client), team(agents, "full"), answer_tokens)
        for number in itertools.count(1) if rounds == 0 else range(1, rounds + 1):
            for question in questions:
                players.warm(question)
            typer.echo(f"round {number}: {len(questions)} questions answered")


def _run(
    screen: Any,
    model: Any,
    tokenizer: Any,
    warm: list[str],
    calibration: list[str],
    measured: list[str],
    agents: int,
    policies: list[str],
    transport: str,
    answer_tokens: int,
) -> tuple[list[Any], dict[str, float]]:
    from kvcache_client import KVCacheClient
    from kvcache_client.adapters.transformers import SharedModel

    from kvcache_service.demo.run import Team
    from kvcache_service.evaluation.report import show_calibrations
    from kvcache_service.evaluation.service import ServiceProcess
    from kvcache_service.evaluation.summary import calibration as as_figures
    from kvcache_service.evaluation.team import team

    with ServiceProcess() as service, KVCacheClient(service.target, transport=transport) as client:
        screen.print(f"service at {service.target}, metrics at {service.metrics_url}, transport {client.transport}")
        players = Team(SharedModel(model, tokenizer, client), team(agents, "full"), answer_tokens)
        with common.Bars(screen) as bars:
            for question in bars.track(warm, len(warm), "warming the pools        "):
                players.warm(question)
            for question in bars.track(calibration, len(calibration), "calibrating the thresholds"):
                players.audit(question)
        fitted = players.calibrate()
        screen.print("calibration: reuse was off until now; from here on these thresholds decide")
        for name, _ in players.agents[1:]:
            if name not in fitted:
                screen.print(f"  {name}: too few trials to calibrate, so it stays dense; raise --warmup or --calibration")
        show_calibrations(screen, {name: as_figures(value) for name, value in fitted.items()})
        with common.Bars(screen) as bars:
            tracked = bars.track(measured, len(measured), "measuring                ")
            turns = [turn for question in tracked for turn in players.measure(question, policies)]
        return turns, service.metrics()
