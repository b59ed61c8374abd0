"""Many clients at once: every one stores prompts and reads them back, for a while."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvcache_service.bench import scene
from kvcache_service.bench.rows import Row, Track, row
from kvcache_service.bench.store import Worker
from kvcache_service.evaluation.service import ServiceProcess

CLIENTS = 64
MAX_GROWTH = 256 * scene.MIB  # of memory beside the tier in the second half: heaps breathe, leaks go on
SIZE = 4 * scene.MIB
SETTINGS = scene.SETTLED | {"host_bytes": str(1 << 30)}  # less than what comes in, so that old prompts go


def run(track: Track[int], rounds: int) -> Iterator[Row]:
    """rounds: seconds, in two halves. Raises RuntimeError where a call failed, memory grows or bytes stay behind."""
    with ServiceProcess(**SETTINGS) as service:
        alone = _together(track, service, 1, max(1, rounds // 10))
        crowd = _together(track, service, CLIENTS, max(1, rounds // 2))
        before = _beside_tier(service)
        for kind, times in _together(track, service, CLIENTS, max(1, rounds // 2)).items():
            crowd[kind] += times
        grown = _beside_tier(service) - before
        if grown > MAX_GROWTH:
            raise RuntimeError(f"the service grew by {grown:.0f} bytes in the second half")
        while service.metrics()["kvcache_sessions"]:
            pass
        left = {name: service.metrics()[name] for name in ("kvcache_leased_bytes", "kvcache_buffer_bytes", "kvcache_open_turns")}
        if any(left.values()):
            raise RuntimeError(f"left behind: {left}")
    for kind in ("store", "retrieve"):
        case = f"{kind} {scene.named(SIZE)}, {CLIENTS} clients"
        yield row("load", case, "one client alone", crowd[kind], alone[kind], size=SIZE, clients=CLIENTS)


def _beside_tier(service: ServiceProcess) -> float:
    """Bytes of memory that the service's process holds beyond the tensors in its tier."""
    pages = int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") - service.metrics()["kvcache_host_used_bytes"]


def _together(track: Track[int], service: ServiceProcess, clients: int, duration: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"store": [], "retrieve": []}
    failed: list[BaseException] = []
    stop = threading.Event()
    prompts = scene.Prompts()

    def work() -> None:
        try:
            with Worker(service.target, "auto", prompts, SIZE) as worker:
                while not stop.is_set():
                    times["store"].append(worker.put())
                    times["retrieve"].append(worker.get())
        except BaseException as error:
            failed.append(error)
            stop.set()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + duration
    for _ in track(range(duration), duration, f"load: {clients} clients, seconds"):
        if stop.wait(max(0.0, min(1.0, end - time.monotonic()))):
            break
    stop.set()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError(f"{len(failed)} clients failed") from failed[0]
    return times
