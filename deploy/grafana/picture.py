"""Draws every panel of the dashboards from a real Prometheus, for those without a Grafana at hand.

.venv/bin/python deploy/grafana/picture.py http://127.0.0.1:9090 docs/dashboards.png
"""

from __future__ import annotations

import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer


def main(
    prometheus: Annotated[str, typer.Argument(help="Its URL.")],
    out: Annotated[Path, typer.Argument(help="Picture to write.")] = Path("docs/dashboards.png"),
    seconds: Annotated[int, typer.Option(help="How far back.")] = 300,
    window: Annotated[str, typer.Option(help="In place of Grafana's rate interval.")] = "20s",
) -> None:
    """One picture: a row of panels for every dashboard."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    boards = [json.loads(path.read_text()) for path in sorted(Path(__file__).with_name("dashboards").glob("*.json"))]
    width = max(len(board["panels"]) for board in boards)
    figure, axes = plt.subplots(len(boards), width, figsize=(3.4 * width, 2.6 * len(boards)), squeeze=False)
    end = time.time()
    for board, row in zip(boards, axes, strict=True):
        for axis in row[len(board["panels"]) :]:
            axis.set_axis_off()
        for panel, axis in zip(board["panels"], row, strict=False):
            axis.set_title(f"{board['title'].partition(': ')[2]}: {panel['title']}", fontsize=8)
            axis.tick_params(labelsize=6)
            for target in panel["targets"]:
                for found in _range(prometheus, target["expr"].replace("$__rate_interval", window), end - seconds, end):
                    times, values = zip(*((float(t) - end, float(v)) for t, v in found["values"]), strict=True)
                    legend = target["legendFormat"]
                    for name, value in found["metric"].items():
                        legend = legend.replace("{{" + name + "}}", value)
                    if any(not math.isnan(v) and v for v in values) or "{{" not in target["legendFormat"]:
                        axis.plot(times, values, label=legend, linewidth=1)
            if axis.get_legend_handles_labels()[1]:
                axis.legend(fontsize=5)
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def _range(prometheus: str, expression: str, start: float, end: float) -> list[dict[str, Any]]:
    query = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": max(1, (end - start) // 100)})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}", timeout=10) as reply:
        found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return found


if __name__ == "__main__":
    typer.run(main)
