"""Does the time of a miss tell what another tenant has stored? Opens prompts that the other tenant stored, and that nobody did.

.venv/bin/python benchmarks/tenants.py
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from kvcache_client import Credentials, KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.bench import scene
from kvcache_service.bench.rows import seconds
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.rpc.callers import digest_of

TOKENS = 1024


def main(
    rounds: Annotated[int, typer.Option(min=10, help="Prompts of each kind.")] = 300,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("out/tenants.json"),
) -> None:
    """Median time of OpenTurn on a miss, the prompt stored by another tenant over the prompt stored by nobody."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens.toml"
        file.write_text(
            "\n".join(f'[[token]]\nname = "w"\ntenant = "{t}"\nsha256 = "{digest_of(t)}"' for t in ("ours", "theirs"))
        )
        with (
            ServiceProcess(tokens_file=str(file), **scene.SETTLED) as service,
            KVCacheClient(service.target, credentials=Credentials(token="ours")) as ours,
            KVCacheClient(service.target, credentials=Credentials(token="theirs")) as theirs,
        ):
            shape = scene.Shape(2, 1, 32)
            template, kv = scene.plain_template(theirs, shape), scene.noise(TOKENS, shape)
            scene.plain_template(ours, shape)
            prompts = scene.Prompts()
            asked = [(prompts.take(TOKENS), stored) for _ in range(rounds) for stored in (True, False)]
            for prompt, stored in asked:
                if stored:
                    turn = theirs.open_turn(template, {"prompt": prompt}, reserve_tokens=0)
                    np.copyto(np.frombuffer(turn.buffer, np.uint8), np.frombuffer(scene.memory(kv), np.uint8))
                    turn.settle(pb.VERDICT_ACCEPTED, finish_reason=pb.FINISH_REASON_LENGTH, observed=(0, TOKENS))
            random.Random(0).shuffle(asked)
            times: dict[bool, list[float]] = {True: [], False: []}
            for prompt, stored in asked:
                times[stored].append(
                    seconds(lambda prompt=prompt: ours.open_turn(template, {"prompt": prompt}, reserve_tokens=0).release())
                )
    found = {str(stored): statistics.quantiles(values, n=4) for stored, values in times.items()}
    ratio = statistics.median(times[True]) / statistics.median(times[False])
    tenths = [statistics.median(times[True][i::10]) / statistics.median(times[False][i::10]) for i in range(10)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rounds": rounds, "quartiles_seconds": found, "ratio": ratio, "ratios_of_tenths": sorted(tenths)}))
    spread = f"tenths {min(tenths):.3f} to {max(tenths):.3f}"
    typer.echo(f"a miss that another tenant stored takes {ratio:.3f} times a miss that nobody stored; {spread}")


if __name__ == "__main__":
    typer.run(main)
