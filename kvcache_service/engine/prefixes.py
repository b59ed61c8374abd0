"""Exact KV of prompt prefixes that workers put: checked, stored once, never overwritten."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from kvcache_service.catalog.keys import Group
from kvcache_service.engine import assembly
from kvcache_service.engine.memory import LAYER_ZERO_TOLERANCE, Memory
from kvcache_service.errors import Code, KVCacheError, invalid
from kvcache_service.geometry import Geometry
from kvcache_service.kernels import cpu
from kvcache_service.kernels.backend import Backend
from kvcache_service.prompt import check_tokens, tokens_key
from kvcache_service.tiers.host import Pin


class Prefixes:
    """Thread-safe. lock: the engine's, which guards `memory`."""

    def __init__(self, memory: Memory, lock: threading.RLock, backend: Backend) -> None:
        self._backend = backend
        self._memory = memory
        self._lock = lock

    def check(self, geometry: Geometry, tokens: int, shape: tuple[int, ...], longest: int) -> None:
        """Refuse a Put before its bytes are taken in. longest: tokens. Raises INVALID or QUOTA."""
        if shape != geometry.shape(tokens):
            raise invalid("shape", f"{list(shape)}", f"send {list(geometry.shape(tokens))}")
        if tokens > longest:
            raise invalid("token_ids", f"{tokens} tokens", f"at most {longest}")
        if tokens * geometry.token_bytes > self._memory.tier.budget:
            raise KVCacheError(Code.QUOTA, f"{tokens * geometry.token_bytes} bytes", field="shape", fix="raise host_bytes")

    def put(
        self, tenant: str, geometry: Geometry, rotations: cpu.Rotations, token_ids: tuple[int, ...], kv: Tensor, pin: Pin | None
    ) -> tuple[str, bool]:
        """Store exact KV of a prompt prefix. Returns its key and whether the same bytes were there already.

        kv: [layers, 2, tokens, kv_heads, head_dim] at positions 0 … tokens − 1. Other bytes under the key: CONFLICT.
        pin: None leaves a stored prefix pinned as it is.
        """
        if not token_ids:
            raise invalid("token_ids", "no tokens", "send at least one")
        check_tokens(token_ids, geometry.vocab_size, "token_ids")
        if tuple(kv.shape) != geometry.shape(len(token_ids)):
            raise invalid("shape", f"{list(kv.shape)}", f"send {list(geometry.shape(len(token_ids)))}")
        if kv.dtype != geometry.dtype:
            raise invalid("dtype", f"{kv.dtype}", f"send {geometry.dtype}")
        refuse_non_finite(kv)
        tier = self._memory.tier
        (canonical,) = assembly.take_out(self._backend, tier, kv, 0, [(0, len(token_ids))], geometry, rotations)
        key = self._memory.exact_key(Group(tenant, geometry.model_id), tokens_key(token_ids), 0)
        self._memory.promote([key])
        with self._lock:
            zero = self._memory.layer_zero(tenant, geometry)
            stored = tier.get(key)
            if stored is not None:
                if torch.equal(stored, canonical):
                    if pin is not None:
                        tier.pin(key, pin)
                    return key, True
                raise KVCacheError(Code.CONFLICT, "other KV is stored here", field="token_ids", fix="use what is stored")
            if zero.error(token_ids, canonical) > LAYER_ZERO_TOLERANCE:
                raise invalid("data", "layer 0 belongs to other tokens", "send the KV of exactly these tokens from position 0 on")
            self._memory.keep(key, canonical, pin or Pin.NONE)
            zero.learn(token_ids, canonical)
        return key, False


def refuse_non_finite(kv: Tensor) -> None:
    """Raises INVALID for NaN or Inf."""
    if not cpu.finite(kv):
        raise invalid("data", "the KV holds NaN or Inf", "send finite values")
