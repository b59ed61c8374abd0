"""A turn: planning with full pools, and the time to the first token on the real model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import numpy as np
from kvcache_client import KVCacheClient
from kvcache_client.adapters.transformers import SharedModel
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.bench import floors, scene
from kvcache_service.bench.rows import Row, Track, compare, row, seconds
from kvcache_service.evaluation import model
from kvcache_service.evaluation.run import MEASURING, OPEN_GATES
from kvcache_service.evaluation.service import ServiceProcess

PLACEHOLDERS, CONSUMERS, TURNS, SAMPLE_TOKENS = 12, 4, 21, 8  # 48 pools with 21 samples each
SMALL = scene.Shape(layers=4, heads=1, dim=16)
LENGTHS = (512, 1024, 2048)
LEARNED = 6  # turns before the clock starts; gates are open
SETTINGS = MEASURING | OPEN_GATES | {"min_samples": "2"}


def run(track: Track[int], rounds: int) -> Iterator[Row]:
    yield planning(track, rounds)
    yield from first_token(track, max(3, rounds // 6))


def planning(track: Track[int], rounds: int) -> Row:
    """OpenTurn with twelve known samples, when pools hold about a thousand."""
    with ServiceProcess(**SETTINGS) as service, KVCacheClient(service.target) as client:
        templates = [scene.reader(client, f"agent {n}", PLACEHOLDERS, SMALL) for n in range(CONSUMERS + 1)]
        prompts = scene.Prompts()
        samples: Mapping[str, list[int]] = {}
        for _ in track(range(TURNS), TURNS, "turn: filling the pools"):
            samples = {f"p{n}": prompts.take(SAMPLE_TOKENS) for n in range(PLACEHOLDERS)}
            for template in templates:
                teach(client, template, samples)
        slots = service.metrics()["kvcache_slots"]
        if slots != PLACEHOLDERS * CONSUMERS:
            raise RuntimeError(f"{slots:.0f} slots have learned, not {PLACEHOLDERS * CONSUMERS}")

        def opening() -> float:
            opened = []
            spent = seconds(lambda: opened.append(client.open_turn(templates[-1], samples, reserve_tokens=1)))
            opened[0].release()
            if not opened[0].reuses:
                raise RuntimeError("the turn reuses nothing")
            return spent

        with floors.EmptyCall(service.target) as empty:
            case = f"OpenTurn, {PLACEHOLDERS} placeholders, {slots:.0f} pools, {slots * TURNS:.0f} samples"
            return compare(track, "turn", case, "an empty call", opening, empty, rounds=10 * rounds)


def teach(client: KVCacheClient, template: str, samples: Mapping[str, list[int]]) -> None:
    """One dense turn with KV of noise, from which the pools learn."""
    turn = client.open_turn(template, samples, reserve_tokens=1, policy="off")
    kv = scene.memory(scene.noise(turn.plan.buffer_tokens, SMALL, seed=int(template[:8], 16)))
    np.copyto(np.frombuffer(turn.buffer, np.uint8), np.frombuffer(kv, np.uint8))
    turn.observe(0, turn.plan.prompt_tokens)
    turn.settle(pb.VERDICT_ACCEPTED, finish_reason=pb.FINISH_REASON_LENGTH)


def first_token(track: Track[int], rounds: int) -> Iterator[Row]:
    """A text that another agent has read, behind this agent's own prompt: TTFT against the forward that it must do anyway."""
    loaded, tokenizer = model.load(None)
    draw = random.Random(0)
    for length in LENGTHS:
        with ServiceProcess(**SETTINGS) as service, KVCacheClient(service.target, timeout=60.0) as client:
            shared = SharedModel(loaded, tokenizer, client)
            first = shared.agent("You read the text first.\n{text}\nDone:")
            second = shared.agent("You are the second one to read it.\n{text}\nNow say what it means:")

            cached, forwards, dense = [], [], []
            refused = 0
            for number in track(range(rounds + LEARNED), rounds + LEARNED, f"turn: first token, {length} tokens"):
                samples = {"text": [draw.randrange(1000, 20000) for _ in range(length)]}
                first.run(samples, max_new_tokens=1)
                if number < LEARNED:
                    second.run(samples, max_new_tokens=1, policy="off")
                    continue
                call = second.begin(samples, max_new_tokens=1)
                call.prefill()
                if call.answer.outcome == "dense":  # probes may refuse noise, which has nothing to learn
                    refused += 1
                    call.abort()
                    continue
                cached.append(call.ttft)
                forwards.append(call.answer.first_forward)
                call.abort()
                dense.append(second.run(samples, max_new_tokens=1, cache=False).ttft)
            if refused > rounds // 2:
                raise RuntimeError(f"{refused} of {rounds} turns were dense")
            yield row("turn", f"first token, {length} tokens reused", "forward of the recomputed tokens", cached, forwards)
            yield row("turn", f"dense prefill of {length} tokens", "the reuse turn", dense, cached)
