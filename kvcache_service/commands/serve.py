"""`kvcache serve`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvcache_service.config import Config, refuse_unknown_environment


def serve(
    listen: Annotated[str | None, typer.Option(help="gRPC address, host:port; port 0 picks a free one.")] = None,
    metrics_listen: Annotated[str | None, typer.Option(help="Address of /metrics, host:port.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis or Valkey URL; without it an embedded Valkey runs.")] = None,
) -> None:
    """Run the service until SIGTERM. Every setting also comes from KVCACHE_ variables; flags win."""
    from kvcache_service.__main__ import main

    flags = {"listen": listen, "metrics_listen": metrics_listen, "redis_url": redis_url}
    try:
        refuse_unknown_environment(dict(os.environ))
        config = Config(**{k: v for k, v in flags.items() if v is not None})  # type: ignore[arg-type]
        main(config)
    except (ValueError, RuntimeError, OSError) as error:  # a bad setting, or an address that is taken
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
