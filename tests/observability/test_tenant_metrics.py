"""Series of tenants: bounded in number, there before traffic, and in sum what the series of the whole service say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kvcache_client import CacheError, Credentials, KVCacheClient

from kvcache_service.bench import scene
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.tenants import OTHERS, QUOTAS
from tests.security.conftest import entry
from tests.security.test_tenants import reused, store

Start = Callable[..., ServiceProcess]
TOKENS = 4 * scene.CHUNK
SHAPE = scene.Shape(2, 1, 32)
KV = TOKENS * SHAPE.token_bytes


def of(metrics: dict[str, float], name: str, **labels: str) -> dict[str, float]:
    """Values by tenant of the series with these other labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = {}
    for series, value in metrics.items():
        base, _, inner = series.removesuffix("}").partition("{")
        pairs = inner.split(",")
        if base == f"kvcache_tenant_{name}" and all(pair in pairs for pair in wanted):
            (tenant,) = [pair for pair in pairs if pair.startswith("tenant=")]
            found[tenant.partition("=")[2].strip('"')] = value
    return found


def test_tenants_are_told_apart(start_service: Start, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text("".join(entry(name * 8, name) for name in ("c", "b", "a", "d")))
    settings = {"host_bytes": str(64 << 20), "quota_turns": "4", "quota_host_bytes": str(2 * KV)}
    with start_service(tokens_file=str(file), metrics_tenants="2", **settings) as service:
        before = service.metrics()
        for name in ("calls_total", "refused_total", "prompt_tokens_total", "reused_tokens_total", "sessions", "open_turns"):
            assert of(before, name) == {"a": 0, "b": 0, OTHERS: 0}, "two by name, in the order of their names"
        assert {quota: of(before, "quota_share", quota=quota) for quota in QUOTAS} == {
            quota: {"a": 0, "b": 0, OTHERS: 0} for quota in QUOTAS
        }
        clients = {name: KVCacheClient(service.target, credentials=Credentials(token=name * 8)) for name in "abcd"}
        open_turns = []
        for name, client in clients.items():
            template = scene.plain_template(client, SHAPE)
            prompt = list(range(TOKENS))
            store(client, template, prompt, torch.zeros(SHAPE.layers, 2, TOKENS, 1, 32, dtype=torch.bfloat16))
            if name != "b":
                store(client, template, prompt, torch.zeros(SHAPE.layers, 2, TOKENS, 1, 32, dtype=torch.bfloat16))
            if name == "c":
                open_turns = [client.open_turn(template, {"prompt": prompt}, reserve_tokens=0) for _ in range(3)]
        assert reused(clients["a"], scene.plain_template(clients["a"], SHAPE), list(range(TOKENS))) == TOKENS - 1
        with pytest.raises(CacheError, match="only an admin"):  # at the door
            clients["a"].calibrate("anything")
        with pytest.raises(CacheError, match="none of ours"):  # and behind it
            next(clients["a"].events("mine"))
        while of(after := service.metrics(), "refused_total")["a"] < 2:
            pass  # the second refusal is counted when its call ends, which the client need not wait for
        for turn in open_turns:
            turn.release()
        for client in clients.values():
            client.close()

    assert of(after, "prompt_tokens_total") == {"a": 2 * TOKENS, "b": TOKENS, OTHERS: 4 * TOKENS}
    assert of(after, "reused_tokens_total") == {"a": TOKENS - 1, "b": 0, OTHERS: 2 * (TOKENS - 1)}
    for name in ("prompt_tokens", "reused_tokens"):
        assert sum(of(after, f"{name}_total").values()) == after[f"kvcache_{name}_total"]
    assert of(after, "sessions") == {"a": 1, "b": 1, OTHERS: 2}
    assert of(after, "open_turns") == {"a": 0, "b": 0, OTHERS: 3}
    assert of(after, "host_bytes") == {"a": KV, "b": KV, OTHERS: 2 * KV}
    assert of(after, "quota_share", quota="turns") == {"a": 0, "b": 0, OTHERS: 0.75}, "of the others the largest, not the sum"
    assert of(after, "quota_share", quota="host_bytes") == {"a": 0.5, "b": 0.5, OTHERS: 0.5}
    assert of(after, "quota_share", quota="sessions") == {"a": 0, "b": 0, OTHERS: 0}, "no limit"
    assert of(after, "refused_total") == {"a": 2, "b": 0, OTHERS: 0}
    refused = sum(value for series, value in after.items() if series.startswith("kvcache_errors_total"))
    assert sum(of(after, "refused_total").values()) == refused
    assert of(after, "calls_total")["a"] > of(after, "refused_total")["a"]
