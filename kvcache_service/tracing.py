"""OpenTelemetry spans of the service: one for every call, with what happens inside below it. Off unless OTEL_ variables ask.

A call's parent comes from its metadata by W3C Trace Context. Work in other threads belongs to the call whose context it runs in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version

from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

NAME = "kvcache-service"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
_PROPAGATOR = TraceContextTextMapPropagator()
_LAST_SECONDS = 3.0  # for what is not exported yet when the service ends; a collector that is gone must not hold it up
_OFF = nullcontext(trace.INVALID_SPAN)


class Tracing:
    """tracer: None makes no spans, for the price of a comparison."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    @property
    def on(self) -> bool:
        """Somebody looks: what is costly to say may be said."""
        return self._tracer is not None

    @contextmanager
    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[None]:
        """The span of one call, current in this task from now on. method: as in its descriptor, kvcache.v1.Turns.OpenTurn.

        It stays current: the task that serves a call, and with it the context, ends with the call, and a stream that is given up
        is closed in another one.
        """
        if self._tracer is None:
            yield
            return
        service, _, name = method.rpartition(".")
        parent = _PROPAGATOR.extract({key: value for key, value in metadata if isinstance(value, str)})
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        span = self._tracer.start_span(f"{service}/{name}", parent, SpanKind.SERVER, attributes)
        context.attach(trace.set_span_in_context(span))
        try:
            yield
        finally:
            span.end()

    def span(self, name: str, **attributes: AttributeValue) -> AbstractContextManager[Span]:
        """A child of what is current, and current itself until it ends, on the same thread."""
        if self._tracer is None:
            return _OFF
        # Errors are the call's; their texts may quote a request.
        return self._tracer.start_as_current_span(
            name, attributes=_named(attributes), record_exception=False, set_status_on_exception=False
        )

    @contextmanager
    def aside(self, name: str, **attributes: AttributeValue) -> Iterator[None]:
        """A child of what is current that never is current itself: for generators, whose steps run in several contexts."""
        if self._tracer is None:
            yield
            return
        span = self._tracer.start_span(name, attributes=_named(attributes))
        try:
            yield
        finally:
            span.end()

    def note(self, **attributes: AttributeValue) -> None:
        """More about what is current."""
        if self._tracer is not None:
            trace.get_current_span().set_attributes(_named(attributes))

    def refused(self, code: str, status: int, *, fault: bool) -> None:
        """The current call ends with an error. fault: ours, not the caller's."""
        if self._tracer is not None:
            span = trace.get_current_span()
            span.set_attributes({"kvcache.code": code, "rpc.grpc.status_code": status})
            if fault:
                span.set_status(StatusCode.ERROR, code)


def _named(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"kvcache.{name}": value for name, value in attributes.items()}


@contextmanager
def exported(environment: Mapping[str, str]) -> Iterator[Tracing]:
    """Spans that leave by OTLP over gRPC, where OTEL_EXPORTER_OTLP_(TRACES_)ENDPOINT says where to; else none are made.

    The SDK reads its other OTEL_ variables itself. Raises ValueError for what this service cannot do.
    """
    if not _wanted(environment):
        yield Tracing()
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(
            f"OTEL_ variables ask for spans, but {error.name} is not installed; install kvcache-service[otel], or set "
            "OTEL_TRACES_EXPORTER=none"
        ) from error
    resource = Resource.create({"service.name": NAME, "service.version": version(NAME)}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield Tracing(provider.get_tracer(NAME, version(NAME)))
    finally:
        last = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_SECONDS)


def _wanted(environment: Mapping[str, str]) -> bool:
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or exporter == "none" or not any(environment.get(name) for name in _ENDPOINTS):
        return False
    if exporter != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER is {exporter}; set otlp or none")
    for name in _PROTOCOLS:
        if environment.get(name, "grpc") != "grpc":
            raise ValueError(f"{name} is {environment[name]}; set grpc, the only protocol that spans leave by")
    return True
