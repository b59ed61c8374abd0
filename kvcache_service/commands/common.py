"""What commands share: console, progress, the model, the client, and clear refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Item = TypeVar("Item")


Target = Annotated[str, typer.Option(envvar="KVCACHE_CLIENT_TARGET", help="Address of the running service.")]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", envvar="KVCACHE_CLIENT_TLS_CA", help="PEM certificate of who signed the service's; without it no TLS."
    ),
]
Certificate = Annotated[
    Path | None, typer.Option("--tls-cert", envvar="KVCACHE_CLIENT_TLS_CERT", help="PEM certificate of your own, for mTLS.")
]
Key = Annotated[Path | None, typer.Option("--tls-key", envvar="KVCACHE_CLIENT_TLS_KEY", help="PEM key of --tls-cert.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", envvar="KVCACHE_CLIENT_TOKEN_FILE", help="File that holds your bearer token.")
]


@contextmanager
def connected(target: str, ca: Path | None, certificate: Path | None, key: Path | None, token_file: Path | None) -> Iterator[Any]:
    """A client of the running service; what goes wrong is said in one line, and the command ends with 1 (2: bad options)."""
    from kvcache_client import Credentials, KVCacheClient
    from kvcache_client.errors import CacheError

    try:
        token = token_file.read_text().strip() if token_file is not None else ""
        client = KVCacheClient(target, credentials=Credentials(ca, certificate, key, token))
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    try:
        with client:
            yield client
    except CacheError as error:
        typer.echo(f"error: {error.code}: {error}; {error.fix}", err=True)
        raise typer.Exit(1) from error


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
