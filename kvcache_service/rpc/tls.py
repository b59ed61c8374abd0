"""Server certificates, read again when their files change: renewal needs no restart."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import grpc

log = logging.getLogger(__name__)


class Files(NamedTuple):
    """PEM files. client_ca: who must have signed a client's certificate; None: clients need none."""

    certificate: Path
    key: Path
    client_ca: Path | None


def server_credentials(files: Files) -> grpc.ServerCredentials:
    """Raises ValueError when a file cannot be read. Certificates that are renewed serve the next connection."""
    known = _read(files)

    def renewed() -> Any:  # None: as before, which the stubs do not know
        nonlocal known
        try:
            found = _read(files)
        except ValueError as error:
            log.error("certificates stay as they were: %s", error)
            return None
        if found == known:
            return None
        known = found
        log.info("certificates read again")
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(known), renewed, require_client_authentication=files.client_ca is not None
    )


def _read(files: Files) -> tuple[bytes, bytes, bytes | None]:
    names = zip(("tls_cert", "tls_key", "tls_client_ca"), files, strict=True)
    certificate, key, client_ca = (_bytes(setting, path) if path else None for setting, path in names)
    assert certificate is not None
    assert key is not None
    return certificate, key, client_ca


def _bytes(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{setting} {path}: {error.strerror}; name a PEM file that the service may read") from error


def _configuration(read: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
    certificate, key, client_ca = read
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)
