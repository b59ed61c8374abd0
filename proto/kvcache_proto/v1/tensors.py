"""Wire layout of KV: which bytes of a turn's buffer travel, in which order, and how frames carry them.

A buffer is [planes, columns, row]: planes = layers x 2 (K, V) in layer order, columns = token positions,
row = kv_heads x head_dim x item size bytes. Frames carry the chosen columns plane after plane, so that layer 0 is
complete first. Both ends compute the same ranges; the wire holds payload only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import Message

from kvcache_proto.v1 import codec
from kvcache_proto.v1 import kvcache_pb2 as pb

FRAME_BYTES = 1 << 20


class FrameError(ValueError):
    """Frames that do not fit their announcement: too large, too many, too few or damaged."""

    def __init__(self, message: str, *, checksum: bool = False) -> None:
        super().__init__(message)
        self.checksum = checksum


def ranges(planes: range, columns: int, row: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, length) in bytes of the column spans [start, end) in every plane, in wire order; neighbours are joined."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif end > start:
            joined.append((start, end))
    return [((plane * columns + start) * row, (end - start) * row) for plane in planes for start, end in joined]


def frames(kind: type[Message], buffer: memoryview, wire: Iterable[tuple[int, int]], limit: int = FRAME_BYTES) -> Iterator[bytes]:
    """The bytes of `wire` ranges as encoded messages `kind`, each with a frame of at most `limit` bytes."""
    parts: list[memoryview] = []
    size = 0
    for offset, length in wire:
        while length:
            take = min(length, limit - size)
            parts.append(buffer[offset : offset + take])
            offset, length, size = offset + take, length - take, size + take
            if size == limit:
                yield codec.encode(kind, parts)
                parts, size = [], 0
    if parts:
        yield codec.encode(kind, parts)


class FrameWriter:
    """Writes arriving frames into their ranges of a buffer. Raises FrameError; `finish` demands completeness."""

    def __init__(self, buffer: memoryview, wire: Sequence[tuple[int, int]], limit: int = FRAME_BYTES) -> None:
        self._buffer = buffer
        self._wire = list(wire)
        self._limit = limit
        self._index = 0
        self._done = 0  # bytes of the current range
        self.received = 0

    def write(self, frame: pb.Frame | codec.Frame) -> None:
        data = memoryview(frame.data)
        if len(data) > self._limit:
            raise FrameError(f"a frame of {len(data)} bytes, at most {self._limit}")
        if codec.crc32([data]) != frame.crc32:
            raise FrameError("a frame's checksum does not match its bytes", checksum=True)
        self.received += len(data)
        while len(data):
            if self._index == len(self._wire):
                raise FrameError(f"more than the announced {sum(n for _, n in self._wire)} bytes")
            offset, length = self._wire[self._index]
            take = min(length - self._done, len(data))
            self._buffer[offset + self._done : offset + self._done + take] = data[:take]
            data = data[take:]
            self._done += take
            if self._done == length:
                self._index, self._done = self._index + 1, 0

    def finish(self) -> None:
        if self._index < len(self._wire):
            raise FrameError(f"{self.received} bytes instead of the announced {sum(n for _, n in self._wire)}")
