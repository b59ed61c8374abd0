"""A service without a model: geometries that are only announced, and KV of noise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvcache_client import KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb
from torch import Tensor

from kvcache_service.prompt import CHUNK as CHUNK

VOCABULARY = 1 << 20
KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 8 * MIB, 64 * MIB)
# A host tier whose pages are there: what a machine takes to find memory would hide what a store takes.
SETTLED = {"host_bytes": str(4 << 30), "host_touch": "true"}


@dataclass(frozen=True)
class Shape:
    """KV of one token, bfloat16: [layers, 2, heads, dim]."""

    layers: int
    heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.dim * 2


USUAL = Shape(16, 4, 128)
TOKEN_BYTES = USUAL.token_bytes  # 32 KiB


def model(shape: Shape = USUAL) -> pb.RegisterModelRequest:
    rope = pb.Rope(
        type="default",
        inv_freq=[10000.0 ** (-i / (shape.dim // 2)) for i in range(shape.dim // 2)],
        attention_scaling=1.0,
        pairing=pb.PAIRING_HALF_SPLIT,
        rotary_dim=shape.dim,
    )
    return pb.RegisterModelRequest(
        name="noise",
        layers=shape.layers,
        kv_heads=shape.heads,
        head_dim=shape.dim,
        dtype=pb.DTYPE_BFLOAT16,
        rope=rope,
        weights_digest=bytes(32),
        tokenizer_digest=bytes(32),
        vocab_size=VOCABULARY,
        max_positions=1 << 17,
        tp_size=1,
        attention="full",
    )


def noise(tokens: int, shape: Shape = USUAL, seed: int = 0) -> Tensor:
    """KV of a prompt, bfloat16 [layers, 2, tokens, heads, dim]. Layer 0 is zero, as it must be the same for equal tokens."""
    draw = torch.Generator().manual_seed(seed)
    kv = torch.randn(shape.layers, 2, tokens, shape.heads, shape.dim, generator=draw).bfloat16()
    kv[0] = 0
    return kv


def memory(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data.cast("B")


def named(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


class Prompts:
    """Prompts that share no token with any other, so that nothing is stored for them before."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def take(self, tokens: int) -> list[int]:
        number = next(self._next)
        return [(number * 7919 + i * 13) % VOCABULARY for i in range(tokens)]


def stored_prefix(client: KVCacheClient, token_ids: Sequence[int], kv: Tensor) -> str:
    """Puts a prefix and registers a template that begins with it and ends in placeholder `rest`; returns the template id."""
    model_id = client.register_model(model())
    client.put(model_id, token_ids, memory(kv))
    return _template(client, model_id, [pb.Segment(fixed=pb.TokenIds(ids=token_ids)), pb.Segment(placeholder="rest")])


def plain_template(client: KVCacheClient, shape: Shape = USUAL) -> str:
    """A template that is all placeholder: an ordinary prompt, for the policy `exact`."""
    model_id = client.register_model(model(shape))
    return _template(client, model_id, [pb.Segment(placeholder="prompt")], pb.POLICY_EXACT)


def reader(client: KVCacheClient, role: str, placeholders: int, shape: Shape) -> str:
    """A template with a role prompt of its own and placeholders p0, p1 …"""
    model_id = client.register_model(model(shape))
    role_ids = pb.TokenIds(ids=[ord(c) for c in role])
    return _template(
        client, model_id, [pb.Segment(fixed=role_ids), *(pb.Segment(placeholder=f"p{n}") for n in range(placeholders))]
    )


def _template(client: KVCacheClient, model_id: str, segments: Sequence[pb.Segment], policy: pb.Policy = pb.POLICY_GUARDED) -> str:
    request = pb.RegisterTemplateRequest(model_id=model_id, segments=segments, decision=pb.DECISION_REUSE, policy=policy)
    return client.register_template(request).template_id
