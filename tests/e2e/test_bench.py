"""`kvcache bench` through the real service: rows as documented, floors measured, nothing left behind."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from kvcache_client import KVCacheClient
from typer.testing import CliRunner

from kvcache_service.bench import load, scene, store, transport, turn
from kvcache_service.bench.rows import Row, compare, row
from kvcache_service.cli import app
from kvcache_service.evaluation.service import ServiceProcess

FIELDS = {"bench", "case", "bytes", "clients", "seconds_p50", "seconds_p99", "floor", "floor_seconds_p50", "ratio"}


def quietly(items: Iterable[int], total: int, description: str) -> Iterator[int]:
    yield from items


def check(rows: list[Row]) -> None:
    assert rows
    for one in rows:
        assert one.ratio == pytest.approx(one.seconds_p50 / one.floor_seconds_p50)
        assert 0 < one.seconds_p50 <= one.seconds_p99


def test_a_row_holds_medians_and_their_ratio() -> None:
    found = row("b", "c", "f", [4.0, 1.0, 2.0], [1.0, 0.5, 9.0], size=7, clients=2)
    assert asdict(found) == {
        "bench": "b",
        "case": "c",
        "bytes": 7,
        "clients": 2,
        "seconds_p50": 2.0,
        "seconds_p99": 4.0,
        "floor": "f",
        "floor_seconds_p50": 1.0,
        "ratio": 2.0,
    }


def test_the_case_and_its_floor_take_turns_and_the_first_ones_do_not_count() -> None:
    order: list[str] = []
    own, low = iter([99.0, 99.0, 99.0, 2.0, 4.0]), iter([99.0, 99.0, 99.0, 1.0, 1.0])

    def timed(name: str, times: Iterator[float]) -> float:
        order.append(name)
        return next(times)

    found = compare(quietly, "b", "c", "f", lambda: timed("own", own), lambda: timed("low", low), rounds=2)
    assert order == ["own", "low"] * 5
    assert (found.seconds_p50, found.floor_seconds_p50) == (3.0, 1.0)


def test_transport_and_store() -> None:
    rows = list(transport.run(quietly, 2, sizes=(scene.MIB,)))
    assert [r.case for r in rows] == ["fetch 1 MiB, shared memory", "fetch 1 MiB, stream"]
    rows += list(store.run(quietly, 1, sizes=(4 * scene.MIB,), clients=(1, 2)))
    assert [(r.clients, r.bytes) for r in rows[2:]] == [(n, 4 * scene.MIB) for n in (1, 1, 2, 2)] * 2
    check(rows)


def test_load_leaves_nothing_behind() -> None:
    check(list(load.run(quietly, 2)))


def test_planning_with_full_pools() -> None:
    one = turn.planning(quietly, 1)
    assert "12 placeholders, 48 pools, 1008 samples" in one.case
    check([one])


def test_the_command_writes_rows_and_a_picture(tmp_path: Path) -> None:
    figures, picture = tmp_path / "new" / "b.json", tmp_path / "other" / "b.png"
    result = CliRunner().invoke(app, ["bench", "assemble", "--rounds", "1", "--json", str(figures), "--png", str(picture)])
    assert result.exit_code == 0, result.output
    rows = json.loads(figures.read_text())["rows"]
    assert all(set(r) == FIELDS for r in rows)
    assert len(rows) == 30
    assert picture.read_bytes().startswith(b"\x89PNG")


class SlowPort:
    """Passes bytes on to another port of this machine, each chunk after `delay` seconds."""

    def __init__(self, port: int, delay: float) -> None:
        self._port, self._delay = port, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with source, target:
            while data := source.recv(1 << 16):
                time.sleep(self._delay)
                target.sendall(data)

    def close(self) -> None:
        self._listener.close()


def test_opening_a_turn_does_not_wait_for_redis(start_service: Callable[..., ServiceProcess], redis_url: str) -> None:
    """With 50 ms added on the way to Redis, a turn with known samples is planned in less than that."""
    slow = SlowPort(int(redis_url.rsplit(":", 1)[1].split("/")[0]), 0.025)
    with (
        start_service(redis_url=f"redis://127.0.0.1:{slow.port}/0", max_error="1e9", min_samples="2") as service,
        KVCacheClient(service.target) as client,
    ):
        templates = [scene.reader(client, f"agent {n}", 2, turn.SMALL) for n in range(2)]
        prompts = scene.Prompts()
        for _ in range(3):
            samples = {f"p{n}": prompts.take(turn.SAMPLE_TOKENS) for n in range(2)}
            for template in templates:
                turn.teach(client, template, samples)
        spent = []
        for _ in range(20):
            started = time.perf_counter()
            opened = client.open_turn(templates[-1], samples, reserve_tokens=1)
            spent.append(time.perf_counter() - started)
            assert opened.reuses
            opened.release()
        assert sorted(spent)[len(spent) // 2] < 0.025
    slow.close()
