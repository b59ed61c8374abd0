"""Nothing in a request may be longer than anyone needs, and no answer is too long to arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.rpc.limits import MAX_MESSAGES, MAX_NUMBERS, MAX_TEXT, refuse_oversized
from tests.rpc.test_bad_input import Raw, fixed

Start = Callable[..., ServiceProcess]
FRAMES = {"PutRequest.frame", "ObserveRequest.frame"}  # as long as a message may be; their writer checks them


@pytest.fixture(scope="module")
def raw(start_service: Start) -> Iterator[Raw]:
    with start_service() as service:
        made = Raw(service.target)
        yield made
        made.close()


def fields(kind: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all texts and lists of a message."""
    for field in kind.DESCRIPTOR.fields:
        here = (*path, field)
        if f"{kind.DESCRIPTOR.name}.{field.name}" in FRAMES:
            continue
        if field.message_type is not None:
            yield from fields(GetMessageClass(field.message_type), here)
        if field.label == field.LABEL_REPEATED or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            yield here


REQUESTS = {
    method.input_type.name: GetMessageClass(method.input_type)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
LONG = [(name, path) for name, kind in REQUESTS.items() for path in fields(kind)]


def fill(message: Any, path: tuple[Any, ...], length: int) -> None:
    """Make the field at `path` as long as asked."""
    *outer, last = path
    for field in outer:
        inner = getattr(message, field.name)
        message = inner.add() if field.label == field.LABEL_REPEATED else inner
        message.SetInParent()
    if last.label != last.LABEL_REPEATED:
        setattr(message, last.name, "a" * length if last.type == last.TYPE_STRING else bytes(length))
    elif last.message_type is None:
        getattr(message, last.name).extend([1] * length)
    else:
        getattr(message, last.name).extend([GetMessageClass(last.message_type)()] * length)


@pytest.mark.parametrize(("request_name", "path"), LONG, ids=lambda v: v if isinstance(v, str) else ".".join(f.name for f in v))
def test_every_text_and_list_has_an_end(request_name: str, path: tuple[Any, ...]) -> None:
    last = path[-1]
    most = MAX_TEXT if last.label != last.LABEL_REPEATED else MAX_NUMBERS if last.message_type is None else MAX_MESSAGES
    long, fits = REQUESTS[request_name](), REQUESTS[request_name]()
    fill(fits, path, most)
    refuse_oversized(fits)
    fill(long, path, most + 1)
    with pytest.raises(KVCacheError) as caught:
        refuse_oversized(long)
    assert caught.value.code is Code.INVALID
    assert caught.value.field.replace("[0]", "") == ".".join(f.name for f in path)


def test_there_are_such_fields() -> None:
    assert len(LONG) >= 25


def test_over_the_wire(raw: Raw) -> None:
    """Unary requests and the header of a stream; the connection serves on."""
    session = raw.session()
    header = pb.PutHeader(model_id="m" * 300, token_ids=[1], dtype=pb.DTYPE_FLOAT32)
    calls: dict[str, Callable[[], object]] = {
        "turn_id": lambda: list(raw.turns.FetchTurn(pb.FetchTurnRequest(turn_id="t" * 300))),
        "request_id": lambda: raw.turns.OpenTurn(raw.open_request(session, request_id="r" * 300)),
        "segments": lambda: raw.template(*[fixed(1)] * 1025),
        "segments[1].placeholder": lambda: raw.template(fixed(1), pb.Segment(placeholder="p" * 300)),
        "header.model_id": lambda: raw.kvcache.Put(iter([pb.PutRequest(header=header)])),
    }
    for field, call in calls.items():
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert detail(caught.value).field == field
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raw.turns.OpenTurn(raw.open_request(session)).turn_id


def test_a_long_complaint_arrives(raw: Raw) -> None:
    """The refusal names what was sent; it must not grow with it until it cannot be delivered."""
    session = raw.session()
    samples = [pb.Sample(placeholder=f"{number:03}" + "😀" * 200, token_ids=[1]) for number in range(500)]
    with pytest.raises(grpc.RpcError) as caught:
        raw.turns.OpenTurn(raw.open_request(session, samples=samples))
    assert pb.ErrorCode.Name(detail(caught.value).code) == "ERROR_CODE_TEMPLATE_MISMATCH"


def detail(error: grpc.RpcError) -> pb.ErrorDetail:
    return pb.ErrorDetail.FromString(dict(error.trailing_metadata())["kvcache-error-bin"])
