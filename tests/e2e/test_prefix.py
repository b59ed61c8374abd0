"""Plain prefix caching, policy exact: ordinary prompts of a tiny Llama through the real service."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcache_client import CacheError, KVCacheClient
from kvcache_client.adapters.transformers import Agent, Answer, SharedModel
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.bench import scene
from kvcache_service.evaluation.service import ServiceProcess
from tests.conftest import ByteTokenizer

CHUNK = 64


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=count)


@pytest.fixture
def agent(model: Any, client: KVCacheClient) -> Agent:
    return SharedModel(model, ByteTokenizer(), client).agent("{prompt}", policy="exact")


def ask(agent: Agent, prompt: list[int], new: int = 4) -> Answer:
    """A cached answer, equal to the dense one."""
    cached = agent.run({"prompt": prompt}, max_new_tokens=new)
    assert cached.token_ids == agent.run({"prompt": prompt}, max_new_tokens=new, cache=False).token_ids
    return cached


def test_whole_chunks_of_an_earlier_prompt_are_found(agent: Agent) -> None:
    prompt = tokens(150, 1)
    assert ask(agent, prompt).reused_tokens == 0
    assert ask(agent, prompt).reused_tokens == 2 * CHUNK
    assert ask(agent, prompt[:100] + tokens(100, 2)).reused_tokens == CHUNK


def test_the_last_prompt_token_is_always_computed(agent: Agent) -> None:
    prompt = tokens(2 * CHUNK, 1)
    ask(agent, prompt)
    again = ask(agent, prompt)
    assert (again.outcome, again.reused_tokens) == ("reuse", 2 * CHUNK - 1)


def test_a_conversation_finds_its_own_answers(agent: Agent) -> None:
    prompt = tokens(100, 3)
    answer = ask(agent, prompt, new=40)
    later = [*prompt, *answer.token_ids, *tokens(30, 4)]
    # The last token of the answer was never run: 139 of 140 have KV, two whole chunks.
    assert ask(agent, later).reused_tokens == (100 + len(answer.token_ids) - 1) // CHUNK * CHUNK == 2 * CHUNK


def test_a_chunk_behind_a_gap_is_found_too(agent: Agent) -> None:
    """Chunks are found one by one: only what is missing is computed."""
    prompt = tokens(200, 5)
    call = agent.begin({"prompt": prompt}, max_new_tokens=1)
    call.prefill()
    assert call._turn is not None
    call._turn.observe(CHUNK, len(prompt) - CHUNK)  # the first chunk is kept back
    call._turn.settle(pb.VERDICT_ACCEPTED, finish_reason=pb.FINISH_REASON_LENGTH)
    found = ask(agent, prompt)
    assert found.reused_tokens == 2 * CHUNK
    assert ask(agent, prompt).reused_tokens == 3 * CHUNK


def test_the_same_text_behind_another_prefix_is_not_taken(agent: Agent) -> None:
    shared = tokens(128, 6)
    ask(agent, [*tokens(CHUNK, 7), *shared])
    assert ask(agent, [*tokens(CHUNK, 8), *shared]).reused_tokens == 0


def test_pools_are_left_alone(agent: Agent, service: ServiceProcess) -> None:
    for seed in range(6):
        ask(agent, tokens(100, seed))
    metrics = service.metrics()
    assert metrics["kvcache_pools"] == metrics["kvcache_anchors"] == metrics["kvcache_slots"] == 0
    assert metrics["kvcache_leased_bytes"] == metrics["kvcache_open_turns"] == 0
    assert metrics['kvcache_turns_total{outcome="dense",policy="exact"}'] == 6


def test_a_template_can_be_asked_exactly(model: Any, client: KVCacheClient) -> None:
    """The policy of one turn: chunks run over the whole prompt, whatever its segments are."""
    agent = SharedModel(model, ByteTokenizer(), client).agent("You sum up what you read. " * 5 + "{text} Now:")
    samples = {"text": tokens(80, 9)}
    agent.run(samples, max_new_tokens=4, policy="exact")
    again = agent.run(samples, max_new_tokens=4, policy="exact")
    assert again.reused_tokens == again.prompt_tokens // CHUNK * CHUNK > 0
    assert again.token_ids == agent.run(samples, max_new_tokens=4, cache=False).token_ids


def test_more_answer_than_was_observed_is_refused(agent: Agent, client: KVCacheClient) -> None:
    call = agent.begin({"prompt": tokens(70, 10)}, max_new_tokens=8)
    call.prefill()
    answer = call.decode()
    assert call._turn is not None
    call._turn.observe(0, 70 + 3)
    with pytest.raises(CacheError) as caught:
        call._turn.settle(pb.VERDICT_ACCEPTED, finish_reason=pb.FINISH_REASON_LENGTH, output_token_ids=answer, output_kv_tokens=4)
    assert (caught.value.code, caught.value.field) == ("INVALID", "output_kv_tokens")
    call.abort()


def test_kv_of_other_tokens_is_refused(agent: Agent, service: ServiceProcess) -> None:
    first = tokens(CHUNK, 11)
    ask(agent, first)
    call = agent.begin({"prompt": [first[1], *first[1:]]}, max_new_tokens=1)
    call.prefill()
    call._cache.buffer[:, :, : CHUNK - 1] = call._cache.buffer[:, :, 1:CHUNK].clone()  # every token slips by one
    call.decode()
    call.settle()
    assert service.metrics()['kvcache_candidates_total{result="refused"}'] == 1
    assert ask(agent, [first[1], *first[1:]]).reused_tokens == 0


def written(service: ServiceProcess) -> None:
    """Wait until the disk has what it was given."""
    deadline = time.monotonic() + 30
    while service.metrics()["kvcache_disk_pending_writes"]:
        assert time.monotonic() < deadline, "nothing is written"


def test_exact_kv_outlives_a_killed_service(
    start_service: Callable[..., ServiceProcess], model: Any, tmp_path: Path, transport: str
) -> None:
    prompt = tokens(150, 12)
    role = "You are the agent whose role prompt is worth keeping. "

    def agents(client: KVCacheClient) -> tuple[Agent, Agent]:
        shared = SharedModel(model, ByteTokenizer(), client)
        return shared.agent("{prompt}", policy="exact"), shared.agent(role + "{question}")

    with start_service(disk_dir=str(tmp_path)) as service, KVCacheClient(service.target, transport=transport) as client:
        plain, talker = agents(client)
        ask(plain, prompt)
        talker.run({"question": "who?"}, max_new_tokens=1)
        written(service)
        service.process.kill()
        service.process.wait()
    with start_service(disk_dir=str(tmp_path)) as service, KVCacheClient(service.target, transport=transport) as client:
        plain, talker = agents(client)
        assert ask(plain, prompt).reused_tokens == 2 * CHUNK
        answer = talker.run({"question": "why?"}, max_new_tokens=4)
        assert answer.reused_tokens == len(role)
        assert answer.token_ids == talker.run({"question": "why?"}, max_new_tokens=4, cache=False).token_ids
        assert service.metrics()["kvcache_disk_damaged"] == 0


def test_layers_are_complete_when_they_are_announced(start_service: Callable[..., ServiceProcess], transport: str) -> None:
    """Lowest first, in several steps; what is announced has its final bytes, so that an engine may begin on it."""
    kv = scene.noise(1024)
    token_ids = scene.Prompts().take(1024)
    seen: list[int] = []
    with start_service() as service, KVCacheClient(service.target, transport=transport) as client:
        template = scene.stored_prefix(client, token_ids, kv)
        with client.open_turn(template, {"rest": [1, 2, 3]}, reserve_tokens=5) as turn:
            found = torch.frombuffer(turn.buffer, dtype=torch.bfloat16).view(16, 2, 1032, 4, 128)

            def complete(layers: int) -> None:
                seen.append(layers)
                assert torch.equal(found[:layers, 1, :1024], kv[:layers, 1])

            turn.fetch(complete)
    assert len(seen) > 2
    assert seen == sorted(set(seen))
    assert seen[-1] == 16


def test_a_dense_segment_does_not_travel(start_service: Callable[..., ServiceProcess]) -> None:
    with start_service() as service, KVCacheClient(service.target, transport="stream") as client:
        template = scene.stored_prefix(client, list(range(64)), scene.noise(64))
        with client.open_turn(template, {"rest": list(range(100, 400))}, reserve_tokens=0) as turn:
            replies = list(client._turns.FetchTurn(pb.FetchTurnRequest(turn_id=turn.plan.turn_id)))
    assert replies[-1].summary.bytes == 64 * scene.TOKEN_BYTES


def test_opening_a_turn_brings_its_kv_along_where_memory_is_shared(
    start_service: Callable[..., ServiceProcess], transport: str
) -> None:
    kv, token_ids = scene.noise(64), list(range(64))
    with start_service() as service, KVCacheClient(service.target, transport=transport) as client:
        template = scene.stored_prefix(client, token_ids, kv)
        with client.open_turn(template, {"rest": [1, 2]}, reserve_tokens=0, fetch=True) as turn:
            found = torch.frombuffer(turn.buffer, dtype=torch.bfloat16).view(16, 2, 66, 4, 128)[:, 1, :64]
            assert turn.plan.HasField("fetched") == (transport == "shared_memory") == torch.equal(found, kv[:, 1])
            announced: list[int] = []
            turn.fetch(announced.append)
            assert torch.equal(found, kv[:, 1])
            assert announced[-1] == 16
            assert turn.fetch_seconds > 0
