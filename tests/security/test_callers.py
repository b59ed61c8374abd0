"""Who may call, and as whom: real servers, real certificates."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvcache_client import AdminClient, CacheError, Credentials, KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb
from typer.testing import CliRunner

from kvcache_service.cli import app
from kvcache_service.evaluation.service import ServiceProcess
from kvcache_service.rpc.callers import Tokens
from tests.security.conftest import NOW, Authority, entry

Start = Callable[..., ServiceProcess]


def refused(target: str, credentials: Credentials) -> CacheError:
    with KVCacheClient(target, credentials=credentials, timeout=5.0) as client, pytest.raises(CacheError) as caught:
        client.status()
    return caught.value


def test_tokens(start_service: Start, tmp_path: Path) -> None:
    """Only a known token of the file gets in, an admin's alone may calibrate, and a new file counts at once."""
    file = tmp_path / "tokens.toml"
    past = entry("past", "a", expires=(NOW - timedelta(hours=1)).isoformat())
    file.write_text(entry("one", "a") + entry("boss", "a", admin="true", name='"boss"') + past)
    with start_service(tokens_file=str(file)) as service:
        assert refused(service.target, Credentials()).code == "UNAUTHENTICATED"
        for wrong in ("two", "past", "", "One"):
            assert refused(service.target, Credentials(token=wrong)).code == "UNAUTHENTICATED"
        with KVCacheClient(service.target, credentials=Credentials(token="one")) as worker:
            assert worker.status().boot_id
            assert worker.transport == "shared_memory"
            with pytest.raises(CacheError) as caught:
                worker.calibrate("anything")
            assert caught.value.code == "PERMISSION"
        with KVCacheClient(service.target, credentials=Credentials(token="boss")) as boss:
            with pytest.raises(CacheError) as caught:
                boss.calibrate("anything")
            assert caught.value.code == "UNKNOWN_TEMPLATE"
        file.write_text(entry("two", "a"))
        assert refused(service.target, Credentials(token="one")).code == "UNAUTHENTICATED"
        with KVCacheClient(service.target, credentials=Credentials(token="two")) as worker:
            assert worker.status().boot_id
            file.write_text("[[token]]\nnam = 'slip'\n")
            assert worker.status().boot_id, "a slip in the file locks nobody out"
        counted = service.metrics()
        assert counted['kvcache_errors_total{code="unauthenticated"}'] == 6
        assert counted['kvcache_errors_total{code="permission"}'] == 1


def test_health_is_open_and_reflection_is_not(start_service: Start, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "a"))
    with start_service(tokens_file=str(file)) as service, grpc.insecure_channel(service.target) as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask])))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_mutual_tls(start_service: Start, authority: Authority, tmp_path: Path) -> None:
    """A certificate of ours names the tenant; a stranger's, an expired one and none at all get no connection."""
    certificate, key = authority.issue("service")
    files = {"tls_cert": str(certificate), "tls_key": str(key), "tls_client_ca": str(authority.path)}
    stranger = Authority(tmp_path, "stranger").issue("stranger", "kvcache://tenant/a")
    expired = authority.issue("expired", "kvcache://tenant/a", NOW - timedelta(hours=1))
    with start_service(**files) as service:
        for own in (stranger, expired, (None, None)):
            assert refused(service.target, Credentials(authority.path, *own)).code == "UNAVAILABLE"
        assert refused(service.target, Credentials()).code == "UNAVAILABLE", "plaintext to a TLS port"
        nameless = Credentials(authority.path, *authority.issue("nameless"))
        assert refused(service.target, nameless).code == "UNAUTHENTICATED"
        worker = Credentials(authority.path, *authority.issue("worker", "kvcache://tenant/a"))
        with KVCacheClient(service.target, credentials=worker) as client:
            assert client.status().boot_id
            with pytest.raises(CacheError) as caught:
                client.calibrate("anything")
            assert caught.value.code == "PERMISSION"
        admin = Credentials(authority.path, *authority.issue("admin", "kvcache://admin/a"))
        with KVCacheClient(service.target, credentials=admin) as client, pytest.raises(CacheError) as caught:
            client.calibrate("anything")
        assert caught.value.code == "UNKNOWN_TEMPLATE"
        metrics = service.metrics()
        assert metrics["kvcache_sessions"] == 0


def test_renewed_certificates_serve_the_next_connection(start_service: Start, authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("renewed")
    with start_service(tls_cert=str(certificate), tls_key=str(key)) as service:
        with KVCacheClient(service.target, credentials=Credentials(authority.path)) as client:
            assert client.status().boot_id
            other = Authority(tmp_path, "other")
            for old, new in zip((certificate, key), other.issue("renewed"), strict=True):
                old.write_bytes(new.read_bytes())
            assert client.status().boot_id, "a connection that is there stays"
        with KVCacheClient(service.target, credentials=Credentials(other.path)) as client:
            assert client.status().boot_id
        assert refused(service.target, Credentials(authority.path)).code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"listen": "0.0.0.0:0"}, "tls_cert"),
        ({"admin_listen": "0.0.0.0:0"}, "admin_listen"),
        ({"listen": "0.0.0.0:0", "tls_cert": "CERT", "tls_key": "KEY"}, "tokens_file"),
        ({"tls_cert": "CERT"}, "tls_key"),
        ({"tls_client_ca": "CERT"}, "tls_cert"),
        ({"tokens_file": "/nowhere"}, "/nowhere"),
        ({"tls_cert": "/nowhere", "tls_key": "KEY"}, "tls_cert /nowhere"),
        ({"tokens_file": "KEY"}, "kvcache token new"),
    ],
)
def test_refused_at_start(settings: dict[str, str], says: str, authority: Authority) -> None:
    paths = dict(zip(("CERT", "KEY"), authority.issue("start"), strict=True))
    environment = {f"KVCACHE_{name.upper()}": str(paths.get(value, value)) for name, value in settings.items()}
    environment |= {
        "KVCACHE_METRICS_LISTEN": "127.0.0.1:0",
        "KVCACHE_ADMIN_LISTEN": environment.get("KVCACHE_ADMIN_LISTEN", "127.0.0.1:0"),
    }
    environment |= {"PATH": "/usr/bin", "KVCACHE_HOST_BYTES": str(1 << 20)}
    environment |= {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "kvcache_service.cli", "serve"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr


def test_other_hosts_when_it_is_said(start_service: Start) -> None:
    with start_service(listen="0.0.0.0:0", insecure="true") as service:
        port = service.target.rpartition(":")[2]
        with KVCacheClient(f"127.0.0.1:{port}") as client:
            assert client.status().boot_id


def test_unix_sockets(start_service: Start, tmp_path: Path) -> None:
    """Open to user and group alone. A living service's socket is not taken over, a dead one's is."""
    paths = [tmp_path / "workers.sock", tmp_path / "admins.sock"]
    settings = dict(zip(("listen", "admin_listen"), (f"unix:{path}" for path in paths), strict=True))
    with start_service(**settings) as service, KVCacheClient(service.target) as client:
        assert service.target == settings["listen"]
        assert {path.stat().st_mode & 0o777 for path in paths} == {0o660}
        assert client.transport == "shared_memory"
        with AdminClient(service.admin_target, credentials=Credentials(token="not encrypted, but nobody listens")) as admin:
            assert [t.tenant for t in admin.quotas()] == ["default"]
        with pytest.raises(RuntimeError):
            start_service(**settings)
        assert client.status().boot_id, "it still serves"
        service.process.kill()
        service.process.wait()
    assert all(path.exists() for path in paths)
    with start_service(**settings) as service, KVCacheClient(service.target) as client:
        assert client.status().boot_id
    assert not any(path.exists() for path in paths)


def test_credentials_that_do_not_fit(tmp_path: Path) -> None:
    for wrong in (
        Credentials(certificate=tmp_path),
        Credentials(certificate=tmp_path, key=tmp_path),
        Credentials(token="secret"),
    ):
        with pytest.raises(ValueError, match="give"):
            KVCacheClient("10.0.0.1:1", credentials=wrong)
    KVCacheClient("10.0.0.1:1", credentials=Credentials(token="secret", plaintext=True)).close()
    assert "secret" not in repr(Credentials(token="secret"))


def test_the_command_makes_tokens_that_serve(tmp_path: Path) -> None:
    """What it prints is what the file takes; the secret is not in it."""
    done = CliRunner().invoke(app, ["token", "new", "--tenant", "a", "--name", "w", "--expires", "2027-01-31T00:00:00Z"])
    assert done.exit_code == 0
    secret = done.stderr.split()[-1]
    assert secret not in done.stdout
    file = tmp_path / "tokens.toml"
    file.write_text(done.stdout)
    clock = [datetime(2027, 1, 30, tzinfo=UTC)]
    tokens = Tokens(file, lambda: clock[0])
    found = tokens.find(secret)
    assert found is not None
    assert (found.name, found.tenant, found.admin) == ("w", "a", False)
    clock[0] = datetime(2027, 1, 31, tzinfo=UTC)
    assert tokens.find(secret) is None
    assert CliRunner().invoke(app, ["token", "new", "--tenant", "A b", "--name", "w"]).exit_code == 2


def test_a_bad_file_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text("token = 3")
    with pytest.raises(ValueError, match=r"tokens\.toml"):
        Tokens(file)
    file.write_text(entry("one", "a"))
    tokens = Tokens(file)
    file.unlink()
    with caplog.at_level(logging.ERROR):
        assert tokens.find("one") is not None
    assert "tokens stay as they were" in caplog.text


def test_commands_speak_with_credentials(start_service: Start, authority: Authority, tmp_path: Path) -> None:
    file, secret = tmp_path / "tokens.toml", tmp_path / "token"
    file.write_text(entry("one", "a"))
    secret.write_text("one\n")
    certificate, key = authority.issue("cli")
    with start_service(tls_cert=str(certificate), tls_key=str(key), tokens_file=str(file)) as service:
        options = ["status", "--json", "--target", service.target, "--tls-ca", str(authority.path)]
        assert CliRunner().invoke(app, [*options, "--token-file", str(secret)]).exit_code == 0
        unknown = CliRunner().invoke(app, options)
        assert unknown.exit_code == 1
        assert "UNAUTHENTICATED" in unknown.stderr
        assert CliRunner().invoke(app, [*options, "--token-file", "/nowhere"]).exit_code == 2


def test_every_method_asks(start_service: Start, tmp_path: Path) -> None:
    """No method of the protocol lets a stranger in, whatever it is sent."""
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "a"))
    with (
        start_service(tokens_file=str(file)) as service,
        grpc.insecure_channel(service.target) as workers,
        grpc.insecure_channel(service.admin_target) as admins,
    ):
        asked = 0
        for name, described in pb.DESCRIPTOR.services_by_name.items():
            channel = admins if name == "Admin" else workers
            for method in described.methods:
                path = f"/kvcache.v1.{name}/{method.name}"
                call = channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(iter([b""]), timeout=10))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, path
                asked += 1
        assert asked >= 20
