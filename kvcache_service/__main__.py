"""Composition root: builds everything, passes it by argument, starts, drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import torch
from prometheus_client import start_http_server

from kvcache_service import logs
from kvcache_service.catalog.connection import Connection
from kvcache_service.catalog.embedded import EmbeddedServer
from kvcache_service.catalog.keys import Group, tenant_of
from kvcache_service.catalog.store import Catalog, Change, Limits
from kvcache_service.config import Config, host_budget, read_settings, refuse_exposure
from kvcache_service.engine.durable import Durable
from kvcache_service.engine.engine import Engine, EngineSettings
from kvcache_service.engine.events import EventSettings
from kvcache_service.engine.plan import Reason
from kvcache_service.engine.planning import PlanSettings
from kvcache_service.engine.quotas import Quotas
from kvcache_service.engine.trust import TrustSettings
from kvcache_service.errors import Code
from kvcache_service.kernels.backend import Backend
from kvcache_service.kernels.codec import Codec
from kvcache_service.kernels.cuda.backend import CudaBackend
from kvcache_service.kernels.cuda.runtime import CupyRuntime, Runtime
from kvcache_service.prompt import Policy
from kvcache_service.quality import Target
from kvcache_service.rpc import tls
from kvcache_service.rpc.callers import ANYONE, Tokens
from kvcache_service.rpc.door import Door
from kvcache_service.rpc.quotas import RequestRate
from kvcache_service.rpc.server import Server
from kvcache_service.telemetry import Telemetry
from kvcache_service.tiers.disk import DiskTier
from kvcache_service.tiers.host import HostTier
from kvcache_service.tiers.shared import SharedDirectory
from kvcache_service.tracing import Tracing, exported

log = logging.getLogger("kvcache")


def host_id() -> str:
    """Equal for processes of one machine; what a client must show to be offered shared memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextlib.contextmanager
def _catalog_url(config: Config) -> Iterator[str]:
    if config.redis_url is not None:
        yield config.redis_url.get_secret_value()
    else:
        with EmbeddedServer() as server:
            yield server.url


def build_backend(config: Config, open_device: Callable[[int], Runtime]) -> Backend:
    """What computes KV. Raises RuntimeError where the configured device does not answer."""
    if config.device == "cpu":
        return Backend()
    index = int(config.device.partition(":")[2] or 0)
    try:
        runtime = open_device(index)
    except RuntimeError as error:
        if config.device != "auto":
            raise
        log.info("computing on the CPU: %s", error)
        return Backend()
    return CudaBackend(runtime, f"cuda:{index}", config.device_bytes or runtime.free_bytes() * 4 // 5)


def build_engine(config: Config, url: str, telemetry: Telemetry, backend: Backend) -> Engine:
    """Everything below the RPC layer."""
    boot_id = secrets.token_hex(8)
    limits = Limits(bound=config.pool_anchors, window=config.prune_window)
    plan = PlanSettings(
        min_samples=config.min_samples,
        boundary=config.boundary,
        trailing=config.trailing,
        max_taint=config.max_taint,
        max_error=config.max_error,
        gamma=config.gamma,
        require_calibration=config.require_calibration,
    )
    trust = TrustSettings(
        target=Target(config.target_kl, config.target_top1),
        audit_rate=config.audit_rate,
        trial_rate=config.trial_rate,
        calibration_audits=config.calibration_audits,
        residual_limit=config.residual_limit,
    )
    settings = EngineSettings(
        plan=plan,
        session_bytes=config.session_bytes,
        max_prompt_tokens=config.max_prompt_tokens,
        lease_seconds=config.lease_seconds,
        max_cost_ratio=config.max_cost_ratio,
        coding=None if config.host_codec == "none" else Codec[config.host_codec.upper()],
        trust=trust,
        quotas=Quotas(config.quota_sessions, config.quota_turns, config.quota_templates, config.quota_models),
        events=EventSettings(config.event_log, config.quota_event_streams),
    )
    durable = Durable(DiskTier(config.disk_dir, config.disk_bytes) if config.disk_dir is not None else None)

    def catalog(on_change: Callable[[Sequence[Change]], None], on_epoch: Callable[[Group, str], None]) -> Catalog:
        return Catalog(
            Connection(url, config.redis_timeout),
            boot_id,
            limits,
            node=durable.node,
            on_change=on_change,
            on_epoch=on_epoch,
        )

    tier = HostTier(
        host_budget(config),
        owner=tenant_of,
        share=config.quota_host_bytes,
        idle_seconds=config.host_idle_seconds,
        touch=config.host_touch,
    )
    backend.pin(tier.memory)
    return Engine(
        settings,
        tier,
        catalog,
        SharedDirectory(config.shared_memory_dir, boot_id, backend),
        telemetry,
        boot_id=boot_id,
        backend=backend,
        durable=durable,
    )


def build_door(config: Config, telemetry: Telemetry) -> Door:
    """Who may call, and how often."""
    tokens = Tokens(config.tokens_file) if config.tokens_file is not None else None
    certificates = config.tls_client_ca is not None
    known = tokens.tenants if tokens is not None else () if certificates else (ANYONE.tenant,)
    telemetry.tenants.name(known)
    return Door(
        tokens,
        certificates=certificates,
        rate=RequestRate(config.quota_requests_per_second),
        telemetry=telemetry,
    )


def new_telemetry(tenants: int, tracing: Tracing | None = None) -> Telemetry:
    return Telemetry(
        reasons=[r.name.lower() for r in Reason if r is not Reason.NONE],
        policies=[p.value for p in Policy],
        codes=[c.name.lower() for c in Code],
        tenants=tenants,
        tracing=tracing,
    )


async def serve(config: Config, open_device: Callable[[int], Runtime]) -> None:
    """Run until SIGTERM or SIGINT, then drain. Prints one line with the addresses when ready."""
    refuse_exposure(config)
    with contextlib.ExitStack() as stack:
        telemetry = new_telemetry(config.metrics_tenants, stack.enter_context(exported(os.environ)))
        url = stack.enter_context(_catalog_url(config))
        engine = build_engine(config, url, telemetry, build_backend(config, open_device))
        stack.callback(engine.close)
        executor = stack.enter_context(ThreadPoolExecutor(config.threads, thread_name_prefix="engine"))
        settling = stack.enter_context(ThreadPoolExecutor(config.threads, thread_name_prefix="settle"))
        stop = asyncio.Event()
        server = Server(
            engine,
            telemetry,
            executor,
            settling,
            listen=config.listen,
            admin_listen=config.admin_listen,
            host_id=host_id(),
            shared_memory_dir=config.shared_memory_dir,
            door=build_door(config, telemetry),
            tls=tls.Files(config.tls_cert, config.tls_key, config.tls_client_ca) if config.tls_cert and config.tls_key else None,
            stop=stop.set,
        )
        metrics = stack.enter_context(_metrics(config, telemetry))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await server.start()
        print(
            f"kvcache ready grpc={server.address} admin={server.admin_address} metrics=http://{metrics} catalog={_masked(url)}",
            flush=True,
        )
        await stop.wait()
        log.info("draining: nothing new begins, open turns have %g seconds", config.drain_seconds)
        await server.drain(config.drain_seconds)


@contextlib.contextmanager
def _metrics(config: Config, telemetry: Telemetry) -> Iterator[str]:
    host, _, port = config.metrics_listen.rpartition(":")
    server: WSGIServer
    server, thread = start_http_server(int(port), host, telemetry.registry)
    try:
        yield f"{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _masked(url: str) -> str:
    """Without what may be secret: user and password, and the query, where sentinels' passwords stand."""
    address, _, _ = url.partition("?")
    return address.rpartition("@")[2]


def main(config: Config, open_device: Callable[[int], Runtime] = CupyRuntime) -> None:
    """open_device: gives the GPU of an index, or raises RuntimeError."""
    logs.configure(config.log_level, config.log_format, sys.stderr)
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # turns and layers are what runs side by side
    asyncio.run(serve(config, open_device))


if __name__ == "__main__":
    main(read_settings(os.environ).config)
