"""Value types of a prompt: templates, segments, samples and their content keys."""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvcache_service.errors import Code, KVCacheError, invalid

_TOKENS = b"kvcache.tokens.1"
_TEMPLATE = b"kvcache.template.1"
CHUNK = 64  # tokens that the exact policy stores and finds as one


class Policy(enum.Enum):
    """How a turn may reuse KV."""

    OFF = "off"
    PAPER = "paper"
    GUARDED = "guarded"
    REPOSITION = "reposition"
    EXACT = "exact"


class Role(enum.Enum):
    """Role policy of a template: judges and critics that compare candidates declare DENSE."""

    REUSE = "reuse"
    DENSE = "dense"


@dataclass(frozen=True)
class Fixed:
    """Text that never changes inside a template."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Placeholder:
    """A named slot filled by a sample."""

    name: str


@dataclass(frozen=True)
class Template:
    """An agent's prompt layout p0, φ1, p1, φ2, … with its policies."""

    model_id: str
    segments: tuple[Fixed | Placeholder, ...]
    role: Role
    policy: Policy
    produces: str

    def __post_init__(self) -> None:
        if not self.segments:
            raise invalid("segments", "the template is empty", "send at least one segment")
        for ordinal, segment in enumerate(self.segments):
            if isinstance(segment, Fixed) and not segment.token_ids:
                raise invalid(f"segments[{ordinal}].fixed", "no tokens", "leave empty fixed segments out")
            if isinstance(segment, Placeholder) and not segment.name:
                raise invalid(f"segments[{ordinal}].placeholder", "no name", "name the placeholder")

    @property
    def template_id(self) -> str:
        """SHA-256 over canonical bytes: an edited template is another template."""
        digest = hashlib.sha256(_TEMPLATE)
        head = (self.model_id, self.role.value, self.policy.value, self.produces)
        parts = [text.encode() for text in head]
        for segment in self.segments:
            parts.append(b"F" + pack(segment.token_ids) if isinstance(segment, Fixed) else b"P" + segment.name.encode())
        for part in parts:
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
        return digest.hexdigest()

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset(s.name for s in self.segments if isinstance(s, Placeholder))


@dataclass(frozen=True)
class Span:
    """One segment laid into one prompt: tokens [start, end)."""

    ordinal: int
    start: int
    token_ids: tuple[int, ...]
    placeholder: str  # "" for a fixed segment

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def pack(token_ids: Sequence[int]) -> bytes:
    """Canonical bytes of a token run: little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def tokens_key(token_ids: Sequence[int]) -> str:
    """Content key of a token run; also of a context (all tokens up to a position)."""
    return hashlib.sha256(_TOKENS + pack(token_ids)).hexdigest()


def check_tokens(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raises INVALID when an id lies outside the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        raise invalid(field, f"token id {max(token_ids)}", f"send ids below the vocabulary size {vocab_size}")


def lay_out(template: Template, samples: Mapping[str, tuple[int, ...]]) -> tuple[Span, ...]:
    """Put the samples into the template.

    Raises TEMPLATE_MISMATCH when a placeholder has no sample or a sample no placeholder.
    An empty sample gives an empty span.
    """
    unknown, absent = samples.keys() - template.placeholders, template.placeholders - samples.keys()
    if unknown or absent:
        raise KVCacheError(
            Code.TEMPLATE_MISMATCH,
            f"samples do not fit the template: missing {sorted(absent)}, unknown {sorted(unknown)}",
            field="samples",
            fix=f"send exactly {sorted(template.placeholders)}",
        )
    runs = [s.token_ids if isinstance(s, Fixed) else samples[s.name] for s in template.segments]
    starts = accumulate((len(run) for run in runs), initial=0)
    return tuple(
        Span(ordinal, start, run, segment.name if isinstance(segment, Placeholder) else "")
        for ordinal, (segment, run, start) in enumerate(zip(template.segments, runs, starts, strict=False))
    )


def chunked(token_ids: Sequence[int]) -> tuple[Span, ...]:
    """A prompt as the exact policy sees it: whole chunks and a rest, whatever template it came from."""
    return tuple(
        Span(ordinal, start, tuple(token_ids[start : start + CHUNK]), "prompt")
        for ordinal, start in enumerate(range(0, len(token_ids), CHUNK))
    )


def context_keys(spans: Sequence[Span]) -> list[str]:
    """For every span the key of all tokens up to its end; one pass over the prompt."""
    digest = hashlib.sha256(_TOKENS)
    keys = []
    for span in spans:
        digest.update(pack(span.token_ids))
        keys.append(digest.hexdigest())
    return keys
