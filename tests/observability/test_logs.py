"""JSON log lines of a real service: which call, whose, which turn, in every thread; and what must never stand in them."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from kvcache_client import CacheError, Credentials, KVCacheClient
from kvcache_client.adapters.transformers import SharedModel
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service import logs
from kvcache_service.bench import scene
from kvcache_service.evaluation.service import ServiceProcess
from tests.conftest import ByteTokenizer
from tests.security.conftest import entry

Start = Callable[..., ServiceProcess]
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
SECRET, PROMPT = "a-token-nobody-may-read", "What did the patient say? zebra-crossing"


@contextmanager
def root_logger() -> Iterator[None]:
    """configure() changes the process's loggers; give them back as they were."""
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in ("kvcache", "kvcache_service")]
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *ours)]
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for logger, level in zip((root, *ours), levels, strict=True):
            logger.setLevel(level)


def lines_of(text: str) -> list[dict[str, Any]]:
    """Every line is an object with the four fields that all of them have."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= line.keys()
        assert TIME.fullmatch(line["time"])
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    return lines


def test_a_line_says_what_it_is_about() -> None:
    stream = io.StringIO()
    with root_logger():
        logs.configure("debug", "json", stream)
        logs.about(method="m", tenant="t", session_id="0" * 32, turn_id='"},{"level":"critical')
        try:
            raise ValueError("broken\nin two")
        except ValueError:
            logging.getLogger("kvcache_service.anything").exception("it failed", extra={"code": "internal"})
        logging.getLogger("somebody.else").debug("libraries do not chatter")
    (line,) = lines_of(stream.getvalue())
    assert (line["method"], line["tenant"], line["session_id"], line["code"]) == ("m", "t", "0" * 32, "internal")
    assert "turn_id" not in line, "what is no id of ours is a caller's text"
    assert line["exception"].endswith("ValueError: broken\nin two")
    assert (line["level"], line["logger"]) == ("error", "kvcache_service.anything")


def test_lines_follow_the_call(start_service: Start, tmp_path: Path, model: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Two tenants side by side: every line names its own call, tenant, session and turn, also from worker threads; no line
    holds a token or a word of a prompt, at the most talkative level."""
    file = tmp_path / "tokens.toml"
    file.write_text(entry(SECRET, "a") + entry(SECRET[::-1], "b"))
    disk = tmp_path / "disk"
    with (
        start_service(tokens_file=str(file), log_level="debug", log_format="json", disk_dir=str(disk)) as service,
        KVCacheClient(service.target, credentials=Credentials(token=SECRET)) as ours,
        KVCacheClient(service.target, credentials=Credentials(token=SECRET[::-1])) as theirs,
    ):
        shared = SharedModel(model, ByteTokenizer(), ours)
        agent = shared.agent(PROMPT + "{question}", produces="answer")
        for _ in range(2):
            agent.run({"question": PROMPT[::-1]}, max_new_tokens=4)
        template = scene.plain_template(theirs)
        turn = theirs.open_turn(template, {"prompt": [1, 2, 3]}, reserve_tokens=0)
        with pytest.raises(CacheError):
            turn.settle(pb.VERDICT_ACCEPTED)  # without a finish reason
        turn.settle(pb.VERDICT_ABORTED)
        with pytest.raises(CacheError):
            theirs.calibrate(template)
        with KVCacheClient(service.target, credentials=Credentials(token=SECRET[1:])) as stranger, pytest.raises(CacheError):
            stranger.status()
        session, turn_id = theirs.connect().session_id, turn.plan.turn_id
    text = capfd.readouterr().err
    lines = lines_of(text)
    settled = [line for line in lines if line["message"].startswith("settled: ")]
    assert [line["tenant"] for line in settled] == ["a", "a", "b"]
    assert len({line["turn_id"] for line in settled}) == 3
    assert {line["method"] for line in settled} == {"kvcache.v1.Turns.SettleTurn"}

    mine = [line for line in lines if line.get("turn_id") == turn_id]
    assert {line["tenant"] for line in mine} == {"b"}
    assert [line["method"].rpartition(".")[2] for line in mine] == ["OpenTurn", "SettleTurn", "SettleTurn"]
    assert [line.get("code") for line in mine] == [None, "invalid", None]
    assert mine[0]["session_id"] == session

    audit = [line for line in lines if line["logger"] == "kvcache.audit"]
    assert [(line["code"], line.get("tenant")) for line in audit] == [("permission", "b"), ("unauthenticated", None)]
    threads = [line for line in lines if line["logger"] == "kvcache_service.catalog.store" and "claimed" in line["message"]]
    assert {line["tenant"] for line in threads} == {"a", "b"}, "what worker threads say is about the call as well"
    assert {line["method"] for line in threads} == {"kvcache.v1.KVCache.RegisterTemplate"}

    ids = ", ".join(str(token) for token in ByteTokenizer()(PROMPT)["input_ids"][:4])
    for hidden in (SECRET, SECRET[::-1], SECRET[1:], "zebra", "Bearer", ids):
        assert hidden not in text
    assert PROMPT[::-1][:8] not in text
