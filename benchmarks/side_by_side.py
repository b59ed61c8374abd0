"""Store and retrieve of whole prompts, ours beside Redis and, where it is installed, LMCache's gRPC server.

.venv/bin/python benchmarks/side_by_side.py
.venv/bin/python benchmarks/side_by_side.py --lmcache grpc://127.0.0.1:PORT --lmcache-python VENV/bin/python

LMCache 0.5.6 has a virtual environment of its own (protobuf < 7) and is started before:
lmcache server --transport grpc --supported-transfer-mode engine_driven --host 127.0.0.1 --port PORT --chunk-size 256
Bytes are new in every round. A retrieve of ours turns the keys to their position; the others hand back what they were given.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Annotated

import redis
import typer
from rich.console import Console
from rich.table import Table

from kvcache_service.bench import scene
from kvcache_service.bench.rows import WARMUP, seconds
from kvcache_service.bench.store import Worker
from kvcache_service.catalog.embedded import EmbeddedServer
from kvcache_service.commands import common
from kvcache_service.evaluation.service import ServiceProcess

# Models of which 256 tokens have so many bytes.
SHAPES = {
    64 * scene.KIB: scene.Shape(2, 1, 32),
    scene.MIB: scene.Shape(8, 1, 128),
    8 * scene.MIB: scene.Shape(16, 4, 128),
    64 * scene.MIB: scene.Shape(32, 16, 128),
}
Times = dict[int, list[list[float]]]  # size -> seconds of every store, of every retrieve


def ours(transport: str, rounds: int, bars: common.Bars) -> Times:
    found: Times = {}
    with ServiceProcess() as service:
        for size, shape in SHAPES.items():
            with Worker(service.target, transport, scene.Prompts(), size, shape) as worker:
                steps = bars.track(range(rounds + WARMUP), rounds + WARMUP, f"{transport}, {scene.named(size)}")
                pairs = [(worker.put(), worker.get()) for _ in steps]
            found[size] = [list(side) for side in zip(*pairs[WARMUP:], strict=True)]
    return found


def valkey(rounds: int, bars: common.Bars) -> Times:
    found: Times = {}
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        for size in SHAPES:
            pairs = []
            for _ in bars.track(range(rounds + WARMUP), rounds + WARMUP, f"Valkey, {scene.named(size)}"):
                value = os.urandom(size)
                pairs.append((seconds(lambda v=value: client.set("kv", v)), seconds(lambda: client.get("kv"))))
            found[size] = [list(side) for side in zip(*pairs[WARMUP:], strict=True)]
    return found


def lmcache(python: Path, url: str, rounds: int) -> Times:
    script = Path(__file__).parent / "peers" / "lmcache_client.py"
    sizes = [str(size) for size in SHAPES]
    done = subprocess.run([python, script, url, str(rounds), *sizes], stdout=subprocess.PIPE, text=True, check=True)
    return {int(size): times for size, times in json.loads(done.stdout.splitlines()[-1]).items()}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 20,
    lmcache_url: Annotated[str | None, typer.Option("--lmcache", help="A running LMCache server.")] = None,
    lmcache_python: Annotated[Path | None, typer.Option(help="The Python that LMCache is installed for.")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")] = Path("out/side_by_side.json"),
) -> None:
    screen = common.console()
    with common.Bars(screen) as bars:
        found = {name: ours(name, rounds, bars) for name in ("shared_memory", "stream")}
        found["Valkey"] = valkey(rounds, bars)
        if lmcache_url and lmcache_python:
            found["LMCache"] = lmcache(lmcache_python, lmcache_url, rounds)
    show(screen, found)
    json_path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"system": system, "bytes": size, "store_s": statistics.median(puts), "retrieve_s": statistics.median(gets)}
        for system, times in found.items()
        for size, (puts, gets) in times.items()
    ]
    json_path.write_text(json.dumps({"rows": rows}, indent=1))
    screen.print(f"figures: {json_path}")


def show(screen: Console, found: dict[str, Times]) -> None:
    table = Table("bytes", *(f"{name}: store / retrieve ms" for name in found))
    for size in SHAPES:
        cells = (" / ".join(f"{1e3 * statistics.median(side):.2f}" for side in times[size]) for times in found.values())
        table.add_row(scene.named(size), *cells)
    screen.print(table)


if __name__ == "__main__":
    typer.run(main)
