"""Every call passes here: who is it, may he do this, is it his turn. Handlers get the caller and trust it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

from kvcache_service.errors import Code, KVCacheError
from kvcache_service.rpc.callers import ANYONE, Caller, Tokens, from_certificate
from kvcache_service.rpc.errors import translated
from kvcache_service.rpc.limits import refuse_oversized
from kvcache_service.rpc.quotas import RequestRate
from kvcache_service.telemetry import Telemetry

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

audit = logging.getLogger("kvcache.audit")
CALIBRATE = "kvcache.v1.Quality.Calibrate"  # an admin's, as all that is called Admin
OPERATOR = frozenset({"kvcache.v1.Admin.Drain"})  # what concerns all tenants
BEGIN = frozenset({"kvcache.v1.KVCache.Attach", "kvcache.v1.Turns.OpenTurn"})  # what a service that drains does not start
LASTING = frozenset({"kvcache.v1.KVCache.Attach", "kvcache.v1.KVCache.Events"})  # no span of theirs would end
_BEARER = "Bearer "


class Door:
    """tokens: None where nobody needs one. certificates: clients show a verified one."""

    def __init__(self, tokens: Tokens | None, *, certificates: bool, rate: RequestRate, telemetry: Telemetry) -> None:
        self._tokens = tokens
        self._certificates = certificates
        self._rate = rate
        self._telemetry = telemetry
        self._draining = False

    def drain(self) -> None:
        """From now on nothing new begins; what has begun may go on to its end."""
        self._draining = True

    @property
    def guarded(self) -> bool:
        """Callers have to say who they are."""
        return self._tokens is not None or self._certificates

    def unary(self, method: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def admitted(request: Any, context: Context) -> Any:
            with self._span(method, context):
                caller = await self._admit(method, request, context)
                with self._counted(caller):
                    return await call(request, context, caller)

        return admitted

    def stream(self, method: str, call: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def admitted(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._span(method, context):
                caller = await self._admit(method, request, context)
                with self._counted(caller):
                    async for reply in call(request, context, caller):
                        yield reply

        return admitted

    @contextmanager
    def _counted(self, caller: Caller) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            self._telemetry.tenants.refused(caller.tenant)
            raise

    def _span(self, method: str, context: Context) -> AbstractContextManager[None]:
        return nullcontext() if method in LASTING else self._telemetry.tracing.call(method, context.invocation_metadata() or ())

    async def _admit(self, method: str, request: Any, context: Context) -> Caller:
        """Ends the call with UNAUTHENTICATED, PERMISSION, DRAINING, BUSY or INVALID where it may not go on."""
        async with translated(context, self._telemetry):
            name, caller = "unknown", None
            try:
                caller = self._identify(context)
                self._telemetry.tenants.call(caller.tenant)
                name = f"{caller.tenant}/{caller.name}"
                session_id, turn_id = _named(request, "session_id"), _named(request, "turn_id")
                self._telemetry.about(method=method, tenant=caller.tenant, session_id=session_id, turn_id=turn_id)
                if _for_admins(method) and not caller.admin:
                    raise KVCacheError(Code.PERMISSION, "only an admin may do this", fix="call with an admin's credentials")
                if method in OPERATOR and not caller.operator:
                    raise KVCacheError(Code.PERMISSION, "only an operator may do this", fix="call with an operator's credentials")
                if self._draining and method in BEGIN:
                    raise KVCacheError(
                        Code.DRAINING, "the service is being stopped", fix="prefill; its successor takes new sessions"
                    )
                self._rate.take(caller.tenant)
                if isinstance(request, Message):  # a stream's header is looked at when it comes
                    refuse_oversized(request)
            except KVCacheError as error:
                if caller is None:
                    self._telemetry.about(method=method)
                else:
                    self._telemetry.tenants.refused(caller.tenant)
                code = error.code.name.lower()
                audit.warning("%s %s from %s: refused, %s", name, method, context.peer(), code, extra={"code": code})
                raise
            if _for_admins(method):
                audit.info("%s %s from %s: admitted", name, method, context.peer())
        return caller

    def _identify(self, context: Context) -> Caller:
        if not self.guarded:
            return ANYONE
        secret = _bearer(context)
        if secret and self._tokens is not None:
            caller = self._tokens.find(secret)
        else:
            caller = (
                from_certificate(context.auth_context().get("x509_subject_alternative_name", ())) if self._certificates else None
            )
        if caller is None:
            raise KVCacheError(
                Code.UNAUTHENTICATED,
                "no token or certificate of a tenant, or one that is unknown or has expired",
                field="authorization",
                fix="send metadata `authorization: Bearer TOKEN`, or a certificate that names kvcache://tenant/NAME",
            )
        return caller


def _for_admins(method: str) -> bool:
    return method == CALIBRATE or method.startswith("kvcache.v1.Admin.")


def _named(request: Any, field: str) -> str:
    """What a request says of its turn or session; a stream says it in its header, later."""
    return str(getattr(request, field, ""))


def _bearer(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str) and value.startswith(_BEARER):
            return value.removeprefix(_BEARER)
    return ""
