"""`kvcache eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_service.commands import common

_POLICIES = "off,paper,reference,reposition,recompute,guarded:0+1,guarded"


def evaluate(
    dataset: Annotated[
        list[Path],
        typer.Option(exists=True, dir_okay=False, help="JSON lines with `question` or `prompt`; may be given twice."),
    ],
    settings: Annotated[
        str, typer.Option(help="A (question behind another prefix), B (answer), C (pool of another domain), agents.")
    ] = "agents",
    agents: Annotated[int, typer.Option(min=2, max=5, help="Agents of the setting `agents`.")] = 4,
    topology: Annotated[str, typer.Option(help="chain, full, or judge: all to one who decides.")] = "full",
    warmup: Annotated[int, typer.Option(min=1, help="Questions that fill the pools.")] = 32,
    calibration: Annotated[int, typer.Option(min=6, help="Further questions that find the thresholds.")] = 12,
    requests: Annotated[int, typer.Option(min=1, help="Measured questions, from the other half of the dataset.")] = 22,
    policies: Annotated[str, typer.Option(help="Comma-separated; NAME:BOUNDARY+TRAILING varies the recompute.")] = _POLICIES,
    controls: Annotated[int, typer.Option(min=0, help="Measured questions that also run with spoilt KV.")] = 4,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Longest answer of an agent, in tokens.")] = 40,
    model: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A transformers model folder; default SmolLM2-135M.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Order of the questions.")] = 0,
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")] = Path("out/eval.json"),
    png: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/eval.png"),
) -> None:
    """Compare policies on the same turns, through a real service: distance from dense, reuse, gates, TTFT.

    Pools and thresholds learn from odd lines of the dataset; even lines are measured. Fails when spoilt KV scores well.
    """
    from kvcache_service.evaluation import dataset as data
    from kvcache_service.evaluation import policies as known
    from kvcache_service.evaluation import report, run

    options = run.Options(agents, topology, answer_tokens, warmup, calibration, requests, controls, seed)
    try:
        chosen = [known.parse(name) for name in policies.split(",")]
        plans = run.plans(settings.split(","), [data.read(path, seed) for path in dataset], options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    screen = common.console()
    loaded, tokenizer = common.load_model(screen, model)
    results: dict[str, Any] = {}
    for plan in plans:
        with common.Bars(screen) as bars:
            results[plan.name] = run.run(plan, chosen, loaded, tokenizer, options, bars.track)
        report.show(screen, plan.name, results[plan.name])
        _write(json_path, run.describe(options, chosen), results)
    png.parent.mkdir(parents=True, exist_ok=True)
    report.draw(png, results)
    screen.print(f"figures: {json_path}   picture: {png}")
    failed = run.failed_controls(results)
    if failed:
        typer.echo(f"error: controls scored too well: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def _write(path: Path, options: dict[str, Any], results: dict[str, Any]) -> None:
    """The documented layout: settings -> name -> policy -> figures; beside it what concerns a whole setting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "options": options,
        "settings": {name: result["policies"] for name, result in results.items()},
        "details": {name: {k: v for k, v in result.items() if k != "policies"} for name, result in results.items()},
    }
    path.write_text(json.dumps(body, indent=1))
