"""Bytes between service and worker: the assembled KV of one exact prefix."""

from __future__ import annotations

from collections.abc import Iterator

from kvcache_client import KVCacheClient

from kvcache_service.bench import floors, scene
from kvcache_service.bench.rows import Row, Timer, Track, compare, seconds
from kvcache_service.evaluation.service import ServiceProcess


def run(track: Track[int], rounds: int, sizes: tuple[int, ...] = scene.SIZES) -> Iterator[Row]:
    with ServiceProcess(**scene.SETTLED) as service, floors.PlainStream() as plain, floors.EmptyCall(service.target) as empty:
        for size in sizes:
            for transport, beneath, floor in (
                ("shared_memory", floors.both(floors.copy(size), empty), "one copy and an empty call"),
                ("stream", plain.down(size), "plain gRPC stream"),
            ):
                case = f"fetch {scene.named(size)}, {transport.replace('_', ' ')}"
                with KVCacheClient(service.target, transport=transport, timeout=60.0) as client:
                    fetch = _fetch(client, size // scene.TOKEN_BYTES)
                    yield compare(track, "transport", case, floor, fetch, beneath, size=size, rounds=rounds)


def _fetch(client: KVCacheClient, tokens: int) -> Timer:
    token_ids = scene.Prompts().take(tokens)
    template = scene.stored_prefix(client, token_ids, scene.noise(tokens))

    def fetch() -> float:
        with client.open_turn(template, {"rest": [1]}, reserve_tokens=0) as turn:
            return seconds(turn.fetch)

    return fetch
