"""The `kvcache` command."""

from __future__ import annotations

import json
import os
import random
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_service.config import Config, refuse_unknown_environment

app = typer.Typer(help="Share KV caches between LLM agents.", no_args_is_help=True, add_completion=False)


class PolicyName(StrEnum):
    GUARDED = "guarded"
    PAPER = "paper"
    OFF = "off"


class TransportName(StrEnum):
    AUTO = "auto"
    SHARED_MEMORY = "shared_memory"
    STREAM = "stream"


@app.callback()
def root() -> None:
    """Share KV caches between LLM agents."""


@app.command()
def serve(
    listen: Annotated[str | None, typer.Option(help="gRPC address, host:port; port 0 picks a free one.")] = None,
    metrics_listen: Annotated[str | None, typer.Option(help="Address of /metrics, host:port.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis or Valkey URL; without it an embedded Valkey runs.")] = None,
) -> None:
    """Run the service until SIGTERM. Every setting also comes from KVCACHE_ variables; flags win."""
    from kvcache_service.__main__ import main

    flags = {"listen": listen, "metrics_listen": metrics_listen, "redis_url": redis_url}
    try:
        refuse_unknown_environment(dict(os.environ))
        config = Config(**{k: v for k, v in flags.items() if v is not None})  # type: ignore[arg-type]
        main(config)
    except (ValueError, RuntimeError, OSError) as error:  # a bad setting, or an address that is taken
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def demo(
    agents: Annotated[int, typer.Option(min=2, max=5, help="Fully connected agents: each reads all earlier answers.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Measured questions.")] = 8,
    warmup: Annotated[int, typer.Option(min=0, help="Questions that fill the pools first.")] = 16,
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
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")] = Path("out/demo.json"),
    png: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/demo.png"),
) -> None:
    """Agents on a real model share KV through the service; every measured turn also runs dense, for comparison.

    TTFT counts everything: match, fetch, assembly, recomputed tokens and the first forward.
    """
    from rich.console import Console

    from kvcache_service.demo import report
    from kvcache_service.demo.run import read_dataset

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    try:
        questions = read_dataset(dataset)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--dataset") from error
    if len(questions) < warmup + requests:
        raise typer.BadParameter(
            f"{warmup + requests} questions are needed (warmup + requests), {len(questions)} are there", param_hint="--dataset"
        )
    random.Random(seed).shuffle(questions)
    policies = [policy.value] + (["paper"] if beside and policy is not PolicyName.PAPER else [])
    turns, metrics = _run_demo(
        console,
        questions[:warmup],
        questions[warmup : warmup + requests],
        agents,
        policies,
        transport.value,
        model,
        answer_tokens,
    )
    report.show(console, policy.value, turns)
    report.show_metrics(console, metrics)
    for path in (json_path, png):
        path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(report.as_json(policy.value, turns), indent=1))
    report.draw(png, policy.value, turns)
    console.print(f"figures: {json_path}   picture: {png}")


def _run_demo(
    console: Any,
    warm: list[str],
    measured: list[str],
    agents: int,
    policies: list[str],
    transport: str,
    model: Path | None,
    answer_tokens: int,
) -> tuple[list[Any], dict[str, float]]:
    from kvcache_client import KVCacheClient
    from kvcache_client.adapters.transformers import SharedModel
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from kvcache_service.demo import model as demo_model
    from kvcache_service.demo.run import Team
    from kvcache_service.demo.service import ServiceProcess
    from kvcache_service.demo.team import templates

    with console.status("loading the model (the first time it is converted, about half a minute)"):
        loaded, tokenizer = demo_model.load(model)
    with ServiceProcess() as service, KVCacheClient(service.target, transport=transport) as client:
        console.print(f"service at {service.target}, metrics at {service.metrics_url}, transport {client.transport}")
        team = Team(SharedModel(loaded, tokenizer, client), templates(agents), answer_tokens)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            for question in progress.track(warm, description="warming the pools"):
                team.warm(question)
            turns = [
                turn
                for question in progress.track(measured, description="measuring       ")
                for turn in team.measure(question, policies)
            ]
        return turns, service.metrics()


if __name__ == "__main__":
    app()
