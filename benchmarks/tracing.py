"""What spans cost a turn: two services side by side, whose smallest turns alternate. Of the first one nobody makes spans.

python benchmarks/tracing.py            the second one exports to a receiver of this process
python benchmarks/tracing.py FOLDER     the second one is the service of another checkout, say of the commit before spans
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir, contextmanager

import grpc
from kvcache_client import KVCacheClient
from kvcache_proto.v1 import kvcache_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from kvcache_service.bench import scene
from kvcache_service.evaluation.service import ServiceProcess

TURNS, WARM = 3000, 300
SHAPE = scene.Shape(2, 1, 32)


class Receiver(otlp_grpc.TraceServiceServicer):
    """Takes spans and drops them."""

    def Export(self, request: otlp.ExportTraceServiceRequest, context: object) -> otlp.ExportTraceServiceResponse:
        return otlp.ExportTraceServiceResponse()


@contextmanager
def receiving() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    otlp_grpc.add_TraceServiceServicer_to_server(Receiver(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(None).wait()


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """For what is started within."""
    before = dict(os.environ)
    os.environ.update(variables)
    yield
    os.environ.clear()
    os.environ.update(before)


def turn(client: KVCacheClient, template: str) -> float:
    """Seconds of one turn that computes and learns nothing: open with fetch, settle."""
    begun = time.perf_counter()
    opened = client.open_turn(template, {"prompt": [1, 2, 3]}, reserve_tokens=0, fetch=True)
    opened.fetch()
    opened.settle(pb.VERDICT_ABORTED)
    return time.perf_counter() - begun


def main(folder: str | None) -> None:
    with ExitStack() as stack:
        other = (
            {"PYTHONPATH": os.pathsep.join(f"{folder}{part}" for part in ("", "/client", "/proto"))}
            if folder
            else {"OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(receiving())}
        )
        services = [stack.enter_context(ServiceProcess(host_bytes=str(256 << 20)))]
        with environment(**other), chdir(folder or "."):  # python -m looks into its own folder first
            services.append(stack.enter_context(ServiceProcess(host_bytes=str(256 << 20))))
        clients = [stack.enter_context(KVCacheClient(service.target)) for service in services]
        templates = [scene.plain_template(client, SHAPE) for client in clients]
        took: list[list[float]] = [[], []]
        for number in range(TURNS):
            for which in (0, 1) if number % 2 else (1, 0):
                took[which].append(turn(clients[which], templates[which]))
    for name, seconds in zip(("no spans", folder or "exporting"), took, strict=True):
        rest = sorted(seconds[WARM:])
        print(f"{name}: median {statistics.median(rest) * 1e6:.0f} us, a tenth below {rest[len(rest) // 10] * 1e6:.0f} us")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
