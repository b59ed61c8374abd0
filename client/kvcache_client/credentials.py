"""How a client proves who it is, and that it talks to the right service."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc


@dataclass(frozen=True)
class Credentials:
    """ca: PEM file of who signed the service's certificate; None: no TLS. certificate, key: PEM files of the client's own, for
    mTLS. token: sent with every call. plaintext: send a token unencrypted to another host too, where something else encrypts.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str = field(default="", repr=False)
    plaintext: bool = False

    def channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Raises ValueError for what does not fit together, OSError for files that cannot be read."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together; give both or neither")
        if self.ca is None:
            if self.certificate is not None:
                raise ValueError("a certificate needs TLS; give ca as well")
            if self.token and not (self.plaintext or is_loopback(target)):
                raise ValueError(f"the token would travel to {target} unencrypted; give ca, or plaintext where a mesh encrypts")
            channel = grpc.insecure_channel(target, options=options)
        else:
            own = (self.certificate.read_bytes(), self.key.read_bytes()) if self.certificate and self.key else (None, None)
            secure = grpc.ssl_channel_credentials(self.ca.read_bytes(), own[1], own[0])
            channel = grpc.secure_channel(target, secure, options=options)
        return grpc.intercept_channel(channel, _Bearer(self.token)) if self.token else channel


PLAIN = Credentials()


def is_loopback(target: str) -> bool:
    """A Unix socket or an address of this machine alone."""
    if target.startswith("unix:"):
        return True
    host = target.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Adds the token to every call."""

    def __init__(self, token: str) -> None:
        self._pair = ("authorization", f"Bearer {token}")

    def _with_token(self, details: Any) -> _Details:
        metadata = [*(details.metadata or ()), self._pair]
        rest = (getattr(details, name, None) for name in ("credentials", "wait_for_ready", "compression"))
        return _Details(details.method, details.timeout, metadata, *rest)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)
