"""What the Dockerfile says, without Docker: stages, environment, commands."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"


@dataclass(frozen=True)
class Stage:
    """One FROM … AS …, with what it inherits from stages before it."""

    environment: dict[str, str]
    user: str
    entrypoint: list[str]
    command: list[str]
    health: list[str]


_BARE = Stage({}, "0", [], [], [])


def stages() -> dict[str, Stage]:
    """name -> stage, for every stage of the file; lines that end in a backslash are one."""
    found: dict[str, Stage] = {}
    name, now = "", _BARE
    for line in DOCKERFILE.read_text().replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            now = found.get(base, _BARE)
        elif word == "ENV":
            now = replace(now, environment=now.environment | dict(re.findall(r"(\w+)=(\S+)", rest)))
        elif word == "USER":
            now = replace(now, user=rest)
        elif word == "ENTRYPOINT":
            now = replace(now, entrypoint=json.loads(rest))
        elif word == "CMD":
            now = replace(now, command=json.loads(rest))
        elif word == "HEALTHCHECK":
            now = replace(now, health=json.loads(rest.partition(" CMD ")[2]))
        if name:
            found[name] = now
    return found
