"""Spans of a real service and a real worker, received by a real OTLP server: one trace for a turn, with the right parents."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from kvcache_client import KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.tracing import exported
from tests.e2e.test_agents import WARM, Team, question
from tests.observability.worker import ASKED

Start = Callable[..., ServiceProcess]


@dataclass(frozen=True)
class Seen:
    """One span as it arrived."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    kind: int
    failed: bool
    attributes: dict[str, Any]


class Receiver(otlp_grpc.TraceServiceServicer):
    """An OTLP server on a free port."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[Seen] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        otlp_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: otlp.ExportTraceServiceRequest, context: object) -> otlp.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                with self._lock:
                    self._seen += [self._read(service, span) for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    @staticmethod
    def _read(service: str, span: trace_pb2.Span) -> Seen:
        ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
        failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
        return Seen(service, span.name, *ids, span.kind, failed, values(span.attributes))

    def seen(self) -> list[Seen]:
        """All that has come; exporters that have been shut down owe nothing."""
        with self._lock:
            return list(self._seen)

    def close(self) -> None:
        self._server.stop(None).wait()


def values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """The processes that a test starts export to it."""
    made = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.endpoint)
    yield made
    made.close()


class Trace:
    """All spans of one turn."""

    def __init__(self, spans: list[Seen]) -> None:
        self.spans = spans
        (self.root,) = [span for span in spans if not span.parent]

    def below(self, parent: Seen) -> dict[str, Seen]:
        """Children by name, which is another for each of them."""
        found = [span for span in self.spans if span.parent == parent.span]
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}


def test_one_turn_is_one_trace(start_service: Start, receiver: Receiver, capfd: pytest.CaptureFixture[str]) -> None:
    with start_service(log_level="debug", log_format="json") as service:
        command = [sys.executable, "-m", "tests.observability.worker", service.target]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert said.returncode == 0, said.stderr
    by_trace: dict[str, list[Seen]] = {}
    for span in receiver.seen():
        by_trace.setdefault(span.trace, []).append(span)
    turns = [Trace(spans) for spans in by_trace.values() if any(s.name == "kvcache.turn" for s in spans)]
    assert len(turns) == 2 * (WARM + 2 * ASKED), "one trace for every call of the two agents"
    reused = [t for t in turns if t.root.attributes["kvcache.outcome"] == "reuse" and "kvcache.probe" in t.below(t.root)]
    streamed = [t for t in reused if "kvcache.fetch" in t.below(t.root)]
    shared = [t for t in reused if t not in streamed]
    assert shared
    assert streamed
    for turn, stream in ((shared[-1], False), (streamed[-1], True)):
        check(turn, stream=stream)

    commits = [(turn, span) for turn in turns for span in turn.spans if span.name == "kvcache.commit"]
    assert commits, "dense turns taught the pools"
    for turn, span in commits:
        (parent,) = [s for s in turn.spans if s.span == span.parent]
        assert (parent.name, parent.service) == ("kvcache.settle", "kvcache-service")

    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    for turn in turns:
        mine = {line["trace_id"] for line in lines if line.get("turn_id") == turn.root.attributes["kvcache.turn_id"]}
        assert mine == {turn.root.trace}, "a log line leads to its trace"


def check(turn: Trace, *, stream: bool) -> None:
    """A turn that reused, step by step: whose span lies below whose, and what they say."""
    root = turn.root
    assert (root.service, root.name, root.attributes["kvcache.outcome"]) == ("worker", "kvcache.turn", "reuse")
    assert 0 < root.attributes["kvcache.reused_tokens"] < root.attributes["kvcache.prompt_tokens"]
    steps = turn.below(root)
    expected = {"open", "prefill", "probe", "decode", "settle"} | ({"fetch", "observe"} if stream else set())
    assert steps.keys() == {f"kvcache.{name}" for name in expected}
    assert {span.service for span in steps.values()} == {"worker"}

    opened = turn.below(steps["kvcache.open"])["kvcache.v1.Turns/OpenTurn"]
    assert (opened.service, opened.attributes["kvcache.tenant"]) == ("kvcache-service", "default")
    inside = turn.below(opened)
    planned = inside["kvcache.plan"].attributes
    assert {span.attributes["kvcache.turn_id"] for span in (root, opened, inside["kvcache.plan"])} == {
        root.attributes["kvcache.turn_id"]
    }
    assert planned["kvcache.fresh_tokens"] == root.attributes["kvcache.prompt_tokens"] - root.attributes["kvcache.reused_tokens"]
    assert (planned["kvcache.policy"], planned["kvcache.reason"], len(planned["kvcache.template"])) == ("guarded", "none", 64)

    if stream:
        inside = turn.below(turn.below(steps["kvcache.fetch"])["kvcache.v1.Turns/FetchTurn"])
        taken = turn.below(turn.below(steps["kvcache.observe"])["kvcache.v1.Turns/Observe"])["kvcache.observe"]
        assert taken.service == "kvcache-service"
    assert inside["kvcache.assemble"].attributes["kvcache.bytes"] > 0
    assert inside["kvcache.assemble"].service == "kvcache-service"

    settling = turn.below(steps["kvcache.settle"])["kvcache.v1.Turns/SettleTurn"]
    assert settling.attributes["kvcache.verdict"] == "accepted"
    settled = turn.below(settling)["kvcache.settle"]
    assert (settled.service, settled.attributes["kvcache.outcome"]) == ("kvcache-service", "reuse")
    assert settled.attributes["kvcache.reused_tokens"] == root.attributes["kvcache.reused_tokens"]


def test_refusals_are_seen_and_strangers_parents_too(start_service: Start, receiver: Receiver) -> None:
    """The code of a refused call; a fault of the caller is none of the service. Broken trace context is no fault at all."""
    given = "0af7651916cd43dd8448eb211c80319c"
    with start_service() as service, grpc.insecure_channel(service.target) as channel:
        release = channel.unary_unary(
            "/kvcache.v1.Turns/SettleTurn", pb.SettleTurnRequest.SerializeToString, pb.SettleTurnReply.FromString
        )
        for header in (f"00-{given}-b7ad6b7169203331-01", "00-rubbish", "x" * 300):
            with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                release(pb.SettleTurnRequest(turn_id="x" * 200, verdict=pb.VERDICT_ABORTED), metadata=[("traceparent", header)])
    calls = [span for span in receiver.seen() if span.name == "kvcache.v1.Turns/SettleTurn"]
    assert len(calls) == 3
    (child,) = [span for span in calls if span.parent]
    assert (child.trace, child.parent) == (given, "b7ad6b7169203331")
    for span in calls:
        assert (span.attributes["kvcache.code"], span.attributes["rpc.grpc.status_code"]) == ("unknown_turn", 5)
        assert "kvcache.turn_id" not in span.attributes, "a caller's text is no id"
        assert not span.failed


def test_a_collector_that_is_gone_costs_nothing(start_service: Start, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    gone = Receiver()
    gone.close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", gone.endpoint)
    with start_service(log_level="error") as service, KVCacheClient(service.target) as client:
        team = Team(model, client)
        outcomes = [team.first.run({"question": question(1)}, max_new_tokens=4).outcome for _ in range(2)]
        assert outcomes == ["partial", "reuse"]
        service.process.terminate()
        assert service.process.wait(timeout=10) == 0


def test_without_a_word_in_the_environment_nothing_is_made() -> None:
    with exported({}) as off, exported({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}) as disabled:
        for tracing in (off, disabled):
            with tracing.call("a.b.C", []), tracing.span("x") as span:
                assert not span.is_recording()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "OTEL_EXPORTER_OTLP_PROTOCOL is http/protobuf; set grpc"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is zipkin; set otlp or none"),
    ],
)
def test_what_cannot_be_done_is_refused_at_the_start(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says), exported({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"} | settings):
        pass


def test_a_missing_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with (
        pytest.raises(ValueError, match=r"install kvcache-service\[otel\]"),
        exported({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}),
    ):
        pass


def test_a_worker_needs_no_opentelemetry(service: ServiceProcess) -> None:
    """The client in a process where opentelemetry cannot be imported."""
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from kvcache_client import KVCacheClient\n"
        "from kvcache_service.bench import scene\n"
        "with KVCacheClient(sys.argv[1]) as client:\n"
        "    turn = client.open_turn(scene.plain_template(client), {'prompt': [1]}, reserve_tokens=0)\n"
        "    turn.fetch(); turn.release(); print(turn.plan.turn_id)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, service.target], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 32
