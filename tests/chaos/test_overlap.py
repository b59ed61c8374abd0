"""Many turns at once lose nothing and leave nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import redis

from kvcache_service.evaluation.service import ServiceProcess
from tests.chaos.worker import SHARED, TURNS

ROOT = Path(__file__).parents[2]
PROCESSES = 4


def test_overlapping_turns_from_four_processes(start_service: Callable[..., ServiceProcess]) -> None:
    """32 turns in flight, from 4 processes, twice: every accepted candidate is in the pool exactly once."""
    with start_service(min_samples="1000", pool_anchors="100") as service:
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.worker", service.target, str(number)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(PROCESSES)
        ]
        assert [w.communicate()[0] for w in workers] == ["done\n"] * PROCESSES
        metrics = service.metrics()
        assert sum(v for k, v in metrics.items() if k.startswith("kvcache_turns_total")) == 2 * PROCESSES * TURNS
        with redis.Redis.from_url(service.catalog_url, decode_responses=True) as server:
            anchors = {
                (key, sample): json.loads(text)
                for key in server.scan_iter("kvcache:1:*:pool:*")
                for sample, text in server.hgetall(key).items()
            }
        slots = [slot for anchor in anchors.values() for slot in anchor["slots"]]
        distinct = PROCESSES * (TURNS - SHARED) + SHARED
        assert len(slots) == metrics['kvcache_candidates_total{result="accepted"}'] == metrics["kvcache_anchors"] == distinct
        assert all(len(set(anchor["slots"])) == len(anchor["slots"]) for anchor in anchors.values())
        for name in ("kvcache_sessions", "kvcache_open_turns", "kvcache_leases", "kvcache_leased_bytes", "kvcache_buffer_bytes"):
            assert metrics[name] == 0, name
