"""Value types of a model: KV geometry, dtype and RoPE. No tensor work here."""

from __future__ import annotations

import enum
import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcache_service.errors import Code, KVCacheError, invalid

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_SCHEME = b"kvcache.model.1"


class Pairing(enum.Enum):
    """Which dimensions turn together."""

    HALF_SPLIT = "half_split"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True)
class Rope:
    """The model's own rotation.

    inv_freq: radians per position, one per rotated pair, exact as the model uses them (scaling included).
    attention_scaling: factor on cos and sin (YaRN); rotary_dim: leading dimensions of a head that rotate.
    """

    type: str
    inv_freq: tuple[float, ...]
    attention_scaling: float
    pairing: Pairing
    rotary_dim: int


@dataclass(frozen=True)
class Geometry:
    """What must agree before KV of one worker may be used by another."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    rope: Rope
    weights_digest: bytes
    tokenizer_digest: bytes
    vocab_size: int
    max_positions: int
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "vocab_size", "max_positions", "tp_size"):
            if getattr(self, field) <= 0:
                raise invalid(field, f"{field} is {getattr(self, field)}", "send a positive number")
        if self.tp_rank >= self.tp_size:
            raise invalid("tp_rank", f"rank {self.tp_rank} of {self.tp_size}", "send a rank below tp_size")
        rope = self.rope
        if rope.type not in ROPE_TYPES:
            raise KVCacheError(
                Code.UNSUPPORTED_ROPE,
                f"RoPE type {rope.type!r} is not supported",
                field="rope.type",
                fix=f"use a model with one of {', '.join(ROPE_TYPES)}, or prefill without the cache",
            )
        if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= self.head_dim:
            raise invalid("rope.rotary_dim", f"{rope.rotary_dim} of {self.head_dim}", "send an even number within head_dim")
        if len(rope.inv_freq) != rope.rotary_dim // 2:
            raise invalid(
                "rope.inv_freq", f"{len(rope.inv_freq)} frequencies", f"send rotary_dim / 2 = {rope.rotary_dim // 2} values"
            )
        if not all(math.isfinite(f) and f >= 0 for f in rope.inv_freq):
            raise invalid("rope.inv_freq", "not finite and non-negative", "send the model's own table")
        if not (math.isfinite(rope.attention_scaling) and rope.attention_scaling > 0):
            raise invalid("rope.attention_scaling", f"{rope.attention_scaling}", "send a positive number")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """[layers, 2 (K, V), tokens, kv_heads, head_dim]."""
        return (self.layers, 2, tokens, self.kv_heads, self.head_dim)

    @cached_property
    def model_id(self) -> str:
        """SHA-256 over canonical bytes; equal in every process for equal models."""
        digest = hashlib.sha256(_SCHEME)
        parts = [
            self.name.encode(),
            str(self.dtype).encode(),
            self.rope.type.encode(),
            self.rope.pairing.value.encode(),
            self.weights_digest,
            self.tokenizer_digest,
            struct.pack(f"<{len(self.rope.inv_freq)}d", *self.rope.inv_freq),
            struct.pack(
                "<d8q",
                self.rope.attention_scaling,
                self.rope.rotary_dim,
                self.layers,
                self.kv_heads,
                self.head_dim,
                self.vocab_size,
                self.max_positions,
                self.tp_rank,
                self.tp_size,
            ),
        ]
        for part in parts:
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
        return digest.hexdigest()
