"""Store and retrieve of whole prompts, ours beside Valkey and, where they are installed, LMCache and Mooncake Store.

.venv/bin/python benchmarks/side_by_side.py
.venv/bin/python benchmarks/side_by_side.py --lmcache grpc://127.0.0.1:PORT --mooncake 127.0.0.1:PORT --peer-python PYTHON

The peers have a virtual environment of their own (LMCache 0.5.6 needs protobuf < 7) and are started before:
lmcache server --transport grpc --supported-transfer-mode engine_driven --host 127.0.0.1 --port PORT --chunk-size 256
mooncake_master -rpc_address=127.0.0.1 -rpc_port=PORT
mooncake_client -host=127.0.0.1 -port=OTHER -master_server_address=127.0.0.1:PORT -metadata_server=P2PHANDSHAKE -protocol=tcp
  -global_segment_size="4 GB" -local_buffer_size=0
Bytes are new in every round. A retrieve of ours turns the keys to their position; the others hand back what they were given.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import redis
import typer
from peers import timing
from rich.console import Console
from rich.table import Table

from kvcache_service.bench import scene
from kvcache_service.bench.rows import seconds
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


def ours(transport: str, rounds: int, step: Callable[[str], None]) -> timing.Times:
    with ServiceProcess(**scene.SETTLED) as service:
        prompts = scene.Prompts()
        return timing.measure(
            lambda size: Worker(service.target, transport, prompts, size, SHAPES[size]), rounds, list(SHAPES), step
        )


class ValkeyClient:
    """SET and GET of one key."""

    def __init__(self, url: str, size: int) -> None:
        self._redis = redis.Redis.from_url(url)
        self._key = os.urandom(8)
        self._value = b""
        self._size = size

    def put(self) -> float:
        self._value = os.urandom(self._size)
        return seconds(lambda: self._redis.set(self._key, self._value))

    def get(self) -> float:
        found: list[object] = []
        spent = seconds(lambda: found.append(self._redis.get(self._key)))
        assert found == [self._value]
        return spent


def valkey(rounds: int, step: Callable[[str], None]) -> timing.Times:
    with EmbeddedServer() as server:
        return timing.measure(lambda size: contextlib.nullcontext(ValkeyClient(server.url, size)), rounds, list(SHAPES), step)


def peer(python: Path, script: str, address: str, rounds: int) -> timing.Times:
    path = Path(__file__).parent / "peers" / script
    command = [python, path, address, str(rounds), *map(str, SHAPES)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    read = json.loads(done.stdout.splitlines()[-1])
    return {int(size): {int(count): times for count, times in counts.items()} for size, counts in read.items()}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 10,
    lmcache: Annotated[str | None, typer.Option(help="URL of a running LMCache server.")] = None,
    mooncake: Annotated[str | None, typer.Option(help="Address of a running Mooncake master.")] = None,
    peer_python: Annotated[Path | None, typer.Option(help="The Python that both are installed for.")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")] = Path("out/side_by_side.json"),
) -> None:
    if (lmcache or mooncake) and peer_python is None:
        raise typer.BadParameter("needed for LMCache and Mooncake", param_hint="--peer-python")
    screen = common.console()
    found: dict[str, timing.Times] = {}
    with screen.status("") as status:
        for name in ("shared_memory", "stream"):
            found[f"ours, {name.replace('_', ' ')}"] = ours(
                name, rounds, lambda what, name=name: status.update(f"ours, {name}: {what}")
            )
        found["Valkey"] = valkey(rounds, lambda what: status.update(f"Valkey: {what}"))
        for name, script, address in (("LMCache", "lmcache_client.py", lmcache), ("Mooncake", "mooncake_client.py", mooncake)):
            if address and peer_python:
                status.update(name)
                found[name] = peer(peer_python, script, address, rounds)
    rows = [
        {
            "system": system,
            "bytes": size,
            "clients": count,
            "act": act,
            "seconds_p50": statistics.median(times),
            "seconds_p25": statistics.quantiles(times, n=4)[0],
            "seconds_p75": statistics.quantiles(times, n=4)[2],
        }
        for system, sizes in found.items()
        for size, counts in sizes.items()
        for count, both in counts.items()
        for act, times in zip(("store", "retrieve"), both, strict=True)
    ]
    show(screen, rows)
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps({"rows": rows}, indent=1))
    screen.print(f"figures: {json_path}")


def show(screen: Console, rows: list[dict[str, object]]) -> None:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    table = Table("case", *(f"{name}, ms" for name in systems))
    cases = dict.fromkeys((row["bytes"], row["clients"], row["act"]) for row in rows)
    for size, count, act in cases:
        found = {row["system"]: row for row in rows if (row["bytes"], row["clients"], row["act"]) == (size, count, act)}
        cells = (f"{1e3 * float(str(found[name]['seconds_p50'])):.2f}" for name in systems)
        table.add_row(f"{act} {scene.named(int(str(size)))}, {count} clients", *cells)
    screen.print(table)


if __name__ == "__main__":
    typer.run(main)
