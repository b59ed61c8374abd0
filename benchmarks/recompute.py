"""How many recomputed tokens buy how much quality: the table of docs/decisions/0003-guarded-policy.md.

    .venv/bin/python benchmarks/recompute.py --dataset ../shared/data/gsm8k.jsonl

Runs the demo's own team through the real service, once per setting, on the training half of the dataset's split
(even lines; odd lines are for reporting). KL and agreement do not depend on the machine's speed; times are not reported.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer
from kvcache_client import KVCacheClient
from kvcache_client.adapters.transformers import SharedModel
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvcache_service.demo import model as demo_model
from kvcache_service.demo.report import quantile
from kvcache_service.demo.run import Measured, Team, read_dataset
from kvcache_service.demo.service import ServiceProcess
from kvcache_service.demo.team import templates

SETTINGS = [(0, 1), (0, 16), (4, 16), (8, 16)]  # (boundary, trailing)


def main(
    dataset: Path,
    agents: int = 3,
    warmup: int = 13,
    requests: int = 8,
    answer_tokens: int = 32,
    json_path: Annotated[Path, typer.Option("--json")] = Path("out/recompute.json"),
) -> None:
    questions = read_dataset(dataset)[::2]
    model, tokenizer = demo_model.load(None)
    rows = []
    for boundary, trailing in SETTINGS:
        turns: list[Measured] = []
        with (
            ServiceProcess(boundary=str(boundary), trailing=str(trailing), max_cost_ratio="1e9") as service,
            KVCacheClient(service.target) as client,
        ):
            team = Team(SharedModel(model, tokenizer, client), templates(agents), answer_tokens)
            for question in track(questions[:warmup], description=f"{boundary}+{trailing} warm"):
                team.warm(question)
            for question in track(questions[warmup : warmup + requests], description=f"{boundary}+{trailing} measure"):
                turns += [t for t in team.measure(question, ["guarded"]) if t.answer.outcome == "reuse"]
        rows.append(
            {
                "boundary": boundary,
                "trailing": trailing,
                "n": len(turns),
                "fresh": statistics.fmean(t.answer.prompt_tokens - t.answer.reused_tokens for t in turns),
                "kl_mean": statistics.fmean(t.kl for t in turns),
                "kl_p95": quantile([t.kl for t in turns], 0.95),
                "top1": statistics.fmean(t.top1 for t in turns),
            }
        )
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps({"rows": rows}, indent=1))
    table = Table(*rows[0], title="Recomputed tokens against quality, reuse turns of agents 2 and later")
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
