"""The one configuration: flags before KVCACHE_ environment before a TOML file before defaults, read once."""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "KVCACHE_"
ADDRESS = r"^.+:\d{1,5}$"  # host:port
SOCKET = r"^(unix:.+|.+:\d{1,5})$"  # or a Unix socket's path
CLIENT_PREFIX = "KVCACHE_CLIENT_"  # what commands that call a service read
FILE_VARIABLE = "KVCACHE_CONFIG"  # names the TOML file where no flag does


class Config(BaseSettings):
    """Settings of the service. Sizes in bytes, times in seconds; unknown names are refused."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    listen: str = Field(
        "127.0.0.1:50051",
        pattern=SOCKET,
        description="gRPC address; port 0 picks a free one; or a socket, as unix:/run/kvcache.sock",
    )
    admin_listen: str = Field("127.0.0.1:50052", pattern=SOCKET, description="address for admins, likewise")
    tls_cert: Path | None = Field(None, description="PEM certificate of the service; none: no TLS")
    tls_key: Path | None = Field(None, description="PEM key of tls_cert")
    tls_client_ca: Path | None = Field(
        None, description="PEM certificate of who signs clients' certificates; none: clients need none"
    )
    tokens_file: Path | None = Field(None, description="TOML file of bearer tokens; none: no tokens")
    insecure: bool = Field(
        False, description="serve other hosts without TLS or without asking who calls, where something else protects the service"
    )
    quota_sessions: int | None = Field(None, gt=0, description="sessions that one tenant may hold; none: no limit")
    quota_turns: int | None = Field(None, gt=0, description="open turns that one tenant may hold; none: no limit")
    quota_requests_per_second: float | None = Field(None, gt=0, description="calls of one tenant; none: no limit")
    quota_host_bytes: int | None = Field(None, gt=0, description="host tier bytes that one tenant may hold; none: no limit")
    quota_event_streams: int | None = Field(8, gt=0, description="readers of KV events that one tenant may have; none: no limit")
    event_log: int = Field(16384, gt=0, description="KV events that are kept for the readers of one tenant")
    quota_templates: int = Field(4096, gt=0, description="templates that one tenant may register")
    quota_models: int = Field(64, gt=0, description="models that one tenant may register")
    metrics_listen: str = Field("127.0.0.1:9464", pattern=ADDRESS, description="address of /metrics; port 0 picks a free one")
    metrics_tenants: int = Field(
        32, ge=0, description="tenants that metrics name, those of tokens_file first; all others are counted together"
    )
    redis_url: SecretStr | None = Field(
        None, description="Redis or Valkey, also by Sentinel or Cluster (docs/redis.md); none: an embedded Valkey"
    )
    redis_timeout: float = Field(1.0, gt=0, description="seconds before the metadata store counts as down")
    host_bytes: int | None = Field(None, gt=0, description="host tier budget; none: half of the memory that is free at start")
    host_touch: bool = Field(False, description="take the host tier's pages from the system at start: no page faults later")
    host_idle_seconds: float | None = Field(None, gt=0, description="KV in the host tier unused for so long goes; none: never")
    host_codec: Literal["none", "int8", "fp8"] = Field(
        "none", description="one byte per number for stored KV that promises nothing exact: bases of answers, offsets of anchors"
    )
    disk_dir: Path | None = Field(None, description="where KV and what was learned outlive the process; none: nowhere")
    disk_bytes: int = Field(16 << 30, gt=0, description="disk tier budget")
    shared_memory_dir: Path = Field(Path("/dev/shm"), description="where session buffers lie")
    device: str = Field("cpu", pattern=r"^(cpu|auto|cuda(:\d+)?)$", description="where KV is computed; auto: a GPU that answers")
    device_bytes: int | None = Field(None, gt=0, description="GPU memory to use; none: four fifths of what is free at start")
    session_bytes: int = Field(2 << 30, gt=0, description="buffer bytes that one session may hold")
    max_prompt_tokens: int = Field(32768, gt=0, description="longest prompt plus reserve")
    lease_seconds: float = Field(120.0, gt=0, description="a turn that is not settled by then is released")
    drain_seconds: float = Field(20.0, ge=0, description="time for open turns to end after SIGTERM; none begin then")
    threads: int = Field(8, gt=0, description="worker threads for tensor and metadata work")
    pool_anchors: int = Field(20, ge=2, description="V, anchors per pool")
    prune_window: int = Field(5, ge=1, description="prune the least used among this many oldest anchors")
    gamma: float = Field(0.3, gt=0, description="entropy gate of the paper policy")
    min_samples: int = Field(12, ge=1, description="verified samples before the guarded policy uses a slot")
    boundary: int = Field(
        12,
        ge=0,
        description="tokens of every placeholder, those most corrected, that are recomputed and probed; one of fixed text",
    )
    trailing: int = Field(32, ge=1, description="tokens of the last segment that are recomputed")
    max_taint: int = Field(4, ge=0, description="how often KV may build on approximated KV")
    max_error: float = Field(1.0, gt=0, description="held-out predictor error, relative to no correction, that stops reuse")
    residual_limit: float = Field(0.15, gt=0, description="probe residual that stops reuse where no calibration is required")
    require_calibration: bool = Field(True, description="the guarded policy reuses nothing before its template is calibrated")
    target_kl: float = Field(0.05, gt=0, description="quality target: 95 % quantile over turns of the KL to dense, nats")
    target_top1: float = Field(0.97, gt=0, le=1, description="quality target: mean top-1 agreement with dense")
    audit_rate: float = Field(0.01, ge=0, le=1, description="share of reuse turns that workers audit when idle")
    trial_rate: float = Field(0.25, ge=0, le=1, description="the same of dense turns that wait for a calibration or a return")
    calibration_audits: int = Field(24, ge=6, description="audits after which a template calibrates itself")
    max_cost_ratio: float = Field(1.0, gt=0, description="predicted reuse over predicted dense time that stops reuse")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    log_format: Literal["text", "json"] = Field(
        "text", description="json: one object a line, with call, tenant, session and turn"
    )


@dataclass(frozen=True)
class Settings:
    """origins: where each setting's value comes from: "flag", "environment", "file" or "default"."""

    config: Config
    origins: Mapping[str, str]


def read_settings(
    environment: Mapping[str, str], file: Path | None = None, flags: Mapping[str, object] | None = None
) -> Settings:
    """Put all sources together. Raises ValueError, a line for each setting that is wrong: its name, value, source and the fix."""
    refuse_unknown_environment(environment)
    path = file or (Path(environment[FILE_VARIABLE]) if FILE_VARIABLE in environment else None)
    sources: dict[str, Mapping[str, object]] = {
        "file": _read_file(path) if path is not None else {},
        "environment": {n: environment[_variable(n)] for n in Config.model_fields if _variable(n) in environment},
        "flag": flags or {},
    }
    for source in ("file", "flag"):
        _refuse_unknown(sources[source], Config.model_fields)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Config.model_fields, "default")
    for source, given in sources.items():
        values |= given
        origins |= dict.fromkeys(given, source)
    try:
        return Settings(Config(**values), origins)
    except ValidationError as error:
        raise ValueError("\n".join(_wrong(e, origins) for e in error.errors())) from error


def refuse_unknown_environment(environment: Mapping[str, str]) -> None:
    """Raises ValueError for a KVCACHE_ variable that no setting reads: a typo must not pass silently."""
    ours = (name for name in environment if name.startswith(PREFIX) and not name.startswith(CLIENT_PREFIX))
    _refuse_unknown(ours, [FILE_VARIABLE, *map(_variable, Config.model_fields)])


def _refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        lines = (f"unknown setting {name}; did you mean {_nearest(name, known)}?" for name in sorted(unknown))
        raise ValueError("\n".join(lines) + " `kvcache config show` lists all")


def _nearest(name: str, known: list[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0)[0]


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}; it must be TOML, a line `name = value` for each setting") from error


def _wrong(error: Any, origins: Mapping[str, str]) -> str:
    name = str(error["loc"][0])
    field = Config.model_fields[name]
    secret = field.annotation == SecretStr | None
    value = "" if secret else f" is {error['input']!r}"
    where = _variable(name) if origins[name] == "environment" else origins[name]
    return f"{name}{value} ({where}): {error['msg'][0].lower()}{error['msg'][1:]}; it means: {field.description}"


def refuse_exposure(config: Config) -> None:
    """Raises ValueError where strangers could read or write KV, or where settings of TLS do not fit together."""
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ValueError("tls_cert and tls_key belong together; set both or neither")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ValueError("tls_client_ca is set, but tls_cert is not; clients' certificates need TLS")
    exposed = [name for name in ("listen", "admin_listen") if not is_loopback(getattr(config, name))]
    if config.insecure or not exposed:
        return
    what = f"{exposed[0]} is {getattr(config, exposed[0])}, which other hosts reach,"
    if config.tls_cert is None:
        raise ValueError(f"{what} without TLS; set tls_cert and tls_key, listen on 127.0.0.1, or say {PREFIX}INSECURE=true")
    if config.tokens_file is None and config.tls_client_ca is None:
        raise ValueError(f"{what} and nobody is asked who he is; set tokens_file or tls_client_ca, or say {PREFIX}INSECURE=true")


def is_loopback(address: str) -> bool:
    """Only this machine reaches it. address: host:port, or a Unix socket's."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def memory_limit() -> int:
    """Bytes this process may use: the cgroup limit where one is set, else what is available now."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(int(text), available)
    return available


def host_budget(config: Config) -> int:
    """The host tier's bytes. Raises ValueError when the configured budget cannot fit."""
    limit = memory_limit()
    if config.host_bytes is None:
        return limit // 2
    if config.host_bytes > limit:
        raise ValueError(
            f"host_bytes is {config.host_bytes}, but only {limit} bytes of memory are free; lower {PREFIX}HOST_BYTES"
        )
    return config.host_bytes
