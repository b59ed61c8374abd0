"""Keys that every process computes alike, configuration that refuses typos, frames, cost."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache_client.adapters.audit import Distance, compare
from kvcache_proto.v1 import codec
from kvcache_proto.v1 import kvcache_pb2 as pb
from kvcache_proto.v1.tensors import FrameError, FrameWriter, frames, ranges
from pydantic import ValidationError

from kvcache_service.__main__ import _masked
from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.config import Config, host_budget, refuse_unknown_environment
from kvcache_service.demo.run import questions
from kvcache_service.engine.cost import CostModel
from kvcache_service.engine.plan import Action, Plan, Reason, Repositioned, SegmentPlan
from kvcache_service.engine.planning import bypass
from kvcache_service.errors import Code, KVCacheError
from kvcache_service.evaluation.dataset import Row, read, read_rows
from kvcache_service.prompt import Fixed, Placeholder, Policy, Role, Template, chunked, context_keys, lay_out, tokens_key
from kvcache_service.quality import quantile

TEMPLATE = Template("m", (Fixed((1, 2)), Placeholder("x"), Fixed((3,)), Placeholder("y")), Role.REUSE, Policy.GUARDED, "z")


def in_process(code: str, seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": seed}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout


def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "from kvcache_service.prompt import *\n"
        "t = Template('m', (Fixed((1, 2)), Placeholder('x'), Fixed((3,)), Placeholder('y')), Role.REUSE, Policy.GUARDED, 'z')\n"
        "print(tokens_key([1, 2, 3]), t.template_id)"
    )
    assert in_process(code, "1") == in_process(code, "77") == f"{tokens_key([1, 2, 3])} {TEMPLATE.template_id}\n"


def test_golden_token_key() -> None:
    import hashlib

    by_hand = hashlib.sha256(b"kvcache.tokens.1" + bytes([1, 0, 0, 0, 0, 1, 0, 0])).hexdigest()
    assert tokens_key([1, 256]) == by_hand


def test_context_keys_cover_everything_before() -> None:
    spans = lay_out(TEMPLATE, {"x": (7, 8), "y": ()})
    assert [(s.start, s.end, s.placeholder) for s in spans] == [(0, 2, ""), (2, 4, "x"), (4, 5, ""), (5, 5, "y")]
    keys = context_keys(spans)
    assert keys[1] == tokens_key([1, 2, 7, 8])
    assert keys[2] == keys[3] == tokens_key([1, 2, 7, 8, 3])


def test_samples_must_fit() -> None:
    with pytest.raises(KVCacheError, match=r"missing \['y'\], unknown \['q'\]") as error:
        lay_out(TEMPLATE, {"x": (1,), "q": (1,)})
    assert error.value.code is Code.TEMPLATE_MISMATCH


def test_unknown_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="KVCACHE_REDIS_URI"):
        refuse_unknown_environment({"KVCACHE_REDIS_URI": "x", "HOME": "/"})
    monkeypatch.setenv("KVCACHE_GAMMA", "-1")
    with pytest.raises(ValidationError, match="gamma"):
        Config()
    with pytest.raises(ValidationError, match="extra"):
        Config(gama=1)


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({"KVCACHE_GAMA": "1"}, [], "unknown setting KVCACHE_GAMA"),
        ({"KVCACHE_GAMMA": "x"}, [], "gamma"),
        ({"KVCACHE_HOST_BYTES": str(1 << 60)}, [], "lower KVCACHE_HOST_BYTES"),
        ({}, ["--listen", "nowhere"], "listen"),
    ],
)
def test_serve_names_what_is_wrong(environment: dict[str, str], arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "kvcache_service.cli", "serve", *arguments]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_secrets_do_not_show() -> None:
    assert "hunter2" not in repr(Config(redis_url="redis://:hunter2@host:1"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:7/0", "redis://127.0.0.1:7/0"),
        ("redis://me:hunter2@host:1/0", "host:1/0"),
        ("redis+sentinel://:hunter2@a:1,b:2/kv?sentinel_password=hunter3", "a:1,b:2/kv"),
        ("rediss://host:1?password=hunter4", "rediss://host:1"),
    ],
)
def test_the_ready_line_shows_no_password(url: str, shown: str) -> None:
    assert _masked(url) == shown


def test_a_budget_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="KVCACHE_HOST_BYTES"):
        host_budget(Config(host_bytes=1 << 60))
    assert host_budget(Config(host_bytes=1 << 20)) == 1 << 20


@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 7),
    st.data(),
)
@settings(deadline=None)
def test_frames_carry_exactly_the_chosen_columns(planes: int, columns: int, row: int, limit: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, columns), min_size=4, max_size=4)))
    spans = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
    source = bytes(range(planes * columns * row)) if planes * columns * row < 256 else bytes(planes * columns * row)
    wire = ranges(range(planes), columns, row, spans)
    sent = [pb.FetchTurnReply.FromString(message).frame for message in frames(pb.FetchTurnReply, memoryview(source), wire, limit)]
    assert all(len(f.data) == limit for f in sent[:-1])
    target = bytearray(b"\xff" * len(source))
    writer = FrameWriter(memoryview(target), wire, limit)
    for frame in sent:
        assert frame.crc32 == zlib.crc32(frame.data)
        writer.write(frame)
    writer.finish()
    chosen = {p * columns * row + c * row + i for p in range(planes) for a, b in spans for c in range(a, b) for i in range(row)}
    assert bytes(target) == bytes(source[i] if i in chosen else 0xFF for i in range(len(source)))


@given(st.lists(st.binary(max_size=300), max_size=4), st.sampled_from([pb.FetchTurnReply, pb.PutRequest, pb.ObserveRequest]))
@settings(deadline=None)
def test_encoded_frames_are_the_bytes_of_protobuf(parts: list[bytes], kind: Any) -> None:
    data = b"".join(parts)
    message = codec.encode(kind, [memoryview(part) for part in parts])
    parsed = kind.FromString(message)
    assert (parsed.frame.data, parsed.frame.crc32) == (data, zlib.crc32(data))
    found = codec.deserializer(kind)(message)
    assert isinstance(found, codec.Frame)
    assert (bytes(found.data), found.crc32) == (data, zlib.crc32(data))


@given(st.binary(max_size=40), st.integers(0, 60), st.integers(0, 255))
@settings(deadline=None)
def test_reading_bytes_that_protobuf_might_not_have_written(data: bytes, place: int, value: int) -> None:
    """One byte of a message is replaced: it is read as protobuf reads it, or refused as protobuf refuses it."""
    message = bytearray(codec.encode(pb.ObserveRequest, [memoryview(data)]))
    message[place % len(message)] = value
    try:
        expected = pb.ObserveRequest.FromString(bytes(message))
    except DecodeError:
        with pytest.raises(DecodeError):
            codec.deserializer(pb.ObserveRequest)(bytes(message))
        return
    found = codec.deserializer(pb.ObserveRequest)(bytes(message))
    if isinstance(found, codec.Frame):
        assert (bytes(found.data), found.crc32) == (expected.frame.data, expected.frame.crc32)
    else:
        assert found == expected


def test_a_frame_from_another_protobuf_writer_is_read() -> None:
    """Without a checksum field, or with the fields in another order, protobuf's own reader takes over."""
    read = codec.deserializer(pb.PutRequest)
    bare = pb.PutRequest(frame=pb.Frame(data=b"abc"))
    assert read(bare.SerializeToString()) == bare
    swapped = b"\x12\x0a" + b"\x15\x01\x00\x00\x00" + b"\x0a\x03abc"
    assert read(swapped) == pb.PutRequest(frame=pb.Frame(data=b"abc", crc32=1))
    header = pb.PutRequest(header=pb.PutHeader(model_id="m"))
    assert read(header.SerializeToString()) == header


def test_damaged_and_incomplete_frames_are_refused() -> None:
    wire = ranges(range(1), 1, 8, [(0, 1)])
    (message,) = frames(pb.PutRequest, memoryview(b"12345678"), wire)
    flipped = pb.Frame(data=b"12345679", crc32=pb.PutRequest.FromString(message).frame.crc32)
    with pytest.raises(FrameError, match="checksum") as error:
        FrameWriter(memoryview(bytearray(8)), wire).write(flipped)
    assert error.value.checksum
    with pytest.raises(FrameError, match="0 bytes instead of the announced 8"):
        FrameWriter(memoryview(bytearray(8)), wire).finish()


def test_cost_model_recovers_a_linear_law_and_is_silent_before() -> None:
    model = CostModel()
    assert model.predict(10, 100, 0) == 0.0
    for fresh, context in [(10, 100), (50, 100), (100, 400), (400, 400), (30, 300), (200, 900), (7, 50), (80, 640)]:
        model.report(fresh, context, 0.05 + 0.002 * fresh + 0.0001 * fresh * context / 1000.0, 1000, 0.003)
    assert model.predict(60, 500, 2000) == pytest.approx(0.05 + 0.12 + 0.003 + 0.006, rel=0.02)


def test_a_turn_that_ends_dense_leases_and_uses_nothing_for_it() -> None:
    exact, reused = lay_out(TEMPLATE, {"x": (7, 8), "y": ()})[:2]
    base = torch.zeros(1, 2, 2, 1, 2)
    pool = PoolKey(Group("t", "m"), "x", "o")
    plan = Plan(
        Policy.PAPER,
        (
            SegmentPlan(exact, Action.EXACT, source=Repositioned(base), keys=frozenset({"prefix"})),
            SegmentPlan(reused, Action.REUSE, source=Repositioned(base), keys=frozenset({"base"}), uses=((pool, "s"),)),
        ),
    )
    assert plan.keys == {"prefix", "base"}
    assert plan.uses == ((pool, "s"),)
    dense = bypass(plan, Reason.COST)
    assert dense.keys == {"prefix"}
    assert dense.uses == ()
    assert dense.fresh == [2, 3]


def test_datasets(tmp_path: Path) -> None:
    assert len(questions()) >= 28  # what the demo needs by default
    good = tmp_path / "good.jsonl"
    good.write_text('{"question": "a", "answer": "1"}\n\n{"prompt": "b"}\n')
    assert read_rows(good) == [Row("a", "1"), Row("b", "")]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(bad)


def test_train_and_test_never_meet(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(f'{{"question": "{n}"}}\n' for n in range(11)))
    data = read(path, seed=3)
    assert {r.question for r in data.train} == {str(n) for n in range(0, 11, 2)}
    assert {r.question for r in data.test} == {str(n) for n in range(1, 11, 2)}
    assert read(path, seed=3) == data != read(path, seed=4)


def test_kl_and_agreement() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    found = compare(reference, other)
    first = 0.5 * torch.log(torch.tensor(0.5 / 0.25)) + 0.5 * torch.log(torch.tensor(0.5 / 0.75))
    assert found.kl == pytest.approx(float(first) / 2, rel=1e-5)
    assert found.top1 in (0.5, 1.0)
    assert compare(reference, reference) == Distance(0.0, 1.0, 2)


def test_quantile() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 1.0], 0.95) == pytest.approx(0.95)


def test_chunk_keys_are_the_golden_ones() -> None:
    """The key of a chunk is the SHA-256 of all tokens up to its end: little-endian uint32 behind a tag."""
    spans = chunked(range(130))
    assert [(s.start, s.end) for s in spans] == [(0, 64), (64, 128), (128, 130)]
    data = b"kvcache.tokens.1" + b"".join(token.to_bytes(4, "little") for token in range(130))
    ends = [16 + 4 * s.end for s in spans]
    assert context_keys(spans) == [hashlib.sha256(data[:end]).hexdigest() for end in ends]
    assert context_keys(spans)[0] == "36d3b43a04c840dc79b026e216c7bccbc7edfb1320f8c3d5ae18803390a69f5e"
