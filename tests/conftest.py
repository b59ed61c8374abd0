"""Shared fixtures: a tiny random Llama, real servers on free ports, a clock that ticks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from docker.errors import DockerException
from kvcache_client import KVCacheClient
from testcontainers.community.redis import RedisContainer
from transformers import LlamaConfig, LlamaForCausalLM

from kvcache_service.catalog.embedded import EmbeddedServer
from kvcache_service.evaluation.service import ServiceProcess

VOCABULARY = 256
torch.set_num_threads(1)  # tests run side by side, one process per core


class Clock:
    """Time that only moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


class ByteTokenizer:
    """One token per byte: no merges, so that segments and prompts agree by construction."""

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(VOCABULARY)}


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Three layers, grouped-query attention, random weights."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


def _container() -> RedisContainer | None:
    try:
        return RedisContainer("valkey/valkey:8")
    except DockerException:
        return None


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real server: a container where Docker answers, else the embedded Valkey."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # docker leaves the socket of a failed attempt open
        container = _container()
        gc.collect()
    if container is None:
        with EmbeddedServer() as server:
            yield server.url
    else:
        with container:
            yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}/0"


@pytest.fixture(params=["shared_memory", "stream"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def start_service() -> Callable[..., ServiceProcess]:
    """The real service as its own process; the caller leaves it with a `with`."""

    def start(**settings: str) -> ServiceProcess:
        # A tiny random model is computed faster than it is fetched and its offsets are noise: cost model, held-out error
        # and probe would rightly forbid reuse. Their own tests set them.
        gates = {"max_cost_ratio": "1e9", "residual_limit": "1e9", "max_error": "1e9", "require_calibration": "false"}
        gates |= {"audit_rate": "0", "trial_rate": "0"}  # drawn at random: tests that want audits ask for them
        return ServiceProcess(**({"min_samples": "3"} | gates | settings))

    return start


@pytest.fixture
def service(start_service: Callable[..., ServiceProcess]) -> Iterator[ServiceProcess]:
    with start_service() as running:
        yield running


@pytest.fixture
def client(service: ServiceProcess, transport: str) -> Iterator[KVCacheClient]:
    with KVCacheClient(service.target, transport=transport) as connected:
        yield connected
    gc.collect()
