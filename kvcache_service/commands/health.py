"""`kvcache health`: what probes of containers call."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvcache_service.commands import common


def health(
    target: common.Target = "127.0.0.1:50051",
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    service: Annotated[str, typer.Option(help="Empty: the process; kvcache.v1.Turns: the metadata store answers as well.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer.")] = 3.0,
    json_output: common.Json = False,
) -> None:
    """Ask a service for its health by the standard gRPC protocol. Ends with 0 when it serves, 1 when not, 2 for bad options."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from kvcache_client import Credentials

    try:
        channel = Credentials(ca, certificate, key).channel(target, ())
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout).status
        except grpc.RpcError as error:
            typer.echo(f"error: {target}: {error.code().name}: {error.details()}", err=True)
            raise typer.Exit(1) from error
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    typer.echo(json.dumps({"status": name}) if json_output else name)
    if status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(1)
