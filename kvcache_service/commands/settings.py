"""Settings on the command line: what `kvcache serve` and `kvcache config` share, and `kvcache config` itself."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr

from kvcache_service.commands import common
from kvcache_service.config import Config, Settings, read_settings

File = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file of settings, a line `name = value` each; or the variable KVCACHE_CONFIG."),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting; again for more. Wins over all else.")
]

config = typer.Typer(help="Settings of the service.", no_args_is_help=True)


def read(file: Path | None, pairs: Sequence[str] | None, **flags: str | None) -> Settings:
    """Settings of this process. Says what is wrong and ends with 2 where something is."""
    named: dict[str, object] = {}
    for pair in pairs or ():
        name, found, value = pair.partition("=")
        if not found:
            raise typer.BadParameter(f"{pair!r} is no NAME=VALUE", param_hint="--set")
        named[name] = value
    try:
        return read_settings(os.environ, file, named | {name: value for name, value in flags.items() if value is not None})
    except ValueError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(2) from error


@config.command()
def show(
    file: File = None,
    pairs: Set = None,
    json_output: common.Json = False,
) -> None:
    """All settings as the service would have them here, and where each comes from. Secrets are masked.

    Example: kvcache config show --config kvcache.toml
    """
    settings = read(file, pairs)
    values = {name: _shown(getattr(settings.config, name)) for name in Config.model_fields}
    if json_output:
        typer.echo(json.dumps({n: {"value": v, "from": settings.origins[n]} for n, v in values.items()}, indent=2))
        return
    for name, value in values.items():
        origin = settings.origins[name]
        typer.echo(f"{name:<26}{'' if value is None else value!s:<24} {'' if origin == 'default' else origin}".rstrip())


@config.command()
def schema() -> None:
    """The settings as a JSON schema, for editors and pipelines.

    Example: kvcache config schema > kvcache.schema.json
    """
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


def _shown(value: object) -> object:
    if isinstance(value, SecretStr):
        return str(value)
    return str(value) if isinstance(value, Path) else value
