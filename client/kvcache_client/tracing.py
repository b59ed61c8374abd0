"""Spans of what a worker asks of the service, where its process has an OpenTelemetry SDK; nothing otherwise.

The only module that knows whether opentelemetry-api is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    _PROPAGATOR = TraceContextTextMapPropagator()
except ImportError:  # a light worker
    trace = None  # type: ignore[assignment]

_NAME = "kvcache-client"
Value = str | bool | int | float
Metadata = tuple[tuple[str, str], ...]


class Work:
    """A span that lasts from begin() to end(), whatever threads its parts run on. This one is none: nobody looks."""

    def current(self) -> AbstractContextManager[object]:
        """Spans that begin within are its children."""
        return nullcontext()

    def note(self, **attributes: Value) -> None:
        """Add attributes."""

    def end(self) -> None:
        """Ending twice is harmless."""


class _Traced(Work):
    def __init__(self, name: str) -> None:
        self._span = trace.get_tracer(_NAME).start_span(name)

    def current(self) -> AbstractContextManager[object]:
        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)

    def note(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()


_NONE = Work()


def begin(name: str) -> Work:
    """A span below what is current."""
    return _Traced(name) if _active() else _NONE


def step(name: str, *, call: bool = False) -> AbstractContextManager[object]:
    """A span below what is current, until the context ends. call: it asks the service."""
    return _step(name, call) if _active() else nullcontext()


def note(**attributes: Value) -> None:
    """More about what is current."""
    if _active():
        trace.get_current_span().set_attributes(_named(attributes))


def metadata() -> Metadata | None:
    """Makes the service's spans children of what is current, by W3C Trace Context."""
    if not _active():
        return None
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())


@contextmanager
def _step(name: str, call: bool) -> Iterator[None]:
    kind = trace.SpanKind.CLIENT if call else trace.SpanKind.INTERNAL
    with trace.get_tracer(_NAME).start_as_current_span(name, kind=kind):
        yield


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    return {f"kvcache.{name}": value for name, value in attributes.items()}


def _active() -> bool:
    """The process has set a provider of spans; before that, not even empty ones are made."""
    return trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
