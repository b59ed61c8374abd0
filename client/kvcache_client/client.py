"""Channel, session and registration. One client per worker process; thread-safe."""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
from kvcache_proto.v1 import kvcache_pb2 as pb
from kvcache_proto.v1 import kvcache_pb2_grpc
from kvcache_proto.v1.tensors import frames

from kvcache_client import tracing
from kvcache_client.buffers import Buffers
from kvcache_client.credentials import PLAIN, Credentials
from kvcache_client.errors import CacheError, from_rpc
from kvcache_client.stubs import KVCacheStub, TurnsStub
from kvcache_client.turn import Turn

PROTOCOL = 1
TRANSPORTS = ("auto", "shared_memory", "stream")
_ITEM_BYTES = {pb.DTYPE_FLOAT32: 4, pb.DTYPE_FLOAT16: 2, pb.DTYPE_BFLOAT16: 2}
_MESSAGE_BYTES = 4 << 20
_MAX_COOLDOWN = 2.0
_COMPILE_SECONDS = 120.0  # for a dtype that the service's machine meets for the first time

Reply = TypeVar("Reply")


@dataclass
class _Session:
    """What one Attach stream stands for."""

    session_id: str
    boot_id: str
    transport: pb.Transport
    alive: threading.Event
    end: Callable[[], None]


class KVCacheClient:
    """Speaks kvcache.v1 with one service.

    target: host:port, or a Unix socket as unix:PATH. credentials: for a service that asks for them. transport: "auto" takes
    shared memory on the service's own host, else the stream.
    timeout: seconds for any call but the registration of a model, for which a service on a fresh machine compiles. A lost
    service is tried again after a growing pause of at most two seconds, in which calls fail at once; models and templates are
    registered anew by the client itself.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: Credentials = PLAIN,
        transport: str = "auto",
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}; use one of {', '.join(TRANSPORTS)}")
        options = [
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = credentials.channel(target, options)
        self._kvcache = KVCacheStub(self._channel)
        self._turns = TurnsStub(self._channel)
        self._quality = kvcache_pb2_grpc.QualityStub(self._channel)
        self._transport = transport
        self._timeout = timeout
        self._clock = clock
        self._lock = threading.RLock()
        self._session: _Session | None = None
        self._not_before = 0.0
        self._cooldown = 0.0
        self._models: dict[str, pb.RegisterModelRequest] = {}
        self._templates: dict[str, pb.RegisterTemplateRequest] = {}
        self._buffers = Buffers()
        self.generation = 0  # grows with every session: what was Put into an earlier boot may be gone

    def connect(self) -> _Session:
        """Make sure that a session is attached. Raises CacheError; cheap when all is well."""
        with self._lock:
            if self._session is not None and self._session.alive.is_set():
                return self._session
            wait = self._not_before - self._clock()
            if wait > 0:
                raise CacheError("UNAVAILABLE", f"the service is lost; next attempt in {wait:.1f} s", fix="prefill", retry=True)
            try:
                self._session = self._attach()
                self._buffers.forget()
                for model in self._models.values():
                    self._register(model)
                for template in self._templates.values():
                    self._call(self._kvcache.RegisterTemplate, template)
            except CacheError as error:
                self.lost(error)
                raise
            self._cooldown = 0.0
            self.generation += 1
            return self._session

    @property
    def transport(self) -> str:
        """The transport in use; connects first."""
        return "shared_memory" if self.connect().transport == pb.TRANSPORT_SHARED_MEMORY else "stream"

    def register_model(self, request: pb.RegisterModelRequest) -> str:
        """Returns the model id, a content hash."""
        self.connect()
        model_id = self._register(request)
        self._models[model_id] = request
        return model_id

    def register_template(self, request: pb.RegisterTemplateRequest) -> pb.RegisterTemplateReply:
        """Returns the template id, a content hash, and the fixed segments that have no KV yet."""
        self.connect()
        reply: pb.RegisterTemplateReply = self._call(self._kvcache.RegisterTemplate, request)
        self._templates[reply.template_id] = request
        return reply

    def put(self, model_id: str, token_ids: Sequence[int], kv: memoryview, *, pin: str | None = None) -> bool:
        """Store the exact KV of a prompt prefix; kv holds [layers, 2, tokens, kv_heads, head_dim] bytes.

        pin: "none", "soft" (evicted last) or "hard" (never evicted); None leaves a stored prefix pinned as it is.
        Returns True when it was stored already.
        """
        self.connect()
        model = self._models[model_id]
        shape = (model.layers, 2, len(token_ids), model.kv_heads, model.head_dim)
        kept = f"PIN_{pin.upper()}" if pin else None
        header = pb.PutHeader(model_id=model_id, token_ids=token_ids, dtype=model.dtype, shape=shape, pin=kept)

        def requests() -> Iterator[pb.PutRequest | bytes]:
            yield pb.PutRequest(header=header)
            yield from frames(pb.PutRequest, kv, [(0, kv.nbytes)])

        try:
            with tracing.step("kvcache.put", call=True):
                existed: bool = self._call(self._kvcache.Put, requests()).existed
        except CacheError as error:
            if error.code != "CONFLICT":
                raise
            return True  # another worker's KV of the same tokens: as good as ours
        return existed

    def open_turn(
        self,
        template_id: str,
        samples: Mapping[str, Sequence[int]],
        *,
        reserve_tokens: int,
        policy: str | None = None,
        trial: pb.Trial | None = None,
        fetch: bool = False,
    ) -> Turn:
        """Ask what can be reused for this prompt; policy overrides the template's own. Raises CacheError.

        trial: a turn that measures and teaches nothing; leave it with settle(AUDITED) or release().
        fetch: bring it within the same call, where memory is shared; `Turn.fetch` then has nothing left to do.
        """
        session = self.connect()
        template = self._templates[template_id]
        model = self._models[template.model_id]
        request = pb.OpenTurnRequest(
            session_id=session.session_id,
            request_id=uuid.uuid4().hex,
            template_id=template_id,
            samples=[pb.Sample(placeholder=name, token_ids=ids) for name, ids in samples.items()],
            reserve_tokens=reserve_tokens,
            transport=session.transport,
            policy=f"POLICY_{policy.upper()}" if policy else None,
            trial=trial,
            fetch=fetch,
        )
        with tracing.step("kvcache.open", call=True):
            plan = self._call(self._turns.OpenTurn, request)
            tracing.note(turn_id=plan.turn_id, prompt_tokens=plan.prompt_tokens, claimable_prefix=plan.claimable_prefix)
        return Turn(
            self._turns,
            self._kvcache,
            plan,
            self._buffers,
            lost=self.lost,
            planes=model.layers * 2,
            row_bytes=model.kv_heads * model.head_dim * _ITEM_BYTES[model.dtype],
            reserve=reserve_tokens,
            dtype=model.dtype,
            timeout=self._timeout,
        )

    def calibrate(self, template_id: str, *, target_kl: float | None = None, target_top1: float | None = None) -> pb.Calibration:
        """Fit a template's thresholds to a target from its trials so far. Raises CacheError."""
        request = pb.CalibrateRequest(template_id=template_id, target_kl=target_kl, target_top1=target_top1)
        calibration: pb.Calibration = self._call(self._quality.Calibrate, request).calibration
        return calibration

    def status(self) -> pb.StatusReply:
        """Templates, slots and their quality. Raises CacheError."""
        reply: pb.StatusReply = self._call(self._quality.Status, pb.StatusRequest())
        return reply

    def events(self, cursor: str = "", *, snapshot: bool = True) -> Iterator[pb.EventBatch]:
        """What the tenant's KV in the service's host memory gains and loses, batch after batch, without end. Raises CacheError.

        cursor: of the last batch that was taken in. A batch that is `lost` comes after a gap: forget what is known; with
        snapshot, batches that tell all that is held follow. Closing the iterator, or letting it go, ends the stream.
        """
        call = self._kvcache.Events(pb.EventsRequest(cursor=cursor, snapshot=snapshot), metadata=tracing.metadata())
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        finally:
            call.cancel()

    def lost(self, error: CacheError) -> None:
        """The service did not answer: drop the session and pause, so that a hanging service costs one timeout, not many."""
        with self._lock:
            self._drop_session()
            self._cooldown = min(_MAX_COOLDOWN, self._cooldown * 2 or 0.1)
            self._not_before = self._clock() + self._cooldown

    def close(self) -> None:
        """End the session; the service frees all that it held."""
        with self._lock:
            self._drop_session()
            self._channel.close()

    def __enter__(self) -> KVCacheClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attach(self) -> _Session:
        hello: pb.HelloReply = self._call(
            self._kvcache.Hello, pb.HelloRequest(protocol_min=PROTOCOL, protocol_max=PROTOCOL, host_id=_host_id())
        )
        transport = self._choose(hello)
        finished = threading.Event()
        alive = threading.Event()
        first: queue.SimpleQueue[pb.SessionEvent | grpc.RpcError] = queue.SimpleQueue()

        def heartbeats() -> Iterator[pb.Heartbeat]:
            yield pb.Heartbeat()
            finished.wait()

        call = self._kvcache.Attach(heartbeats())

        def follow() -> None:
            try:
                for event in call:
                    alive.set()
                    first.put(event)
            except grpc.RpcError as error:
                first.put(error)
            finally:
                alive.clear()
                finished.set()

        threading.Thread(target=follow, name="kvcache-attach", daemon=True).start()
        try:
            event = first.get(timeout=self._timeout)
        except queue.Empty:
            call.cancel()
            raise CacheError("DEADLINE_EXCEEDED", "the service did not attach the session", fix="prefill", retry=True) from None
        if isinstance(event, grpc.RpcError):
            raise from_rpc(event)

        def end() -> None:
            finished.set()
            call.cancel()

        return _Session(event.session_id, event.boot_id, transport, alive, end)

    def _choose(self, hello: pb.HelloReply) -> pb.Transport:
        offered = pb.TRANSPORT_SHARED_MEMORY in hello.transports and _reachable(hello)
        if self._transport == "shared_memory" and not offered:
            raise CacheError("SHARED_MEMORY", "the service is on another host", fix="use transport='stream'")
        wanted = offered and self._transport != "stream"
        return pb.TRANSPORT_SHARED_MEMORY if wanted else pb.TRANSPORT_STREAM

    def _register(self, request: pb.RegisterModelRequest) -> str:
        reply: pb.RegisterModelReply = self._call(self._kvcache.RegisterModel, request, max(self._timeout, _COMPILE_SECONDS))
        return reply.model_id

    def _drop_session(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None

    def _call(self, rpc: Callable[..., Reply], request: object, timeout: float | None = None) -> Reply:
        try:
            return rpc(request, timeout=timeout or self._timeout, metadata=tracing.metadata())
        except grpc.RpcError as error:
            translated = from_rpc(error)
            if translated.code == "STALE_BOOT" and self._session is not None:
                self._session.alive.clear()
            elif translated.silent and self._session is not None:
                self.lost(translated)
            raise translated from error


def _reachable(hello: pb.HelloReply) -> bool:
    """Containers of one host may have shared memory of their own: only opening the service's file tells."""
    try:
        os.close(os.open(Path(hello.shared_memory_dir) / f"kvcache-{hello.boot_id}" / ".lock", os.O_RDWR))
    except OSError:
        return False
    return True


def _host_id() -> str:
    """Equal for processes of one machine; empty where it cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
