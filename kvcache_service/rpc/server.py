"""Assemble the gRPC server: servicers, standard health with real checks, reflection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

import grpc
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kvcache_proto.v1 import kvcache_pb2 as pb

from kvcache_service.engine.engine import Engine
from kvcache_service.rpc import methods
from kvcache_service.rpc.admin import AdminServicer
from kvcache_service.rpc.door import Door
from kvcache_service.rpc.servicers import KVCacheServicer, QualityServicer, TurnsServicer
from kvcache_service.rpc.tls import Files, server_credentials
from kvcache_service.telemetry import Telemetry

_MESSAGE_BYTES = 4 << 20  # a frame, or the token ids of a long prompt
_HOUSEKEEPING_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.05
_LAST_CALLS_SECONDS = 1.0  # for replies on their way when the last turn has ended
Result = TypeVar("Result")
SERVICES = ("kvcache.v1.KVCache", "kvcache.v1.Turns", "kvcache.v1.Quality")


class Server:
    """The service on its socket. Health per service name: "" is the process, kvcache.v1.* need the metadata store."""

    def __init__(
        self,
        engine: Engine,
        telemetry: Telemetry,
        executor: Executor,
        settling: Executor,
        *,
        listen: str,
        admin_listen: str,
        host_id: str,
        shared_memory_dir: Path,
        door: Door,
        tls: Files | None,
        stop: Callable[[], None],
    ) -> None:
        """stop: asks for the end of the process, which is to call drain()."""
        self._engine = engine
        self._executor = executor
        self._door = door
        options = [
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            # A worker that vanished without closing its connection loses its session within this time.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        self._server = grpc.aio.server(options=options)
        self._kvcache = KVCacheServicer(engine, telemetry, executor, host_id=host_id, shared_memory_dir=shared_memory_dir)
        servicers = {
            "KVCache": self._kvcache,
            "Turns": TurnsServicer(engine, telemetry, executor, settling),
            "Quality": QualityServicer(engine, telemetry, executor),
        }
        services = pb.DESCRIPTOR.services_by_name
        self._server.add_generic_rpc_handlers([methods.handler(services[name], servicers[name], door) for name in servicers])
        self._admin = grpc.aio.server(options=options)
        admin = AdminServicer(engine, telemetry, executor, stop)
        self._admin.add_generic_rpc_handlers([methods.handler(services["Admin"], admin, door)])
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if not door.guarded:  # strangers need not know what there is
            names = [services[name].full_name for name in servicers]
            reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
            reflection.enable_server_reflection([services["Admin"].full_name, reflection.SERVICE_NAME], self._admin)
        self.address, self.admin_address = _bind(self._server, listen, tls), _bind(self._admin, admin_listen, tls)
        self._housekeeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._server.start()
        await self._admin.start()
        await self._check()
        self._housekeeper = asyncio.create_task(self._keep_house())

    async def drain(self, grace: float) -> None:
        """Report NOT_SERVING, begin nothing new, give open turns `grace` seconds to be settled, end the sessions, stop."""
        await self._health.enter_graceful_shutdown()
        self._door.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._engine.open_turns:
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if self._housekeeper is not None:
            self._housekeeper.cancel()
        self._kvcache.end_sessions()
        await asyncio.gather(self._server.stop(_LAST_CALLS_SECONDS), self._admin.stop(_LAST_CALLS_SECONDS))

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            await self._run(self._engine.sweep)
            await self._check()

    async def _check(self) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        up = await self._run(self._engine.check_catalog)
        await self._health.set("", serving)
        for name in SERVICES:
            await self._health.set(name, serving if up else health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _run(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


def _bind(server: grpc.aio.Server, address: str, tls: Files | None) -> str:
    """Where it listens. A Unix socket is for the service's user and group. Raises OSError where another process serves it."""
    is_socket = address.startswith("unix:")
    if is_socket:
        _refuse_served(address.removeprefix("unix:"))
    before = os.umask(0o117)
    try:
        port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, server_credentials(tls))
    finally:
        os.umask(before)
    return address if is_socket else f"{address.rpartition(':')[0]}:{port}"


def _refuse_served(path: str) -> None:
    """gRPC takes the place of whatever socket lies there, also of a living one."""
    with socket.socket(socket.AF_UNIX) as other:
        try:
            other.connect(path)
        except OSError:
            return
    raise OSError(f"another process serves unix:{path}; end it, or listen elsewhere")
