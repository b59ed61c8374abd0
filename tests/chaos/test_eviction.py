"""A tier that is far too small for what comes in, many clients at once: a fetch brings what was promised or a clear miss."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from kvcache_client import CacheError, KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb
from numpy.typing import NDArray

from kvcache_service.bench import scene
from kvcache_service.evaluation.service import ServiceProcess

Bits = NDArray[np.uint16]
ROOT = Path(__file__).parents[2]
SHAPE = scene.Shape(2, 1, 64)  # 512 bytes a token
CLIENTS, TURNS, PROMPTS = 6, 40, 25
TOKENS = 3 * scene.CHUNK


def prompt(number: int) -> list[int]:
    return [1000 * number + place for place in range(TOKENS)]


def planes(buffer: memoryview, columns: int) -> tuple[Bits, Bits]:
    """bfloat16 bits of K and V, each [layers, columns, head_dim]."""
    bits = np.frombuffer(buffer, np.uint16).reshape(SHAPE.layers, 2, columns, SHAPE.dim)
    return bits[:, 0], bits[:, 1]


def one_turn(client: KVCacheClient, template: str, number: int) -> int:
    """Stores what is missing of a prompt whose V carries the prompt's number; returns the tokens that were fetched."""
    with client.open_turn(template, {"prompt": prompt(number)}, reserve_tokens=0, policy="exact") as turn:
        if turn.reuses:
            turn.fetch()
        keys, values = planes(turn.buffer, turn.plan.buffer_tokens)
        known = sorted(set(range(TOKENS)) - set(turn.fresh))
        assert (values[1][known] == number + 1).all(), "bytes of another prompt"
        keys[:, turn.fresh] = 0
        values[0][turn.fresh] = 0
        values[1][turn.fresh] = number + 1
        turn.observe(0, TOKENS)
        turn.settle(pb.VERDICT_ACCEPTED, finish_reason=pb.FINISH_REASON_LENGTH)
        return len(known)


def test_no_fetch_brings_other_bytes_than_promised(start_service: Callable[..., ServiceProcess], transport: str) -> None:
    chunk_bytes = scene.CHUNK * SHAPE.token_bytes
    with start_service(host_bytes=str(20 * chunk_bytes)) as service:
        fetched: list[int] = []
        refused: set[str] = set()

        def work(seed: int) -> None:
            draw = random.Random(seed)
            with KVCacheClient(service.target, transport=transport) as client:
                template = scene.plain_template(client, SHAPE)
                for _ in range(TURNS):
                    try:
                        fetched.append(one_turn(client, template, draw.randrange(PROMPTS)))
                    except CacheError as error:
                        refused.add(error.code)

        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(work, range(CLIENTS)))
        assert refused <= {"MISS", "QUOTA"}
        metrics = service.metrics()
        assert metrics["kvcache_host_evictions"] > PROMPTS, "the tier was too large to prove anything"
        assert sum(fetched) > TOKENS, "nothing was ever fetched"
        assert metrics["kvcache_host_used_bytes"] <= 20 * chunk_bytes
        assert metrics["kvcache_leased_bytes"] == 0


OPENS = 3000
ABANDON = """
import sys
from kvcache_client import CacheError, KVCacheClient
from kvcache_service.bench import scene
from tests.chaos.test_eviction import OPENS, SHAPE, prompt

client = KVCacheClient(sys.argv[1], transport=sys.argv[2])
template = scene.plain_template(client, SHAPE)
turns = []
for number in range(OPENS):
    try:
        turns.append(client.open_turn(template, {"prompt": prompt(0)}, reserve_tokens=0))
    except CacheError as error:
        if error.code != "QUOTA":
            raise
print("open", flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_no_lease(start_service: Callable[..., ServiceProcess], transport: str) -> None:
    """Thousands of turns opened and never fetched, as many as the session may hold and then some, then SIGKILL."""
    with start_service(session_bytes=str(256 << 20)) as service:
        with KVCacheClient(service.target) as client:
            one_turn(client, scene.plain_template(client, SHAPE), 0)
        worker = subprocess.Popen(
            [sys.executable, "-c", ABANDON, service.target, transport],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdout is not None
        assert worker.stdout.readline() == "open\n"
        metrics = service.metrics()
        assert 0 < metrics["kvcache_open_turns"] < OPENS
        assert metrics["kvcache_leased_bytes"] > 0
        worker.kill()
        worker.communicate()
        while service.metrics()["kvcache_open_turns"]:
            pass
        metrics = service.metrics()
        for name in ("kvcache_leases", "kvcache_leased_bytes", "kvcache_sessions", "kvcache_buffer_bytes"):
            assert metrics[name] == 0, name
