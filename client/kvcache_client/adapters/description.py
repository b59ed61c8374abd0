"""What a transformers model is to the service: geometry, rotation and fingerprint."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from kvcache_proto.v1 import kvcache_pb2 as pb

_DTYPES = {torch.float32: pb.DTYPE_FLOAT32, torch.float16: pb.DTYPE_FLOAT16, torch.bfloat16: pb.DTYPE_BFLOAT16}
# Architectures whose attention is plain RoPE over K and V per head, with their pairing.
_PAIRINGS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "granite", "olmo", "olmo2"), pb.PAIRING_HALF_SPLIT),
    **dict.fromkeys(("cohere", "glm", "glm4"), pb.PAIRING_INTERLEAVED),
}
_DIGEST_ELEMENTS = 4096  # elements of each weight that enter the digest


class UnsupportedModel(ValueError):
    """The service cannot hold this model's KV; the message says why."""


def model_request(model: Any, tokenizer: Any) -> pb.RegisterModelRequest:
    """Geometry, rotation and fingerprint of a transformers model. Raises UnsupportedModel."""
    config = model.config
    kind = config.model_type
    if kind not in _PAIRINGS:
        raise UnsupportedModel(f"model type {kind!r}; supported: {', '.join(sorted(_PAIRINGS))}")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or getattr(config, "sliding_window", None):
        raise UnsupportedModel(f"{kind} with {', '.join(sorted(layer_types))}: only full attention is supported")
    if model.dtype not in _DTYPES:
        raise UnsupportedModel(f"dtype {model.dtype}; supported: float32, float16, bfloat16")
    rotary = model.get_decoder().rotary_emb
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    limit = config.max_position_embeddings
    if rotary.rope_type in ("dynamic", "longrope"):  # beyond the original window the table changes with the length
        limit = int(config.rope_parameters.get("original_max_position_embeddings", limit))
    return pb.RegisterModelRequest(
        name=str(config.name_or_path or kind),
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        dtype=_DTYPES[model.dtype],
        rope=pb.Rope(
            type=rotary.rope_type,
            inv_freq=rotary.inv_freq.double().tolist(),
            attention_scaling=float(rotary.attention_scaling),
            pairing=_PAIRINGS[kind],
            rotary_dim=2 * len(rotary.inv_freq),
        ),
        weights_digest=_weights_digest(model),
        tokenizer_digest=hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).digest(),
        vocab_size=config.vocab_size,
        max_positions=limit,
        tp_size=1,
        attention="full",
    )


def _weights_digest(model: Any) -> bytes:
    """SHA-256 over names, shapes and an even sample of every weight: tells checkpoints apart in a fraction of a second."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().flatten()
        picked = flat[:: max(1, len(flat) // _DIGEST_ELEMENTS)].float().cpu().contiguous()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(picked.numpy().tobytes())
    return digest.digest()
