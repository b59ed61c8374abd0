"""What the commands that run a model share: console, progress, the model, and clear refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import typer

Item = TypeVar("Item")


def console() -> Any:
    """A rich console; wide where nobody looks at a terminal."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=170)


def load_model(screen: Any, folder: Path | None) -> tuple[Any, Any]:
    from kvcache_service.evaluation import model

    with screen.status("loading the model (the first time it is converted, about half a minute)"):
        try:
            return model.load(folder)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="--model") from error


class Bars:
    """Progress bars, one per task, drawn while the context lasts."""

    def __init__(self, screen: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        text = TextColumn("{task.description}")
        self._progress = Progress(
            text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), console=screen
        )

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def track(self, items: Iterable[Item], total: int, description: str) -> Iterator[Item]:
        return iter(self._progress.track(items, total=total, description=description))
