"""Command lines of ours that documents and containers hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer.main

from kvcache_service.cli import app


def commands_of_ours() -> dict[str, set[str]]:
    """Options of every command by its words."""
    root: Any = typer.main.get_command(app)
    found = dict(root.commands)
    while groups := [name for name, command in found.items() if hasattr(command, "commands")]:
        for name in groups:
            found |= {f"{name} {below}": command for below, command in found.pop(name).commands.items()}
    return {name: {option for parameter in command.params for option in parameter.opts} for name, command in found.items()}


def parse(words: Sequence[str]) -> None:
    """Take a line as the command would, every option checked, without running it. Raises what the command would raise."""
    command: Any = typer.main.get_command(app)
    name, *rest = words
    assert name == "kvcache"
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(command.name, rest)
