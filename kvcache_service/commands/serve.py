"""`kvcache serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcache_service.commands import settings


def serve(
    file: settings.File = None,
    pairs: settings.Set = None,
    listen: Annotated[str | None, typer.Option(help="gRPC address, host:port; port 0 picks a free one.")] = None,
    admin_listen: Annotated[str | None, typer.Option(help="Address for admins, host:port.")] = None,
    metrics_listen: Annotated[str | None, typer.Option(help="Address of /metrics, host:port.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis or Valkey URL; without it an embedded Valkey runs.")] = None,
) -> None:
    """Run the service until SIGTERM. Flags win over KVCACHE_ variables, these over the file; `kvcache config show` tells.

    Example: kvcache serve --config kvcache.toml --set host_bytes=17179869184
    """
    from kvcache_service.__main__ import main

    config = settings.read(
        file, pairs, listen=listen, admin_listen=admin_listen, metrics_listen=metrics_listen, redis_url=redis_url
    ).config
    try:
        main(config)
    except (ValueError, RuntimeError, OSError) as error:  # settings that do not fit together, or an address that is taken
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
