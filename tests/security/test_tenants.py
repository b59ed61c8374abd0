"""What one tenant stores, holds and asks is nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from kvcache_client import CacheError, Credentials, KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.bench import scene
from kvcache_service.errors import Code, KVCacheError
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.rpc.quotas import RequestRate
from kvcache_service.tiers.host import HostTier, Pin
from tests.conftest import Clock
from tests.security.conftest import entry

Start = Callable[..., ServiceProcess]
TOKENS = 256


class Two(NamedTuple):
    service: ServiceProcess
    file: Path
    ours: KVCacheClient
    theirs: KVCacheClient


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("ours", "a") + entry("theirs", "b"))
    return file


@pytest.fixture
def two(start_service: Start, tokens_file: Path) -> Iterator[Two]:
    with (
        start_service(tokens_file=str(tokens_file), host_bytes=str(256 << 20)) as service,
        KVCacheClient(service.target, credentials=Credentials(token="ours")) as ours,
        KVCacheClient(service.target, credentials=Credentials(token="theirs")) as theirs,
    ):
        yield Two(service, tokens_file, ours, theirs)


def store(client: KVCacheClient, template: str, prompt: list[int], kv: torch.Tensor) -> None:
    turn = client.open_turn(template, {"prompt": prompt}, reserve_tokens=0)
    np.copyto(np.frombuffer(turn.buffer, np.uint8), np.frombuffer(scene.memory(kv), np.uint8))
    turn.settle(pb.VERDICT_ACCEPTED, finish_reason=pb.FINISH_REASON_LENGTH, observed=(0, len(prompt)))


def reused(client: KVCacheClient, template: str, prompt: list[int]) -> int:
    with client.open_turn(template, {"prompt": prompt}, reserve_tokens=0) as turn:
        return turn.plan.prompt_tokens - len(turn.fresh)


def test_no_shared_hit(two: Two) -> None:
    """The same prompt of another tenant is a miss, and stores bytes of its own."""
    prompt, kv = list(range(TOKENS)), scene.noise(TOKENS)
    template = scene.plain_template(two.ours)
    assert scene.plain_template(two.theirs) == template
    store(two.ours, template, prompt, kv)
    assert reused(two.ours, template, prompt) == TOKENS - 1
    assert reused(two.theirs, template, prompt) == 0
    before = two.service.metrics()["kvcache_host_used_bytes"]
    other = scene.noise(TOKENS, seed=1)
    store(two.theirs, template, prompt, other)  # other bytes under the same tokens are no conflict, and spoil nothing
    assert two.service.metrics()["kvcache_host_used_bytes"] == before + kv.nbytes
    with two.ours.open_turn(template, {"prompt": prompt}, reserve_tokens=0, fetch=True) as turn:
        turn.fetch()
        got = torch.frombuffer(turn.buffer, dtype=torch.bfloat16).view(kv.shape)[:, :, : TOKENS - 1]
        torch.testing.assert_close(got, kv[:, :, : TOKENS - 1], rtol=0.02, atol=0.02)


def test_ids_of_another_tenant_are_unknown(two: Two) -> None:
    """Turns, sessions and templates: the answer is that for an id that never was."""
    template = scene.plain_template(two.ours)
    turn = two.ours.open_turn(template, {"prompt": list(range(TOKENS))}, reserve_tokens=0)
    theirs = two.theirs._turns
    nowhere = "0" * 32

    def answer(call: Callable[[], object]) -> tuple[object, str]:
        with pytest.raises(Exception, match=r"(?s).*") as caught:
            call()
        return caught.value.code(), caught.value.details()

    settle = {"verdict": pb.VERDICT_ABORTED}
    real = turn.plan.turn_id
    for make in (
        lambda i: theirs.SettleTurn(pb.SettleTurnRequest(turn_id=i, **settle)),
        lambda i: list(theirs.FetchTurn(pb.FetchTurnRequest(turn_id=i))),
        lambda i: theirs.Observe(
            iter([pb.ObserveRequest(header=pb.ObserveHeader(turn_id=i, tokens=1, dtype=pb.DTYPE_BFLOAT16))])
        ),
    ):
        status, text = answer(lambda make=make: make(real))
        assert (status, text.replace(real, nowhere)) == answer(lambda make=make: make(nowhere))
    assert not two.theirs._kvcache.Release(pb.ReleaseRequest(turn_id=turn.plan.turn_id)).released
    session = two.ours.connect().session_id
    scene.plain_template(two.theirs)
    request = pb.OpenTurnRequest(
        request_id="1",
        template_id=template,
        transport=pb.TRANSPORT_STREAM,
        samples=[pb.Sample(placeholder="prompt", token_ids=[1])],
    )
    found = [
        answer(lambda s=s: theirs.OpenTurn(pb.OpenTurnRequest(**_fields(request), session_id=s))) for s in (session, nowhere)
    ]
    assert found[0] == found[1]
    turn.settle(pb.VERDICT_ABORTED)
    ended = answer(lambda: theirs.SettleTurn(pb.SettleTurnRequest(turn_id=turn.plan.turn_id, **settle)))
    assert (
        ended[1].replace(turn.plan.turn_id, nowhere)
        == answer(lambda: theirs.SettleTurn(pb.SettleTurnRequest(turn_id=nowhere, **settle)))[1]
    )


def _fields(request: pb.OpenTurnRequest) -> dict[str, object]:
    return {descriptor.name: value for descriptor, value in request.ListFields()}


def test_quotas(start_service: Start, tokens_file: Path) -> None:
    """A tenant at its limit is told so and when to come again; the other one is not touched."""
    settings = {"quota_sessions": "1", "quota_turns": "2", "quota_templates": "2", "tokens_file": str(tokens_file)}
    with (
        start_service(**settings) as service,
        KVCacheClient(service.target, credentials=Credentials(token="ours")) as ours,
        KVCacheClient(service.target, credentials=Credentials(token="theirs")) as theirs,
        KVCacheClient(service.target, credentials=Credentials(token="ours")) as second,
    ):
        template = scene.plain_template(ours)
        turns = [ours.open_turn(template, {"prompt": [1, 2, 3]}, reserve_tokens=0) for _ in range(2)]
        with pytest.raises(CacheError, match="quota_turns") as caught:
            ours.open_turn(template, {"prompt": [1, 2, 3]}, reserve_tokens=0)
        assert (caught.value.code, caught.value.retry, caught.value.retry_after) == ("BUSY", True, 1.0)
        with pytest.raises(CacheError, match="quota_sessions"):
            second.connect()
        theirs.open_turn(scene.plain_template(theirs), {"prompt": [1, 2, 3]}, reserve_tokens=0).release()
        turns[0].release()
        ours.open_turn(template, {"prompt": [1, 2, 3]}, reserve_tokens=0).release()
        scene.reader(ours, "a role", 1, scene.USUAL)
        with pytest.raises(CacheError, match="quota_templates"):
            scene.reader(ours, "another role", 1, scene.USUAL)
        scene.reader(ours, "a role", 1, scene.USUAL)  # again: nothing new
        assert service.metrics()['kvcache_errors_total{code="busy"}'] == 3


def test_request_rate(clock: Clock) -> None:
    rate = RequestRate(4.0, clock)
    for _ in range(8):  # two seconds' worth
        rate.take("a")
    with pytest.raises(KVCacheError) as caught:
        rate.take("a")
    assert caught.value.code is Code.BUSY
    assert caught.value.retry_after == pytest.approx(0.25)
    rate.take("b")
    clock.tick(0.25)
    rate.take("a")
    with pytest.raises(KVCacheError):
        rate.take("a")


def test_request_rate_over_the_wire(start_service: Start, tokens_file: Path) -> None:
    settings = {"quota_requests_per_second": "0.001", "tokens_file": str(tokens_file)}
    with start_service(**settings) as service, KVCacheClient(service.target, credentials=Credentials(token="ours")) as ours:
        ours.status()
        with pytest.raises(CacheError, match="quota_requests_per_second") as caught:
            ours.status()
        assert 900 < caught.value.retry_after <= 1000


def test_a_tenant_evicts_its_own() -> None:
    """Beyond its share a tenant's own oldest blobs go, leased and hard-pinned ones stay, and others keep theirs."""
    tier = HostTier(1 << 20, owner=lambda key: key[0], share=4096)
    blob = torch.zeros(1024, dtype=torch.uint8)
    tier.put("b1", blob)
    for number in range(4):
        tier.put(f"a{number}", blob)
    lease = tier.lease(["a0"])
    tier.pin("a1", Pin.HARD)
    tier.put("a4", blob)
    assert [tier.has(key) for key in ("a0", "a1", "a2", "a3", "a4", "b1")] == [True, True, False, True, True, True]
    tier.check()
    tier.put("a4", torch.zeros(2048, dtype=torch.uint8))  # replaced: only the difference counts
    assert [tier.has(key) for key in ("a3", "a4")] == [False, True]
    with pytest.raises(KVCacheError) as caught:
        tier.put("a5", torch.zeros(2100, dtype=torch.uint8))
    assert caught.value.code is Code.QUOTA
    assert "quota_host_bytes" in str(caught.value)
    assert [tier.has(key) for key in ("a0", "a1", "a4", "b1")] == [True] * 4, "a refused put changes nothing"
    tier.check()
    lease.release()


def test_shares_over_the_wire(start_service: Start, tokens_file: Path) -> None:
    """A flood of one tenant's prompts leaves the other's in place."""
    settings = {"quota_host_bytes": str(20 << 20), "host_bytes": str(64 << 20), "tokens_file": str(tokens_file)}
    with (
        start_service(**settings) as service,
        KVCacheClient(service.target, credentials=Credentials(token="ours")) as ours,
        KVCacheClient(service.target, credentials=Credentials(token="theirs")) as theirs,
    ):
        kv, prompts = scene.noise(TOKENS), scene.Prompts()
        template, kept = scene.plain_template(ours), prompts.take(TOKENS)
        store(ours, template, kept, kv)
        flood = scene.plain_template(theirs)
        for _ in range(12):
            last = prompts.take(TOKENS)
            store(theirs, flood, last, kv)
        assert reused(theirs, flood, last) == TOKENS - 1
        assert reused(ours, template, kept) == TOKENS - 1
