"""The policies that are compared, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kvcache_proto.v1 import kvcache_pb2 as pb

_NAME = re.compile(r"^(?P<name>[a-z]+)(:(?P<boundary>\d+)\+(?P<trailing>\d+))?$")


@dataclass(frozen=True)
class Policy:
    """policy: the service's. options: how a trial varies it; None: served as an ordinary turn, gates and all."""

    name: str
    policy: str
    options: pb.Trial | None


_KNOWN = {
    "off": Policy("off", "off", pb.Trial()),
    "paper": Policy("paper", "paper", pb.Trial()),
    # The reference code's frame and weights, on the same bases.
    "reference": Policy("reference", "paper", pb.Trial(blending=pb.Blending(absolute_frame=True, reference_weights=True))),
    "reposition": Policy("reposition", "reposition", pb.Trial(boundary=0, trailing=1)),
    "recompute": Policy("recompute", "reposition", pb.Trial()),
    "guarded": Policy("guarded", "guarded", None),
    "ungated": Policy("ungated", "guarded", pb.Trial()),
}
NAMES = tuple(_KNOWN)
SERVED = _KNOWN["guarded"]
REPOSITION = _KNOWN["reposition"]
UNGATED = _KNOWN["ungated"]


def parse(text: str) -> Policy:
    """NAME, or NAME:BOUNDARY+TRAILING for another number of recomputed tokens, then without gates.

    `guarded:0+1` corrects and recomputes nothing but the last prompt token. Raises ValueError with the known names.
    """
    match = _NAME.match(text)
    known = _KNOWN.get(match["name"]) if match else None
    if match is None or known is None:
        raise ValueError(f"policy {text!r}; use {', '.join(NAMES)}, or NAME:BOUNDARY+TRAILING")
    if match["boundary"] is None:
        return known
    options = pb.Trial(boundary=int(match["boundary"]), trailing=int(match["trailing"]))
    if known.options is not None and known.options.HasField("blending"):
        options.blending.CopyFrom(known.options.blending)
    return replace(known, name=text, options=options)
