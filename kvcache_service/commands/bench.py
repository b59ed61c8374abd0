"""`kvcache bench`."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvcache_service.commands import common


class Bench(enum.Enum):
    TRANSPORT = "transport"
    ASSEMBLE = "assemble"
    STORE = "store"
    TURN = "turn"
    LOAD = "load"


def bench(
    what: Annotated[list[Bench], typer.Argument(help="One or several.")],
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions of each case.")] = 30,
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")] = Path("out/bench.json"),
    png: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/bench.png"),
) -> None:
    """Time the data path of a real service, each case beside its floor: what no cache can beat on this machine.

    transport: KV from the service to a worker. assemble: the CPU kernels. store: prompts in and out, 1 and 8 clients.
    turn: planning with full pools, and a whole reuse turn. load: many clients at once.
    """
    from kvcache_service.bench import assemble, load, report, store, transport, turn

    benches = {
        Bench.TRANSPORT: transport.run,
        Bench.ASSEMBLE: assemble.run,
        Bench.STORE: store.run,
        Bench.TURN: turn.run,
        Bench.LOAD: load.run,
    }
    screen = common.console()
    rows = []
    with common.Bars(screen) as bars:
        for name in what:
            rows += list(benches[name](bars.track, rounds))
    report.show(screen, rows)
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
    png.parent.mkdir(parents=True, exist_ok=True)
    report.draw(png, rows)
    screen.print(f"figures: {json_path}   picture: {png}")
