"""`kvcache token`."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from kvcache_service.commands import common

token = typer.Typer(help="Bearer tokens.", no_args_is_help=True)


@token.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose token it is: what is stored with it, nobody else finds.")],
    name: Annotated[str, typer.Option(help="Who uses it; stands in the audit log.")],
    admin: Annotated[bool, typer.Option("--admin", help="It may also calibrate, and what `kvcache anchors` does.")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="An admin who may also drain, and see all quotas.")] = False,
    expires: Annotated[str | None, typer.Option(help="When it ends, as 2027-01-31T00:00:00Z; without it never.")] = None,
    json_output: common.Json = False,
) -> None:
    """Make a token. The token itself is shown once; the entry, which holds only its hash, belongs into `tokens_file`.

    The service reads the file again when it changes.
    """
    from pydantic import ValidationError

    from kvcache_service.rpc.callers import Entry, digest_of, new_token

    secret = new_token()
    try:
        entry = Entry(
            name=name,
            tenant=tenant,
            sha256=digest_of(secret),
            admin=admin,
            operator=operator,
            expires=expires,  # type: ignore[arg-type]
        )
    except ValidationError as error:
        where = error.errors()[0]
        typer.echo(f"error: --{where['loc'][0]}: {where['msg']}", err=True)
        raise typer.Exit(2) from error
    lines = ["[[token]]", f'name = "{entry.name}"', f'tenant = "{entry.tenant}"', f'sha256 = "{entry.sha256}"']
    lines += ["admin = true"] if entry.admin else []
    lines += ["operator = true"] if entry.operator else []
    lines += [f"expires = {re.sub('[+]00:00$', 'Z', entry.expires.isoformat())}"] if entry.expires else []
    text = "\n".join(lines)
    if json_output:
        typer.echo(json.dumps({"token": secret, "entry": text}))
        return
    typer.echo(f"# the token, shown this once: {secret}", err=True)
    typer.echo(text)
