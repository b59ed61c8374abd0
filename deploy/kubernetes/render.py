"""Write the plain manifests from the Helm chart: `python deploy/kubernetes/render.py`. A test compares them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
CHART = HERE.parent / "helm" / "kvcache"
_MONITORING = [f"--set=monitoring.{part}=true" for part in ("serviceMonitor", "prometheusRule", "dashboards")]
_OPTIONS = {
    "central.yaml": ["--skip-tests"],
    "node-local.yaml": ["--skip-tests", "--set=mode=nodeLocal,sharedMemory.hostPath=/dev/shm/kvcache"],
    "monitoring.yaml": [*_MONITORING, "--show-only=templates/monitoring/*"],
}


def template(options: Sequence[str]) -> str:
    """What Helm makes of the chart. Raises CalledProcessError, with Helm's words in stderr, where it refuses."""
    done = subprocess.run(["helm", "template", "kvcache", CHART, *options], check=True, capture_output=True, text=True)
    return done.stdout


def rendered() -> dict[Path, str]:
    """path -> what belongs into it."""
    return {HERE / name: "# Written by render.py.\n" + template(options) for name, options in _OPTIONS.items()}


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text)
