"""What a tenant's calls leave behind for others: nothing but a line in the audit log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from kvcache_client import CacheError, Credentials, KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.bench import scene
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.rpc.callers import from_certificate
from tests.security.conftest import entry

Start = Callable[..., ServiceProcess]


class Two(NamedTuple):
    ours: KVCacheClient
    theirs: KVCacheClient
    target: str


@contextmanager
def tenants(start_service: Start, tmp_path: Path) -> Iterator[Two]:
    """Clients of tenants a and b; each tenant may register one model."""
    file = tmp_path / "tokens.toml"
    file.write_text(entry("secret-a", "a") + entry("secret-b", "b"))
    with (
        start_service(tokens_file=str(file), quota_models="1", max_cost_ratio="1.0") as service,
        KVCacheClient(service.target, credentials=Credentials(token="secret-a")) as ours,
        KVCacheClient(service.target, credentials=Credentials(token="secret-b")) as theirs,
    ):
        yield Two(ours, theirs, service.target)


@pytest.fixture
def two(start_service: Start, tmp_path: Path) -> Iterator[Two]:
    with tenants(start_service, tmp_path) as found:
        yield found


def test_models_are_a_tenants_own(two: Two) -> None:
    """Another tenant's model is unknown, and what he registered leaves our quota whole."""
    ours, theirs, _ = two
    model_id = theirs.register_model(scene.model())
    template = pb.RegisterTemplateRequest(model_id=model_id, segments=[pb.Segment(placeholder="p")])
    with pytest.raises(CacheError) as caught:
        ours.register_template(template)
    assert caught.value.code == "UNKNOWN_MODEL"
    small = scene.model(scene.Shape(2, 1, 32))
    ours.register_model(small)
    with pytest.raises(CacheError, match="quota_models"):
        ours.register_model(scene.model())
    assert ours.register_model(small), "one that is registered is nothing new"
    theirs.register_template(template)


def test_timings_are_a_tenants_own(two: Two) -> None:
    """What one tenant reports of its forwards predicts nothing for the other, and so cannot stop its reuse."""
    ours, theirs, _ = two
    shape = scene.Shape(2, 1, 32)
    template = scene.plain_template(theirs, shape)
    assert scene.plain_template(ours, shape) == template
    for tokens in range(64, 64 * 9, 64):
        turn = theirs.open_turn(template, {"prompt": list(range(tokens))}, reserve_tokens=0)
        turn.settle(
            pb.VERDICT_ACCEPTED,
            finish_reason=pb.FINISH_REASON_LENGTH,
            ttft_seconds=9.0 + tokens,
            first_forward_seconds=9.0 + tokens,
        )
    asked = {"prompt": list(range(640))}
    with theirs.open_turn(template, asked, reserve_tokens=0) as turn:
        assert turn.plan.predicted_dense_seconds > 1.0
    with ours.open_turn(template, asked, reserve_tokens=0) as turn:
        assert turn.plan.predicted_dense_seconds == 0.0


def test_the_audit_log_tells(start_service: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Who, what, outcome; never a token or an id that would open something."""
    # Within the test, since what a fixture starts does not write where capfd reads.
    with tenants(start_service, tmp_path) as (ours, theirs, target):
        template = scene.plain_template(ours)
        turn = ours.open_turn(template, {"prompt": [1, 2, 3]}, reserve_tokens=0)
        with pytest.raises(Exception, match=turn.plan.turn_id):
            theirs._turns.SettleTurn(pb.SettleTurnRequest(turn_id=turn.plan.turn_id, verdict=pb.VERDICT_ABORTED))
        theirs._kvcache.Release(pb.ReleaseRequest(turn_id=turn.plan.turn_id))
        with pytest.raises(CacheError):
            theirs.calibrate(template)
        with KVCacheClient(target, credentials=Credentials(token="secret-c")) as stranger, pytest.raises(CacheError):
            stranger.status()
        turn.settle(pb.VERDICT_ABORTED)
    lines = [line for line in capfd.readouterr().err.splitlines() if "kvcache.audit" in line]
    assert len(lines) == 4
    assert re.search(r"\bb asked for a turn of another tenant", lines[0])
    assert re.search(r"\bb would release a turn of another tenant", lines[1])
    assert re.search(r"b/b-worker kvcache\.v1\.Quality\.Calibrate from \S+: refused, permission", lines[2])
    assert re.search(r"unknown kvcache\.v1\.Quality\.Status from \S+: refused, unauthenticated", lines[3])
    assert not any(hidden in line for line in lines for hidden in ("secret", turn.plan.turn_id))


@pytest.mark.parametrize("name", ["", "a:b", "A", "a/b", "a\nb", "a}", "x" * 64])
def test_a_certificate_names_what_a_token_could(name: str) -> None:
    """Names are parts of keys and of log lines: no separator may come in by a certificate."""
    assert from_certificate([f"kvcache://tenant/{name}".encode()]) is None
    assert from_certificate([b"kvcache://tenant/a"]) is not None
