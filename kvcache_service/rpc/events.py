"""The stream of KV events, read from the engine's log as fast as the reader takes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.engine.events import MOST, Event, Events

_POLL_SECONDS = 0.02  # looking costs microseconds, and the engine need not know who waits
_SILENCE_SECONDS = 5.0
Snapshot = tuple[list[Event], int]


async def follow(
    events: Events,
    tenant: str,
    request: pb.EventsRequest,
    over: asyncio.Event,
    run: Callable[[Callable[[str], Snapshot], str], Awaitable[Snapshot]],
) -> AsyncIterator[pb.EventBatch]:
    """Batches until `over`. run: calls on a thread. Raises INVALID or BUSY before the first batch."""
    clock = asyncio.get_running_loop().time
    place, told = events.place(request.cursor), -_SILENCE_SECONDS  # the first batch comes at once
    with events.reader(tenant):
        while not over.is_set():
            found = events.after(tenant, place)
            if found is None and request.snapshot:
                held, place = await run(events.snapshot, tenant)
                for batch in _snapshot(held, events.cursor(place)):
                    yield batch
            elif found is None:
                place = events.end(tenant)
                yield pb.EventBatch(cursor=events.cursor(place), lost=True)
            elif found[1] != place or clock() - told >= _SILENCE_SECONDS:
                place = found[1]
                yield pb.EventBatch(cursor=events.cursor(place), events=map(_message, found[0]))
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), _POLL_SECONDS)
                continue
            told = clock()


def _snapshot(held: Sequence[Event], cursor: str) -> Iterator[pb.EventBatch]:
    """Made one by one, as they are sent. Only the last batch has a cursor: half a snapshot is none."""
    for at in range(0, max(len(held), 1), MOST):
        last = at + MOST >= len(held)
        yield pb.EventBatch(lost=at == 0, cursor=cursor if last else "", events=map(_message, held[at : at + MOST]))


def _message(event: Event) -> pb.Event:
    return pb.Event(
        removed=event.removed,
        kind=f"KIND_{event.kind.name}",
        model_id=event.model_id,
        content=bytes.fromhex(event.content),
        bytes=event.nbytes,
        start=event.start,
        tokens=event.tokens,
        template_id=event.template_id,
        ordinal=event.ordinal,
    )
