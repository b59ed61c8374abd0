"""What commands share: console, progress, the model, the client, and clear refusals."""

from __future__ import annotations

import json
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


ADMIN_TARGET = "127.0.0.1:50052"
AdminTarget = Annotated[
    str, typer.Option("--admin-target", envvar="KVCACHE_CLIENT_ADMIN_TARGET", help="The running service's `admin_listen`.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


@contextmanager
def connected(target: str, ca: Path | None, certificate: Path | None, key: Path | None, token_file: Path | None) -> Iterator[Any]:
    """A client of the running service; what goes wrong is said in one line, and the command ends with 1 (2: bad options)."""
    from kvcache_client import KVCacheClient

    with _speaking(KVCacheClient, target, ca, certificate, key, token_file) as client:
        yield client


@contextmanager
def admin(target: str, ca: Path | None, certificate: Path | None, key: Path | None, token_file: Path | None) -> Iterator[Any]:
    """A client of the running service's Admin service; see connected."""
    from kvcache_client.admin import AdminClient

    with _speaking(AdminClient, target, ca, certificate, key, token_file) as client:
        yield client


@contextmanager
def _speaking(
    kind: Any, target: str, ca: Path | None, certificate: Path | None, key: Path | None, token_file: Path | None
) -> Iterator[Any]:
    from kvcache_client import Credentials
    from kvcache_client.errors import CacheError

    try:
        token = token_file.read_text().strip() if token_file is not None else ""
        client = kind(target, credentials=Credentials(ca, certificate, key, token))
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    try:
        with client:
            yield client
    except CacheError as error:
        typer.echo(f"error: {error.code}: {error}; {error.fix}", err=True)
        raise typer.Exit(1) from error


def print_messages(messages: Iterable[Any]) -> None:
    """A JSON list of protobuf messages."""
    from google.protobuf.json_format import MessageToDict

    shown = [MessageToDict(m, preserving_proto_field_name=True, always_print_fields_with_no_presence=True) for m in messages]
    typer.echo(json.dumps(shown, indent=2))


def report(json_output: bool, figures: dict[str, int]) -> None:
    """What a command has done."""
    text = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in figures.items())
    typer.echo(json.dumps(figures) if json_output else text)


def print_table(screen: Any, title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    screen.print(table)


def console(*, stderr: bool = False) -> Any:
    """A rich console; wide where nobody looks at a terminal. stderr: beside output that a machine reads."""
    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=170)


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
