"""Messages that carry a frame, written and read as protobuf bytes without a protobuf object in between.

What travels is plain protobuf: `message { … Frame frame = N; }` with N from the descriptor. A protobuf object would copy
the bytes of every frame twice more on either side.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message
from isal import isal_zlib

Kind = TypeVar("Kind", bound=Message)

_DATA, _CRC32 = b"\x0a", b"\x15"  # tags of Frame.data and Frame.crc32
_CRC_BYTES = 5  # tag and fixed32
_LENGTH_DELIMITED = 2


class Frame(NamedTuple):
    """A frame as it arrived; `data` shares memory with its message."""

    data: memoryview
    crc32: int


def crc32(parts: Sequence[bytes | memoryview]) -> int:
    """zlib's CRC-32 over all parts."""
    value = 0
    for part in parts:
        value = isal_zlib.crc32(part, value)
    return value


def encode(kind: type[Message], parts: Sequence[memoryview]) -> bytes:
    """The message `kind` whose frame holds the bytes of `parts`; they are copied once."""
    size = sum(len(part) for part in parts)
    data_head = _DATA + _varint(size)
    frame_head = _tag(kind) + _varint(len(data_head) + size + _CRC_BYTES)
    return b"".join([frame_head, data_head, *parts, _CRC32, struct.pack("<I", crc32(parts))])


def serialize(message: Message | bytes) -> bytes:
    """For gRPC: messages that `encode` made pass, others are serialised."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def deserializer(kind: type[Kind]) -> Callable[[bytes], Kind | Frame]:
    """For gRPC: a Frame where the message is laid out as `encode` does, else the message as protobuf reads it."""
    tag = _tag(kind)

    def read(message: bytes) -> Kind | Frame:
        if message.startswith(tag) and (frame := _frame(message, len(tag))) is not None:
            return frame
        return kind.FromString(message)

    return read


def _frame(message: bytes, at: int) -> Frame | None:
    """The frame whose length begins at `at`; None when anything else than data and crc32 is there."""
    length, at = _read_varint(message, at)
    if at + length != len(message) or message[at : at + 1] != _DATA:
        return None
    size, at = _read_varint(message, at + 1)
    end = at + size
    if end + _CRC_BYTES != len(message) or message[end : end + 1] != _CRC32:
        return None
    return Frame(memoryview(message)[at:end], struct.unpack_from("<I", message, end + 1)[0])


def _tag(kind: Any) -> bytes:
    return _varint(kind.DESCRIPTOR.fields_by_name["frame"].number << 3 | _LENGTH_DELIMITED)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Value and the place after it; -1 when it does not end within five bytes."""
    value = 0
    for place in range(at, min(at + 5, len(message))):
        value |= (message[place] & 0x7F) << 7 * (place - at)
        if message[place] < 0x80:
            return value, place + 1
    return -1, at
