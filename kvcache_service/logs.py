"""Log lines, as text or as JSON, and what they are about: the call, which follows its work into other threads."""

from __future__ import annotations

import json
import logging
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import NamedTuple, TextIO

from opentelemetry import trace

_OURS = ("kvcache", "kvcache_service")  # loggers that log_level is meant for
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_ID = re.compile(r"[0-9a-f]{32}")  # what this service gives out; anything else in its place is a caller's own text


class About(NamedTuple):
    """Empty fields are unknown."""

    method: str = ""
    tenant: str = ""
    session_id: str = ""
    turn_id: str = ""


_NOTHING = About()
_ABOUT: ContextVar[About] = ContextVar("kvcache_about", default=_NOTHING)


def about(*, method: str = "", tenant: str = "", session_id: str = "", turn_id: str = "") -> None:
    """From now on log lines of this task, and of what runs in copies of its context, say this too."""
    old, session_id, turn_id = _ABOUT.get(), _id(session_id), _id(turn_id)
    _ABOUT.set(About(method or old.method, tenant or old.tenant, session_id or old.session_id, turn_id or old.turn_id))


def known() -> dict[str, str]:
    """What about() has been told in this context."""
    return {name: value for name, value in _ABOUT.get()._asdict().items() if value}


def _id(text: str) -> str:
    return text if text and _ID.fullmatch(text) else ""


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message, and of About, `code` and the current span what is
    known."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= known()
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line |= {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}
        if isinstance(code := record.__dict__.get("code"), str):
            line["code"] = code
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(level: str, form: str, stream: TextIO) -> None:
    """Send log lines to `stream`. level: of our own loggers; libraries say at most what `info` lets through."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler])
    for name in _OURS:
        logging.getLogger(name).setLevel(number)
