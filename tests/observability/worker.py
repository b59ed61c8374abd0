"""A worker with an OpenTelemetry SDK of its own. Argument: the service's address.

It warms two agents up, and then asks both through each transport.
"""

from __future__ import annotations

import sys

from kvcache_client import KVCacheClient
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from tests.conftest import tiny_llama
from tests.e2e.test_agents import Team, question

ASKED = 4  # through each transport, once the agents are warm


def main(target: str) -> None:
    provider = TracerProvider(resource=Resource.create({"service.name": "worker"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    model = tiny_llama()
    for number, transport in enumerate(("shared_memory", "stream")):
        with KVCacheClient(target, transport=transport) as client:
            team = Team(model, client)
            if number == 0:
                team.warm()
            for asked in range(ASKED):
                team.ask(question(1000 * (number + 1) + asked))
    provider.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
