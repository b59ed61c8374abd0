"""Start the real service as its own process, on free ports, and read its metrics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from types import TracebackType

from prometheus_client.parser import text_string_to_metric_families

_READY = re.compile(r"kvcache ready grpc=(?P<grpc>\S+) admin=(?P<admin>\S+) metrics=(?P<metrics>\S+) catalog=(?P<catalog>\S+)")


class ServiceProcess:
    """`python -m kvcache_service` with the given KVCACHE_ settings over its own defaults; ends with the context.

    module: what is run instead, if anything.
    """

    def __init__(self, *, module: str = "kvcache_service", **settings: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHE_")}
        addresses = ("LISTEN", "ADMIN_LISTEN", "METRICS_LISTEN")
        environment |= {f"KVCACHE_{name}": "127.0.0.1:0" for name in addresses} | {"KVCACHE_LOG_LEVEL": "warning"}
        environment |= {f"KVCACHE_{name.upper()}": value for name, value in settings.items()}
        self.process = subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        ready = _READY.match(self.process.stdout.readline())
        if ready is None:
            self.stop()
            raise RuntimeError("the service did not start; its message stands above")
        self.target, self.admin_target = ready["grpc"], ready["admin"]
        self.metrics_url, self.catalog_url = ready["metrics"], ready["catalog"]

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics."""
        return read_metrics(self.metrics_url)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def read_metrics(url: str) -> dict[str, float]:
    """All samples there: name{label="value",…} -> value. Raises OSError where nobody answers."""
    with urllib.request.urlopen(url, timeout=5) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {
        sample.name
        + ("{" + ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items())) + "}" if sample.labels else ""): sample.value
        for family in families
        for sample in family.samples
    }
