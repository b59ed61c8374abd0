"""Rows on the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcache_service.bench.rows import Row


def show(screen: Any, rows: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table("bench", "case", "p50", "p99", "floor p50", "ratio", "floor")
    for row in rows:
        table.add_row(
            row.bench,
            row.case,
            _milliseconds(row.seconds_p50),
            _milliseconds(row.seconds_p99),
            _milliseconds(row.floor_seconds_p50),
            f"{row.ratio:.2f}",
            row.floor,
        )
    screen.print(table)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Ratios to the floor, one bar per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 1 + 0.3 * len(rows)), layout="constrained")
    names = [f"{row.bench}: {row.case}" for row in rows]
    bars = axis.barh(names, [row.ratio for row in rows], color="#3b6ea5")
    axis.bar_label(bars, [f"{row.ratio:.2f}" for row in rows], padding=3)
    axis.axvline(1.0, color="#444444", linewidth=1)
    axis.set_xlabel("time over its floor (medians); 1 is the floor")
    axis.invert_yaxis()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _milliseconds(value: float) -> str:
    return f"{1e3 * value:.2f} ms"
