"""What the host tier gains and loses, for routers that keep an index of it: a bounded log for every tenant that has had a reader.

A reader holds a cursor and asks for what came after it. Nothing is kept for a single reader and nothing waits for one: what has
left the log before it was read is lost, and the reader begins again from a snapshot.
"""

from __future__ import annotations

import enum
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvcache_service.catalog.keys import tenant_of
from kvcache_service.engine.quotas import refuse_more
from kvcache_service.errors import invalid
from kvcache_service.tiers.host import Held, HostTier

MOST = 512  # events of one batch
_CURSOR = re.compile(r"(?P<boot>[0-9a-f]{1,64}):(?P<sequence>\d{1,18})")
# The keys of Memory.exact_key and of Update; placeholder names may hold anything.
_KEY = re.compile(
    r"[^{]*\{[^:]*:(?P<model>[^}]*)\}:(?:"
    r"exact:(?P<prefix>[0-9a-f]{64}):(?P<start>\d+)"
    r"|base:.*:(?P<sample>[0-9a-f]{64}):[0-9a-f]+"
    r"|pool:.*:offset:(?P<anchor>[0-9a-f]{64}):(?P<template>[0-9a-f]{64}):(?P<ordinal>\d+):[0-9a-f]+:placeholder)",
    re.DOTALL,
)


class Kind(enum.Enum):
    """Names equal the protocol's.

    PREFIX  exact KV of tokens behind exactly the tokens before them
    SAMPLE  an answer's KV, to be moved and corrected wherever the answer is read
    ANCHOR  offsets of a sample in a template (paper)
    """

    PREFIX = enum.auto()
    SAMPLE = enum.auto()
    ANCHOR = enum.auto()


@dataclass(frozen=True)
class EventSettings:
    """kept: events per tenant; streams: readers of one tenant at a time, None for no limit."""

    kept: int
    streams: int | None


@dataclass(frozen=True)
class Event:
    """content: tokens_key of a PREFIX's tokens up to its end, else of the sample. start, tokens: of a PREFIX."""

    removed: bool
    kind: Kind
    model_id: str
    content: str
    nbytes: int
    start: int = 0
    tokens: int = 0
    template_id: str = ""
    ordinal: int = 0


@dataclass(frozen=True)
class _Change:
    """An event as it is noted, under the tier's lock; what it means is worked out when somebody reads it."""

    key: str
    removed: bool
    tokens: int
    nbytes: int

    @property
    def event(self) -> Event | None:
        """None: of a part of something that has its own event."""
        found = _KEY.fullmatch(self.key)
        if found is None:
            return None
        model, size = found["model"], self.nbytes
        if found["prefix"] is not None:
            return Event(self.removed, Kind.PREFIX, model, found["prefix"], size, int(found["start"]), self.tokens)
        if found["sample"] is not None:
            return Event(self.removed, Kind.SAMPLE, model, found["sample"], size)
        ordinal = int(found["ordinal"])
        return Event(self.removed, Kind.ANCHOR, model, found["anchor"], size, template_id=found["template"], ordinal=ordinal)


class _Log:
    """The last changes of one tenant, a ring: number n + 1 lies at n modulo its size. `last` is the newest one's number."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._ring: list[_Change] = []
        self.last = 0

    def add(self, change: _Change) -> None:
        if len(self._ring) < self._kept:
            self._ring.append(change)
        else:
            self._ring[self.last % self._kept] = change
        self.last += 1

    def after(self, place: int) -> list[_Change] | None:
        """The first MOST after number `place`; None when some are gone, or `place` has not been yet."""
        if not self.last - len(self._ring) <= place <= self.last:
            return None
        return [self._ring[number % self._kept] for number in range(place, min(self.last, place + MOST))]


class Events:
    """Thread-safe. Noting costs an append. Reading takes no lock of the tier; a snapshot does, to list the tenant's keys."""

    def __init__(self, tier: HostTier, boot_id: str, settings: EventSettings) -> None:
        self._tier = tier
        self._boot_id = boot_id
        self._settings = settings
        self._lock = threading.Lock()
        self._logs: dict[str, _Log] = {}
        self._readers: list[str] = []
        tier.watch(self._note)

    @contextmanager
    def reader(self, tenant: str) -> Iterator[None]:
        """Be one of the tenant's readers. Raises BUSY."""
        with self._lock:
            mine = (reader == tenant for reader in self._readers)
            refuse_more("quota_event_streams", self._settings.streams, mine, "event streams", "end one")
            self._readers.append(tenant)
            self._logs.setdefault(tenant, _Log(self._settings.kept))
        try:
            yield
        finally:
            with self._lock:
                self._readers.remove(tenant)

    def place(self, cursor: str) -> int | None:
        """The number of the last event before which nothing has to be told; None: of another boot, or of none. Raises INVALID."""
        if not cursor:
            return None
        found = _CURSOR.fullmatch(cursor)
        if found is None:
            raise invalid("cursor", "it is none of ours", "send the cursor of the last batch, or none")
        return int(found["sequence"]) if found["boot"] == self._boot_id else None

    def cursor(self, place: int) -> str:
        return f"{self._boot_id}:{place}"

    def after(self, tenant: str, place: int | None) -> tuple[list[Event], int] | None:
        """At most MOST events after a place and the place behind them; None when some that came after it are lost."""
        with self._lock:
            changes = self._logs[tenant].after(place) if place is not None else None
        return (_events(changes), place + len(changes)) if changes is not None and place is not None else None

    def end(self, tenant: str) -> int:
        """The place behind all events so far."""
        with self._lock:
            return self._logs[tenant].last

    def snapshot(self, tenant: str) -> tuple[list[Event], int]:
        """What is held, as stored events, and the place from which on events tell what changes it."""
        held, place = self._tier.holdings(tenant, lambda: self.end(tenant))
        return _events([_change(one, removed=False) for one in held]), place

    def _note(self, held: Held, removed: bool) -> None:
        """The tier's lock is held: events come in the order of what they tell."""
        with self._lock:
            log = self._logs.get(tenant_of(held.key))
            if log is not None:
                log.add(_change(held, removed=removed))


def _change(held: Held, *, removed: bool) -> _Change:
    """Coded blobs are flat: how many tokens they hold does not show."""
    return _Change(held.key, removed, held.shape[2] if len(held.shape) == 5 else 0, held.nbytes)


def _events(changes: list[_Change]) -> list[Event]:
    return [event for change in changes if (event := change.event) is not None]
