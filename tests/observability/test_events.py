"""KV events over real sockets: order, resumption, losses, tenants, slow readers. The one thing a router needs to hold: who has
taken in all batches knows what a snapshot would tell."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcache_client import CacheError, Credentials, KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.bench import scene
from kvcache_service.engine.events import MOST
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.prompt import tokens_key
from tests.conftest import ByteTokenizer
from tests.e2e.test_agents import FIRST, Team
from tests.security.conftest import entry
from tests.security.test_tenants import store

Start = Callable[..., ServiceProcess]
SHAPE = scene.Shape(2, 1, 32)  # 256 bytes a token
CHUNK = scene.CHUNK
BLOB = CHUNK * SHAPE.token_bytes
Known = dict[tuple[int, bytes, int], pb.Event]  # by kind, content and start


class Index:
    """What a router keeps."""

    def __init__(self) -> None:
        self.known: Known = {}
        self.cursor = ""
        self.gaps = 0

    def take(self, batch: pb.EventBatch) -> pb.EventBatch:
        if batch.lost:
            self.known.clear()
            self.gaps += 1
        for event in batch.events:
            key = (event.kind, event.content, event.start)
            if event.removed:
                del self.known[key]
            else:
                assert key not in self.known, "nothing is stored twice"
                self.known[key] = event
        self.cursor = batch.cursor
        return batch

    def until(self, stream: Iterator[pb.EventBatch], done: Callable[[], bool]) -> None:
        """Take batches in until `done`; the stream's own silence of five seconds bounds the waiting."""
        for silent in stream:
            if self.take(silent) and done():
                return
            assert silent.events or silent.lost or not silent.cursor, "nothing came for five seconds"


class Writer:
    """Stores prompts that share no token."""

    def __init__(self, client: KVCacheClient) -> None:
        self._client = client
        self._template = scene.plain_template(client, SHAPE)
        self.prompts = scene.Prompts()

    def store(self, tokens: int = 4 * CHUNK) -> list[int]:
        prompt = self.prompts.take(tokens)
        store(self._client, self._template, prompt, torch.zeros(scene.noise(tokens, SHAPE).shape, dtype=torch.bfloat16))
        return prompt


def snapshot(client: KVCacheClient) -> tuple[Known, str]:
    index, stream = Index(), client.events()
    for batch in stream:
        if index.take(batch).cursor:
            break
    stream.close()  # type: ignore[attr-defined]
    return index.known, index.cursor


def chunks(prompt: list[int]) -> list[tuple[bytes, int]]:
    return [(bytes.fromhex(tokens_key(prompt[: end + CHUNK])), end) for end in range(0, len(prompt), CHUNK)]


def test_order_resumption_and_restart(start_service: Start) -> None:
    with start_service(host_bytes=str(64 << 20)) as service, KVCacheClient(service.target) as client:
        writer, index, stream = Writer(client), Index(), client.events()
        first = index.take(next(stream))
        assert (first.lost, len(first.events)) == (True, 0), "who has no cursor begins with an empty index"
        stored = writer.store()
        index.until(stream, lambda: len(index.known) == 4)
        events = list(index.known.values())
        assert [(e.content, e.start) for e in events] == chunks(stored), "chunk after chunk, named by what a router can work out"
        assert {(e.kind, e.tokens, e.bytes, e.model_id) for e in events} == {
            (pb.KIND_PREFIX, CHUNK, BLOB, client.register_model(scene.model(SHAPE)))
        }
        stream.close()  # type: ignore[attr-defined]

        missed = writer.store()
        again = client.events(index.cursor)
        index.until(again, lambda: len(index.known) == 8)
        assert index.gaps == 1, "nothing was lost in between"
        assert [(e.content, e.start) for e in list(index.known.values())[4:]] == chunks(missed)
        assert snapshot(client)[0] == index.known

        with pytest.raises(CacheError) as caught:
            next(client.events("a cursor of mine"))
        assert (caught.value.code, caught.value.field) == ("INVALID", "cursor")
        other = next(client.events("00ff:3", snapshot=False))
        assert other.lost, "a cursor of another boot says nothing here"
        assert not other.events
        service.process.send_signal(signal.SIGTERM)
        assert all(not batch.lost for batch in again), "a service that drains ends the stream in order"


def test_what_follows_equals_a_snapshot_under_eviction(start_service: Start) -> None:
    """Three writers overflow a small tier while a router follows: afterwards it knows exactly what is held."""
    with start_service(host_bytes=str(40 * BLOB)) as service:
        clients = [KVCacheClient(service.target) for _ in range(3)]
        index, stream = Index(), clients[0].events()
        index.take(next(stream))
        removed = 0

        def write(number: int) -> None:
            writer = Writer(clients[number])
            writer.prompts._next = itertools.count(100 * number)
            for _ in range(15):
                writer.store()

        threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held, cursor = snapshot(clients[1])
        for batch in stream:
            removed += sum(event.removed for event in index.take(batch).events)
            if index.cursor == cursor:
                break
        assert index.known == held
        assert 0 < len(held) <= 40
        assert removed == 3 * 15 * 4 - len(held)
        assert index.gaps == 1
        for client in clients:
            client.close()


def test_a_gap_is_told_and_mended(start_service: Start) -> None:
    """Who was away for longer than the log reaches back is told so, and begins again from what is held."""
    with start_service(host_bytes=str(64 << 20), event_log="8") as service, KVCacheClient(service.target) as client:
        writer, index = Writer(client), Index()
        stream = client.events()
        index.take(next(stream))
        writer.store()
        index.until(stream, lambda: len(index.known) == 4)
        stream.close()  # type: ignore[attr-defined]
        for _ in range(2):
            writer.store()
        index.until(client.events(index.cursor), lambda: len(index.known) == 12)
        assert index.gaps == 1, "eight events are within reach"
        for _ in range(3):
            writer.store()
        index.until(client.events(index.cursor), lambda: bool(index.cursor))
        assert index.gaps == 2, "twelve are not"
        assert len(index.known) == 24
        for _ in range(3):
            writer.store()
        blind = next(client.events(index.cursor, snapshot=False))
        assert (blind.lost, len(blind.events)) == (True, 0)
        assert blind.cursor == snapshot(client)[1]


def test_a_slow_reader_slows_nobody(start_service: Start) -> None:
    """One that does not read at all: writers go on, memory stays bounded, and when it reads again it is told of its gap."""
    with start_service(host_bytes=str(2000 * BLOB), event_log="64") as service, KVCacheClient(service.target) as client:
        writer, index, stream = Writer(client), Index(), client.events()
        index.take(next(stream))
        for _ in range(60):
            writer.store(64 * CHUNK)
        held, cursor = snapshot(client)
        assert len(held) > MOST, "a snapshot of several batches"
        for batch in stream:
            index.take(batch)
            if index.cursor == cursor:
                break
        assert index.gaps > 1
        assert index.known == held


def test_tenants_see_their_own(start_service: Start, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("ours", "a") + entry("theirs", "b"))
    with (
        start_service(host_bytes=str(64 << 20), tokens_file=str(file), quota_event_streams="2") as service,
        KVCacheClient(service.target, credentials=Credentials(token="ours")) as ours,
        KVCacheClient(service.target, credentials=Credentials(token="theirs")) as theirs,
        KVCacheClient(service.target) as stranger,
    ):
        with pytest.raises(CacheError) as caught:
            next(stranger.events())
        assert caught.value.code == "UNAUTHENTICATED"
        index, stream = Index(), theirs.events()
        index.take(next(stream))
        mine, other = Writer(ours), Writer(theirs)
        for _ in range(3):
            mine.store()
        prompt = other.store()
        index.until(stream, lambda: bool(index.known))
        assert [(content, start) for _, content, start in index.known] == chunks(prompt)
        assert index.cursor.endswith(":4"), "not even how much another tenant stores"
        assert len(snapshot(ours)[0]) == 12

        second = theirs.events()
        next(second)
        with pytest.raises(CacheError, match="quota_event_streams") as caught:
            next(theirs.events())
        assert (caught.value.code, caught.value.retry_after) == ("BUSY", 1.0)
        next(ours.events())
        second.close()  # type: ignore[attr-defined]
        assert any(admitted(theirs) for _ in range(1000)), "the place of a reader that left is free as soon as the service hears"


def admitted(client: KVCacheClient) -> bool:
    """False while the tenant has as many readers as it may."""
    try:
        next(client.events())
    except CacheError as error:
        if error.code != "BUSY":
            raise
        return False
    return True


def test_samples_and_anchors(start_service: Start, model: Any) -> None:
    """What agents leave: role prompts and questions, answers, and offsets."""
    with start_service() as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        answers = [team.ask(f"{number} is the question") for number in range(3)]
        known, _ = snapshot(client)
    found = {kind: [e for e in known.values() if e.kind == kind] for kind in (pb.KIND_PREFIX, pb.KIND_SAMPLE, pb.KIND_ANCHOR)}
    role = ByteTokenizer()(FIRST.partition("{")[0])["input_ids"]
    assert bytes.fromhex(tokens_key(role)) in {e.content for e in found[pb.KIND_PREFIX]}
    said = {bytes.fromhex(tokens_key(answer.token_ids)) for pair in answers for answer in pair}
    assert {e.content for e in found[pb.KIND_SAMPLE]} == said
    first = {bytes.fromhex(tokens_key(answer.token_ids)) for answer, _ in answers}
    questions = {bytes.fromhex(tokens_key(list(f"{number} is the question".encode()))) for number in range(3)}
    anchors = {(e.content, e.template_id, e.ordinal) for e in found[pb.KIND_ANCHOR]}
    assert {content for content, _, _ in anchors} <= first | questions
    assert {content for content, _, _ in anchors} & first
    assert {len(template) for _, template, _ in anchors} == {64}
    assert {ordinal for _, _, ordinal in anchors} <= {1, 3}
    assert all(e.bytes > 0 for e in known.values())
