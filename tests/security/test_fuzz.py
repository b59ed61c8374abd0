"""Bytes that no client would send, to every method and to the disk tier's files: refused, never a crash or a hang.

`make fuzz` runs the same tests for ten minutes and more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import grpc
import pytest
import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcache_client import KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.bench import scene
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.tiers.disk import DiskTier

METHODS = {
    f"/kvcache.v1.{name}/{method.name}": GetMessageClass(method.input_type)
    for name, described in pb.DESCRIPTOR.services_by_name.items()
    for method in described.methods
    # Whatever the first two were sent, they wait for more; the last one ends the service.
    if method.name not in ("Attach", "Events", "Drain")
}
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
EDGES = (0, 1, 2, 63, 64, 65, 2**16, 2**31 - 1, 2**32 - 1)


@pytest.fixture(scope="module")
def victim() -> Iterator[tuple[ServiceProcess, KVCacheClient, dict[str, str]]]:
    """A service with a model, a template and an open turn: their ids are among what is sent."""
    with ServiceProcess(host_bytes=str(64 << 20), max_prompt_tokens="4096") as service, KVCacheClient(service.target) as client:
        template = scene.plain_template(client)
        turn = client.open_turn(template, {"prompt": [1, 2, 3]}, reserve_tokens=4)
        known = {
            "template_id": template,
            "model_id": client.register_model(scene.model()),
            "turn_id": turn.plan.turn_id,
            "session_id": client.connect().session_id,
            "placeholder": "prompt",
        }
        yield service, client, known


def messages(kind: type, known: dict[str, str], depth: int = 3) -> st.SearchStrategy:
    """Messages of a kind with some fields set, ids often to what exists, numbers often to where they break."""

    @st.composite
    def one(draw: st.DrawFn) -> object:
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if not draw(st.booleans()):
                continue
            repeated = hasattr(getattr(message, field.name), "extend")
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                inner = GetMessageClass(field.message_type)
                if not depth:
                    continue
                target = getattr(message, field.name)
                if repeated:
                    target.extend(draw(st.lists(messages(inner, known, depth - 1), max_size=3)))
                else:
                    target.CopyFrom(draw(messages(inner, known, depth - 1)))
            elif repeated:
                getattr(message, field.name).extend(draw(st.lists(scalar(field, known), max_size=8)))
            else:
                setattr(message, field.name, draw(scalar(field, known)))
        return message

    return one()


def scalar(field: FieldDescriptor, known: dict[str, str]) -> st.SearchStrategy:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            texts = st.text(st.characters(codec="utf-8"), max_size=40)
            return st.just(known[field.name]) | texts if field.name in known else texts
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=400)
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_ENUM:
            return st.sampled_from([0, 1, 2, 3, 77])
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return st.floats(width=32)
        case _:
            return st.sampled_from(EDGES[:-2] if "32" in str(field.type) else EDGES)


def send(service: ServiceProcess, path: str, parts: list[bytes]) -> grpc.StatusCode:
    """How the call ends; it must end within the deadline."""
    with grpc.insecure_channel(service.admin_target if "Admin" in path else service.target) as channel:
        call = channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)(iter(parts), timeout=20)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


UNEXPECTED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)


@given(st.data())
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
def test_any_message_is_answered(victim: tuple[ServiceProcess, KVCacheClient, dict[str, str]], data: st.DataObject) -> None:
    service, client, known = victim
    path = data.draw(st.sampled_from(sorted(METHODS)))
    parts = data.draw(st.lists(messages(METHODS[path], known), min_size=1, max_size=3))
    code = send(service, path, [part.SerializeToString() for part in parts])
    assert code not in UNEXPECTED, (path, parts, code)
    assert code is not grpc.StatusCode.INTERNAL, (path, parts)
    assert client.status().boot_id
    assert service.process.poll() is None


@given(st.data())
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_answered(victim: tuple[ServiceProcess, KVCacheClient, dict[str, str]], data: st.DataObject) -> None:
    """What is no message at all is gRPC's to refuse; the service goes on."""
    service, client, _ = victim
    path = data.draw(st.sampled_from(sorted(METHODS)))
    send(service, path, data.draw(st.lists(st.binary(max_size=200), min_size=1, max_size=3)))
    assert client.status().boot_id
    assert service.process.poll() is None


@given(st.data())
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
def test_any_file_is_a_miss_or_the_blob(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever became of the disk tier's files: other bytes than were stored never come back."""
    folder = tmp_path_factory.mktemp("disk")
    blob = torch.arange(300, dtype=torch.float32)
    tier = DiskTier(folder, 1 << 20)
    tier.offer("kvcache:1:{a:m}:x", blob)
    tier.close()
    files = sorted(folder.glob("*.kv"))
    assert files
    for file in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=2, unique=True)):
        raw = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, max(0, len(raw) - 1)))
            raw[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
        file.write_bytes(raw)
    tier = DiskTier(folder, 1 << 20)
    try:
        found = tier.get("kvcache:1:{a:m}:x")
        assert found is None or torch.equal(found, blob)
    finally:
        tier.close()
