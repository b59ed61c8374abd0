"""The service as it is, on a device that is the CPU: `python -m tests.cuda.service` with KVCACHE_DEVICE=cuda."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvcache_service.__main__ import main
from kvcache_service.config import Config
from tests.cuda.shim import HostRuntime

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Config(), lambda index: HostRuntime(Path(folder)))  # type: ignore[call-arg]
