"""Who calls: bearer tokens, hashed at rest, and client certificates. The tenant comes from here, never from a request."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

log = logging.getLogger(__name__)

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
_URI = "kvcache://"  # of the subject alternative name that says what a certificate stands for: kvcache://tenant/NAME


@dataclass(frozen=True)
class Caller:
    """name: for the audit log. admin: may change what is trusted, not only use it; operator: also what concerns all tenants."""

    name: str
    tenant: str
    admin: bool
    operator: bool


ANYONE = Caller("anyone", "default", True, True)  # on a service that asks nobody who he is


class Entry(BaseModel):
    """One [[token]] of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=NAME)
    tenant: str = Field(pattern=NAME)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    admin: bool = False
    operator: bool = False  # an admin too
    expires: AwareDatetime | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token: list[Entry]


class Tokens:
    """The tokens of a TOML file, read again when the file changes: rotation needs no restart.

    A changed file that cannot be read leaves the known tokens as they are and is logged: a slip must not lock everybody out.
    now: the time of day. Raises ValueError when the file is bad at the start.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self._entries = _read(path)

    @property
    def tenants(self) -> frozenset[str]:
        return frozenset(entry.tenant for entry in self._entries)

    def find(self, secret: str) -> Caller | None:
        """The caller that a token stands for; None when it is unknown or has expired. Takes the same time for any unknown one."""
        self._refresh()
        digest = digest_of(secret)
        found = None
        for entry in self._entries:
            if hmac.compare_digest(entry.sha256, digest):
                found = entry
        if found is None or (found.expires is not None and found.expires <= self._now()):
            return None
        return Caller(found.name, found.tenant, found.admin or found.operator, found.operator)

    def _refresh(self) -> None:
        stamp = _stamp(self._path)
        with self._lock:
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self._entries = _read(self._path)
                log.info("read %d tokens", len(self._entries))
            except ValueError as error:
                log.error("tokens stay as they were: %s", error)


def new_token() -> str:
    """256 random bits: too many to guess, so that a plain hash keeps them."""
    return f"kvc_{secrets.token_urlsafe(32)}"


def digest_of(secret: str) -> str:
    """What the file holds of a token."""
    return hashlib.sha256(secret.encode()).hexdigest()


def from_certificate(names: Iterable[bytes]) -> Caller | None:
    """The caller that a verified client certificate stands for, by its subject alternative names.

    kvcache://tenant/NAME is a worker of that tenant, kvcache://admin/NAME its admin, kvcache://operator/NAME an operator.
    None: no name says so.
    """
    for raw in names:
        name = raw.decode(errors="replace")
        kind, _, tenant = name.removeprefix(_URI).partition("/")
        if name.startswith(_URI) and kind in ("tenant", "admin", "operator") and re.fullmatch(NAME, tenant):
            return Caller(name, tenant, kind != "tenant", kind == "operator")
    return None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[Entry, ...]:
    try:
        return tuple(_File.model_validate(tomllib.loads(path.read_text())).token)
    except OSError as error:
        raise ValueError(f"tokens_file {path}: {error.strerror}; name a file that the service may read") from error
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        where = error.errors()[0] if isinstance(error, ValidationError) else None
        what = f"{'.'.join(map(str, where['loc']))}: {where['msg']}" if where else str(error)
        raise ValueError(f"tokens_file {path}: {what}; write entries as `kvcache token new` prints them") from error
