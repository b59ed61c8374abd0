"""`kvcache calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvcache_service.commands import common


def calibrate(
    dataset: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="JSON lines with `question` or `prompt`: traffic like yours.")
    ],
    target: common.Target = "127.0.0.1:50051",
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    team_file: Annotated[
        Path | None,
        typer.Option(
            "--team", exists=True, dir_okay=False, help="JSON lines {name, template, produces, decision}; default: the demo's."
        ),
    ] = None,
    agents: Annotated[int, typer.Option(min=2, max=5, help="Agents of the demo's team.")] = 4,
    warmup: Annotated[int, typer.Option(min=1, help="Questions that fill the pools first.")] = 16,
    questions: Annotated[int, typer.Option(min=6, help="Questions that are audited.")] = 12,
    target_kl: Annotated[float, typer.Option(min=0.0, help="95 % quantile over turns of the KL to dense, nats.")] = 0.05,
    target_top1: Annotated[float, typer.Option(min=0.0, max=1.0, help="Mean top-1 agreement with dense.")] = 0.97,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Longest answer of an agent, in tokens.")] = 40,
    model: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A transformers model folder; default SmolLM2-135M.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Order of the questions.")] = 0,
    json_output: common.Json = False,
) -> None:
    """Find the thresholds of a running service for a model and its templates, at a quality target.

    Reuse under the policy `guarded` is off for a template until this ran, or until enough of its live turns were audited.
    """
    import random

    from kvcache_client.adapters.transformers import SharedModel

    from kvcache_service.evaluation import dataset as data
    from kvcache_service.evaluation import report
    from kvcache_service.evaluation.runner import Runner
    from kvcache_service.evaluation.scenes import Agents
    from kvcache_service.evaluation.summary import calibration
    from kvcache_service.evaluation.team import Member, team

    try:
        rows = data.read_rows(dataset)
        lines = team_file.read_text().splitlines() if team_file else []
        members = [Member(**json.loads(line)) for line in lines if line.strip()] or team(agents, "full")
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    if len(rows) < warmup + questions:
        raise typer.BadParameter(f"{warmup + questions} rows are needed, {len(rows)} are there", param_hint="--dataset")
    random.Random(seed).shuffle(rows)
    screen = common.console(stderr=json_output)
    loaded, tokenizer = common.load_model(screen, model)
    with common.connected(target, ca, certificate, key, token_file) as client, common.Bars(screen) as bars:
        setting = Agents("calibrate", SharedModel(loaded, tokenizer, client), members, answer_tokens)
        runner = Runner(setting, [], 0)
        runner.warm(bars.track(setting.scenes(rows[:warmup], seed), warmup, "warming the pools"))
        audited = bars.track(setting.scenes(rows[warmup : warmup + questions], seed), questions, "calibrating")
        fitted = runner.calibrate(audited, lambda t: client.calibrate(t, target_kl=target_kl, target_top1=target_top1))
    found = {name: calibration(value) for name, value in fitted.items()}
    if json_output:
        typer.echo(json.dumps(found, indent=2))
        return
    report.show_calibrations(screen, found)
