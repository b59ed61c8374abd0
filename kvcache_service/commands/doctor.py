"""`kvcache doctor`."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from kvcache_service.commands import common
from kvcache_service.config import PREFIX, Config, host_budget, memory_limit, read_settings, refuse_exposure


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. fix: what to do; "" where all is well."""

    name: str
    found: str
    fix: str = ""


def doctor(json_output: common.Json = False) -> None:
    """Say what this machine has for the service as it is configured, and how to mend what is off. Exit status 1: something is."""
    findings = list(examine(dict(os.environ)))
    if json_output:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(f"{'off' if finding.fix else 'ok ':<4}{finding.name:<16}{finding.found}")
            if finding.fix:
                typer.echo(f"{'':<20}fix: {finding.fix}")
    if any(finding.fix for finding in findings):
        raise typer.Exit(1)


def examine(environment: dict[str, str]) -> Iterator[Finding]:
    """All findings; what depends on a setting is left out where the settings are off."""
    yield Finding("python", platform.python_version())
    yield _torch()
    try:
        config = read_settings(environment).config
        refuse_exposure(config)
    except ValueError as error:
        yield Finding("settings", str(error), f"correct the {PREFIX} variables")
        return
    yield Finding("settings", "understood")
    yield _device(config)
    yield _host_memory(config)
    yield _shared_memory(config)
    yield _redis(config)
    if config.disk_dir is not None:
        yield _disk(config.disk_dir, config.disk_bytes)


def _torch() -> Finding:
    try:
        return Finding("torch", version("torch"))
    except PackageNotFoundError:
        return Finding("torch", "not installed", "pip install 'kvcache-service[service]'")


def _device(config: Config) -> Finding:
    from kvcache_service.__main__ import build_backend
    from kvcache_service.kernels.cuda.runtime import CupyRuntime

    try:
        backend = build_backend(config, CupyRuntime)
    except RuntimeError as error:
        return Finding("device", str(error), f"mend that, or set {PREFIX}DEVICE=cpu")
    return Finding("device", f"{config.device}: computes on {backend.device}")


def _host_memory(config: Config) -> Finding:
    try:
        return Finding("host memory", f"{host_budget(config):,} bytes of {memory_limit():,}")
    except ValueError as error:
        return Finding("host memory", str(error), f"lower {PREFIX}HOST_BYTES, or unset it")


def _shared_memory(config: Config) -> Finding:
    directory = config.shared_memory_dir
    if not _writable(directory):
        return Finding("shared memory", f"{directory} is not a writable directory", f"mount it, or set {PREFIX}SHARED_MEMORY_DIR")
    free = shutil.disk_usage(directory).free
    found = f"{free:,} bytes free in {directory}"
    if free < config.session_bytes:
        return Finding("shared memory", found, f"enlarge {directory}, or set {PREFIX}SESSION_BYTES below {free}")
    return Finding("shared memory", found)


def _redis(config: Config) -> Finding:
    import redis

    if config.redis_url is None:
        return Finding("metadata store", "embedded Valkey")
    timeout = config.redis_timeout
    try:
        with redis.Redis.from_url(
            config.redis_url.get_secret_value(), socket_timeout=timeout, socket_connect_timeout=timeout
        ) as store:
            return Finding("metadata store", f"answers, version {store.info('server')['redis_version']}")
    except (redis.RedisError, ValueError) as error:
        return Finding("metadata store", f"no answer: {error}", f"start it, or correct {PREFIX}REDIS_URL")


def _disk(directory: Path, budget: int) -> Finding:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not _writable(existing):
        return Finding("disk", f"{existing} is not a writable directory", f"make it one, or set {PREFIX}DISK_DIR")
    used = sum(_size(path) for path in directory.rglob("*"))
    room = shutil.disk_usage(existing).free + used
    if room < budget:
        return Finding("disk", f"{room:,} bytes for a budget of {budget:,}", f"set {PREFIX}DISK_BYTES below {room}")
    return Finding("disk", f"{room:,} bytes in {directory}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a running service evicts
        return 0


def _writable(directory: Path) -> bool:
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)
