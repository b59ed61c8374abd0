"""How long anything in a request may be. One walk over every field, so that no field can be forgotten."""

from __future__ import annotations

from collections.abc import Sized

from google.protobuf.message import Message

from kvcache_service.errors import invalid

MAX_TEXT = 256  # characters or bytes: names, ids, digests
MAX_MESSAGES = 1024  # segments of a template, and what comes once for each of them
MAX_NUMBERS = 1 << 20  # token ids


def refuse_oversized(message: Message, path: str = "") -> None:
    """Raises INVALID with the path of the first text or list that nobody needs so long. Frames are not for this."""
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        if isinstance(value, Message):
            refuse_oversized(value, f"{name}.")
        elif isinstance(value, str | bytes):
            _bound(name, value, MAX_TEXT)
        elif isinstance(value, Sized):
            _bound(name, value, MAX_NUMBERS if field.message_type is None else MAX_MESSAGES)
            if field.message_type is not None:
                for number, one in enumerate(value):  # type: ignore[arg-type, var-annotated]
                    refuse_oversized(one, f"{name}[{number}].")


def _bound(name: str, value: Sized, most: int) -> None:
    if len(value) > most:
        raise invalid(name, f"{len(value)} long", f"send at most {most}")
