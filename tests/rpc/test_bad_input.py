"""Bad input gets its documented error, names the field, and changes nothing."""

from __future__ import annotations

import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from kvcache_proto.v1 import kvcache_pb2 as pb
from kvcache_proto.v1 import kvcache_pb2_grpc
from kvcache_proto.v1.tensors import FRAME_BYTES

from kvcache_service.evaluation.service import ServiceProcess

LAYERS, HEADS, DIM, VOCABULARY = 2, 1, 4, 100
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 4


def model_request(**changes: Any) -> pb.RegisterModelRequest:
    fields: dict[str, Any] = {
        "name": "raw",
        "layers": LAYERS,
        "kv_heads": HEADS,
        "head_dim": DIM,
        "dtype": pb.DTYPE_FLOAT32,
        "rope": pb.Rope(type="default", inv_freq=[1.0, 0.01], attention_scaling=1.0, pairing=pb.PAIRING_HALF_SPLIT, rotary_dim=4),
        "vocab_size": VOCABULARY,
        "max_positions": 64,
        "tp_size": 1,
        "attention": "full",
    }
    rope = changes.pop("rope", {})
    for name, value in rope.items():
        if name == "inv_freq":
            del fields["rope"].inv_freq[:]
            fields["rope"].inv_freq.extend(value)
        else:
            setattr(fields["rope"], name, value)
    return pb.RegisterModelRequest(**(fields | changes))


def fixed(*ids: int) -> pb.Segment:
    return pb.Segment(fixed=pb.TokenIds(ids=ids))


class Raw:
    """The protocol by hand: one attached session and one registered template [1 2 3] {x} [4 5]."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target)
        self.kvcache = kvcache_pb2_grpc.KVCacheStub(self.channel)
        self.turns = kvcache_pb2_grpc.TurnsStub(self.channel)
        self.quality = kvcache_pb2_grpc.QualityStub(self.channel)
        self._closed = threading.Event()
        self.model_id = self.kvcache.RegisterModel(model_request()).model_id
        self.template_id = self.template(fixed(1, 2, 3), pb.Segment(placeholder="x"), fixed(4, 5))

    def session(self) -> str:
        """Attach and stay attached until close()."""

        def heartbeats() -> Iterator[pb.Heartbeat]:
            yield pb.Heartbeat()
            self._closed.wait()

        self._attached = self.kvcache.Attach(heartbeats())  # a dropped call would be cancelled
        return str(next(self._attached).session_id)

    def template(self, *segments: pb.Segment, **changes: Any) -> str:
        request = pb.RegisterTemplateRequest(model_id=self.model_id, segments=segments, **changes)
        return str(self.kvcache.RegisterTemplate(request).template_id)

    def open_request(self, session_id: str, /, **changes: Any) -> pb.OpenTurnRequest:
        fields: dict[str, Any] = {
            "session_id": session_id,
            "request_id": uuid.uuid4().hex,
            "template_id": self.template_id,
            "samples": [pb.Sample(placeholder="x", token_ids=[7, 8])],
            "reserve_tokens": 4,
            "transport": pb.TRANSPORT_STREAM,
        }
        return pb.OpenTurnRequest(**(fields | changes))

    def observe(self, turn_id: str, start: int, tokens: int, data: bytes | None = None, dtype: int = pb.DTYPE_FLOAT32) -> Any:
        payload = bytes(tokens * TOKEN_BYTES) if data is None else data
        header = pb.ObserveHeader(turn_id=turn_id, start=start, tokens=tokens, dtype=dtype)
        parts = [pb.ObserveRequest(header=header), pb.ObserveRequest(frame=frame(payload))]
        return self.turns.Observe(iter(parts))

    def close(self) -> None:
        self._closed.set()
        self.channel.close()


def frame(data: bytes, crc32: int | None = None) -> pb.Frame:
    return pb.Frame(data=data, crc32=zlib.crc32(data) if crc32 is None else crc32)


@pytest.fixture(scope="module")
def shared_service(start_service: Callable[..., ServiceProcess]) -> Iterator[ServiceProcess]:
    with start_service() as running:
        yield running


@pytest.fixture
def raw(shared_service: ServiceProcess) -> Iterator[Raw]:
    made = Raw(shared_service.target)
    yield made
    made.close()


@pytest.fixture
def session_id(raw: Raw) -> str:
    return raw.session()


@pytest.fixture
def turn(raw: Raw, session_id: str) -> pb.OpenTurnReply:
    return raw.turns.OpenTurn(raw.open_request(session_id))


class Refused:
    """Runs a call that must fail with one code and, after it, state that must not have moved."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service

    def __call__(self, code: str, field: str, status: grpc.StatusCode, call: Callable[[], Any]) -> None:
        watched = ("kvcache_open_turns", "kvcache_anchors", "kvcache_leases", "kvcache_pools")
        before = self._service.metrics()
        with pytest.raises(grpc.RpcError) as caught:
            call()
        detail = pb.ErrorDetail.FromString(dict(caught.value.trailing_metadata())["kvcache-error-bin"])
        assert pb.ErrorCode.Name(detail.code) == f"ERROR_CODE_{code}"
        assert detail.field == field
        assert detail.fix
        assert caught.value.code() is status
        counter = f'kvcache_errors_total{{code="{code.lower()}"}}'
        deadline = time.monotonic() + 10
        # A refused call's memory is free once its frames are gone, perhaps after the answer; an earlier call's may go here too.
        while (after := self._service.metrics())["kvcache_host_used_bytes"] > before["kvcache_host_used_bytes"]:
            assert time.monotonic() < deadline, "what a refused call held is still there"
        assert after[counter] == before[counter] + 1
        assert {n: after[n] for n in watched} == {n: before[n] for n in watched}


@pytest.fixture
def refused(shared_service: ServiceProcess) -> Refused:
    return Refused(shared_service)


INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED

MODELS = [
    ({"layers": 0}, "INVALID", "layers", INVALID),
    ({"dtype": pb.DTYPE_UNSPECIFIED}, "INVALID", "dtype", INVALID),
    ({"attention": "mla"}, "UNSUPPORTED_MODEL", "attention", UNIMPLEMENTED),
    ({"rope": {"type": "spiral"}}, "UNSUPPORTED_ROPE", "rope.type", UNIMPLEMENTED),
    ({"rope": {"inv_freq": [1.0]}}, "INVALID", "rope.inv_freq", INVALID),
    ({"rope": {"inv_freq": [1.0, float("nan")]}}, "INVALID", "rope.inv_freq", INVALID),
    ({"rope": {"attention_scaling": 0.0}}, "INVALID", "rope.attention_scaling", INVALID),
    ({"rope": {"rotary_dim": 3}}, "INVALID", "rope.rotary_dim", INVALID),
    ({"rope": {"pairing": pb.PAIRING_UNSPECIFIED}}, "INVALID", "rope.pairing", INVALID),
    ({"tp_rank": 1}, "INVALID", "tp_rank", INVALID),
]


@pytest.mark.parametrize(("changes", "code", "field", "status"), MODELS)
def test_models(raw: Raw, refused: Refused, changes: dict[str, Any], code: str, field: str, status: grpc.StatusCode) -> None:
    refused(code, field, status, lambda: raw.kvcache.RegisterModel(model_request(**changes)))


def test_templates(raw: Raw, refused: Refused) -> None:
    refused("INVALID", "segments", INVALID, raw.template)
    refused("INVALID", "segments[0]", INVALID, lambda: raw.template(pb.Segment()))
    refused("INVALID", "segments[1].fixed", INVALID, lambda: raw.template(fixed(1), fixed()))
    refused("INVALID", "segments[0].fixed", INVALID, lambda: raw.template(fixed(VOCABULARY)))
    raw.model_id = "nobody"
    refused("UNKNOWN_MODEL", "model_id", PRECONDITION, lambda: raw.template(fixed(1)))


OPENS = [
    ({"session_id": "nobody"}, "STALE_BOOT", "session_id", PRECONDITION),
    ({"template_id": "nobody"}, "UNKNOWN_TEMPLATE", "template_id", PRECONDITION),
    ({"request_id": ""}, "INVALID", "request_id", INVALID),
    ({"transport": pb.TRANSPORT_UNSPECIFIED}, "INVALID", "transport", INVALID),
    ({"policy": 9}, "INVALID", "policy", INVALID),
    ({"trial": pb.Trial(blending=pb.Blending(gamma=0.0))}, "INVALID", "trial.blending.gamma", INVALID),
    ({"trial": pb.Trial(blending=pb.Blending(gamma=float("nan")))}, "INVALID", "trial.blending.gamma", INVALID),
    ({"samples": []}, "TEMPLATE_MISMATCH", "samples", INVALID),
    ({"samples": [pb.Sample(placeholder="y", token_ids=[1])]}, "TEMPLATE_MISMATCH", "samples", INVALID),
    ({"samples": [pb.Sample(placeholder="x", token_ids=[1])] * 2}, "INVALID", "samples", INVALID),
    ({"samples": [pb.Sample(placeholder="x", token_ids=[VOCABULARY])]}, "INVALID", "samples['x'].token_ids", INVALID),
    ({"samples": [pb.Sample(placeholder="x", token_ids=[1] * 60)]}, "INVALID", "samples", INVALID),
]


@pytest.mark.parametrize(("changes", "code", "field", "status"), OPENS)
def test_opens(
    raw: Raw, session_id: str, refused: Refused, changes: dict[str, Any], code: str, field: str, status: grpc.StatusCode
) -> None:
    refused(code, field, status, lambda: raw.turns.OpenTurn(raw.open_request(session_id, **changes)))


def test_the_same_request_opens_one_turn(raw: Raw, session_id: str, refused: Refused) -> None:
    request = raw.open_request(session_id)
    assert raw.turns.OpenTurn(request).turn_id == raw.turns.OpenTurn(request).turn_id
    other = raw.open_request(session_id, request_id=request.request_id, reserve_tokens=5)
    refused("CONFLICT", "request_id", grpc.StatusCode.ALREADY_EXISTS, lambda: raw.turns.OpenTurn(other))


CALIBRATIONS = [
    ({"template_id": "nobody"}, "UNKNOWN_TEMPLATE", "template_id"),
    ({"target_kl": 0.0}, "INVALID", "target_kl"),
    ({"target_kl": float("nan")}, "INVALID", "target_kl"),
    ({"target_kl": float("inf")}, "INVALID", "target_kl"),
    ({"target_top1": 0.0}, "INVALID", "target_top1"),
    ({"target_top1": 1.5}, "INVALID", "target_top1"),
    ({}, "STATE", "template_id"),  # nothing was audited yet
]


@pytest.mark.parametrize(("changes", "code", "field"), CALIBRATIONS)
def test_calibrations(raw: Raw, refused: Refused, changes: dict[str, Any], code: str, field: str) -> None:
    request = pb.CalibrateRequest(**({"template_id": raw.template_id} | changes))
    status = INVALID if code == "INVALID" else PRECONDITION
    refused(code, field, status, lambda: raw.quality.Calibrate(request))


def test_unknown_turns(raw: Raw, refused: Refused) -> None:
    missing = grpc.StatusCode.NOT_FOUND
    refused("UNKNOWN_TURN", "turn_id", missing, lambda: list(raw.turns.FetchTurn(pb.FetchTurnRequest(turn_id="nobody"))))
    refused("UNKNOWN_TURN", "turn_id", missing, lambda: raw.observe("nobody", 0, 1))
    settle = pb.SettleTurnRequest(turn_id="nobody", verdict=pb.VERDICT_ABORTED)
    refused("UNKNOWN_TURN", "turn_id", missing, lambda: raw.turns.SettleTurn(settle))
    assert not raw.kvcache.Release(pb.ReleaseRequest(turn_id="nobody")).released


def test_observations(raw: Raw, turn: pb.OpenTurnReply, refused: Refused) -> None:
    nan = struct.pack("<f", float("nan")) + bytes(7 * TOKEN_BYTES - 4)
    turn_id = turn.turn_id
    refused("INVALID", "data", INVALID, lambda: raw.observe(turn_id, 0, 7, nan))
    refused("INVALID", "dtype", INVALID, lambda: raw.observe(turn_id, 0, 7, dtype=pb.DTYPE_FLOAT16))
    refused("INVALID", "dtype", INVALID, lambda: raw.observe(turn_id, 0, 7, dtype=pb.DTYPE_UNSPECIFIED))
    refused("INVALID", "tokens", INVALID, lambda: raw.observe(turn_id, 0, 12))
    refused("INVALID", "tokens", INVALID, lambda: raw.observe(turn_id, 0, 0))
    refused("INVALID", "start", INVALID, lambda: raw.observe(turn_id, 8, 1))
    refused("INVALID", "frame", INVALID, lambda: raw.observe(turn_id, 0, 7, bytes(7 * TOKEN_BYTES - 1)))
    refused("INVALID", "frame", INVALID, lambda: raw.observe(turn_id, 0, 7, bytes(7 * TOKEN_BYTES + 1)))
    refused("INVALID", "frame", INVALID, lambda: raw.observe(turn_id, 0, 7, bytes(FRAME_BYTES + 1)))
    header = pb.ObserveHeader(turn_id=turn_id, start=0, tokens=1, dtype=pb.DTYPE_FLOAT32)
    damaged = [pb.ObserveRequest(header=header), pb.ObserveRequest(frame=frame(bytes(TOKEN_BYTES), crc32=1))]
    refused("CHECKSUM", "frame", grpc.StatusCode.DATA_LOSS, lambda: raw.turns.Observe(iter(damaged)))
    refused("INVALID", "header", INVALID, lambda: raw.turns.Observe(iter(damaged[1:])))
    refused("INVALID", "header", INVALID, lambda: raw.turns.Observe(iter([])))
    assert raw.observe(turn_id, 0, 7).bytes == 7 * TOKEN_BYTES


def settle_request(turn: pb.OpenTurnReply, **changes: Any) -> pb.SettleTurnRequest:
    fields = {"turn_id": turn.turn_id, "verdict": pb.VERDICT_ACCEPTED, "finish_reason": pb.FINISH_REASON_STOP}
    return pb.SettleTurnRequest(**(fields | changes))


SETTLES = [
    ({"verdict": pb.VERDICT_UNSPECIFIED}, "verdict"),
    ({"finish_reason": pb.FINISH_REASON_UNSPECIFIED}, "finish_reason"),
    ({"verdict": pb.VERDICT_REJECTED}, "reason"),
    ({"reason": 99}, "reason"),
    ({"verdict": pb.VERDICT_AUDITED, "distance": pb.Distance(kl=0.1, top1=1.0, tokens=8)}, "verdict"),
    ({"output_token_ids": [VOCABULARY]}, "output_token_ids"),
    ({"output_token_ids": [1], "output_kv_tokens": 1}, "output_kv_tokens"),
    ({"observe_start": 0, "observe_tokens": 7}, "observe_tokens"),
]


@pytest.mark.parametrize(("changes", "field"), SETTLES)
def test_settlements(raw: Raw, turn: pb.OpenTurnReply, refused: Refused, changes: dict[str, Any], field: str) -> None:
    refused("INVALID", field, INVALID, lambda: raw.turns.SettleTurn(settle_request(turn, **changes)))


def test_a_second_settlement(raw: Raw, turn: pb.OpenTurnReply, refused: Refused) -> None:
    raw.observe(turn.turn_id, 0, 7)
    first = raw.turns.SettleTurn(settle_request(turn))
    again = raw.turns.SettleTurn(settle_request(turn))
    assert not first.repeated
    assert again.repeated
    again.repeated = False
    assert again == first
    refused(
        "STATE",
        "verdict",
        PRECONDITION,
        lambda: raw.turns.SettleTurn(settle_request(turn, verdict=pb.VERDICT_REJECTED, reason=pb.REASON_RESIDUAL)),
    )
    refused("LEASE_EXPIRED", "turn_id", PRECONDITION, lambda: raw.observe(turn.turn_id, 0, 7))


def test_a_released_turn(raw: Raw, turn: pb.OpenTurnReply, refused: Refused) -> None:
    assert raw.kvcache.Release(pb.ReleaseRequest(turn_id=turn.turn_id)).released
    assert not raw.kvcache.Release(pb.ReleaseRequest(turn_id=turn.turn_id)).released
    fetch = pb.FetchTurnRequest(turn_id=turn.turn_id)
    refused("LEASE_EXPIRED", "turn_id", PRECONDITION, lambda: list(raw.turns.FetchTurn(fetch)))
    refused("LEASE_EXPIRED", "turn_id", PRECONDITION, lambda: raw.turns.SettleTurn(settle_request(turn)))


def test_puts(raw: Raw, refused: Refused) -> None:
    def put(data: bytes, ids: list[int] | None = None, dtype: int = pb.DTYPE_FLOAT32, tokens: int = 3) -> pb.PutReply:
        shape = [LAYERS, 2, tokens, HEADS, DIM]
        header = pb.PutHeader(model_id=raw.model_id, token_ids=ids or [9, 9, 9], dtype=dtype, shape=shape)
        return raw.kvcache.Put(iter([pb.PutRequest(header=header), pb.PutRequest(frame=frame(data))]))

    good = bytes(3 * TOKEN_BYTES)
    refused("INVALID", "shape", INVALID, lambda: put(good, tokens=2))
    refused("INVALID", "dtype", INVALID, lambda: put(good[: len(good) // 2], dtype=pb.DTYPE_BFLOAT16))
    refused("INVALID", "token_ids", INVALID, lambda: put(bytes(65 * TOKEN_BYTES), ids=[9] * 65, tokens=65))  # of 64 positions
    refused("INVALID", "token_ids", INVALID, lambda: put(good, ids=[9, 9, VOCABULARY]))
    refused("INVALID", "data", INVALID, lambda: put(struct.pack("<f", float("inf")) + good[4:]))
    assert not put(good).existed
    assert put(good).existed
    refused("CONFLICT", "token_ids", grpc.StatusCode.ALREADY_EXISTS, lambda: put(b"\x01" + good[1:]))
    other = struct.pack(f"<{2 * TOKEN_BYTES // 4}f", *[1.0] * (2 * TOKEN_BYTES // 4))
    refused("INVALID", "data", INVALID, lambda: put(other, ids=[9, 9], tokens=2))  # layer 0 of token 9 is known to be 0


def test_a_client_from_another_age(raw: Raw, refused: Refused) -> None:
    hello = pb.HelloRequest(protocol_min=7, protocol_max=9)
    refused("INVALID", "protocol_min", INVALID, lambda: raw.kvcache.Hello(hello))


def test_health_and_reflection(raw: Raw) -> None:
    health = health_pb2_grpc.HealthStub(raw.channel)
    for name in ("", "kvcache.v1.KVCache", "kvcache.v1.Turns"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    services = ProtoReflectionDescriptorDatabase(raw.channel).get_services()
    assert {"kvcache.v1.KVCache", "kvcache.v1.Turns", "grpc.health.v1.Health"} <= set(services)


def test_an_expired_lease(start_service: Callable[..., ServiceProcess]) -> None:
    with start_service(lease_seconds="0.2") as service:
        raw = Raw(service.target)
        session_id = raw.session()
        opened = raw.turns.OpenTurn(raw.open_request(session_id))
        while service.metrics()["kvcache_open_turns"]:
            pass
        refuse = Refused(service)
        fetch = pb.FetchTurnRequest(turn_id=opened.turn_id)
        refuse("LEASE_EXPIRED", "turn_id", PRECONDITION, lambda: list(raw.turns.FetchTurn(fetch)))
        assert service.metrics()['kvcache_turns_total{outcome="aborted",policy="guarded"}'] == 1
        raw.close()


def test_a_vanished_client_frees_all_that_it_held(start_service: Callable[..., ServiceProcess]) -> None:
    with start_service() as service:
        raw = Raw(service.target)
        session_id = raw.session()
        for _ in range(5):
            raw.turns.OpenTurn(raw.open_request(session_id))
        assert service.metrics()["kvcache_open_turns"] == 5
        assert service.metrics()["kvcache_buffer_bytes"] > 0
        raw.close()
        while (metrics := service.metrics())["kvcache_sessions"]:
            pass
        for name in ("kvcache_open_turns", "kvcache_leases", "kvcache_leased_bytes", "kvcache_buffer_bytes"):
            assert metrics[name] == 0, name
