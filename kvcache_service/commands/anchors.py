"""`kvcache anchors`: the samples in a service's pools."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_service.commands import common

anchors = typer.Typer(help="Samples in the pools of a running service.", no_args_is_help=True)

Model = Annotated[str, typer.Option("--model-id", help="First characters of a model's id; `kvcache models` lists them.")]
Template = Annotated[
    str, typer.Option("--template-id", help="First characters of a template's id: it produced the sample, or has offsets of it.")
]
Placeholder = Annotated[str, typer.Option(help="Name of the placeholder.")]
Sample = Annotated[str, typer.Option(help="First characters of a sample's hash.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
_COLUMNS = ("placeholder", "base from", "sample", "tokens", "slots", "uses", "taint", "host bytes", "pin")


class PinName(StrEnum):
    NONE = "none"
    SOFT = "soft"
    HARD = "hard"


@anchors.command("list")
def list_(
    model: Model = "",
    template: Template = "",
    placeholder: Placeholder = "",
    sample: Sample = "",
    target: common.AdminTarget = common.ADMIN_TARGET,
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """All samples, pool by pool, oldest first."""
    with common.admin(target, ca, certificate, key, token_file) as client:
        found = list(client.anchors(**_selection(model, template, placeholder, sample)))
    if json_output:
        common.print_messages(found)
        return
    common.print_table(common.console(), f"{len(found)} samples", _COLUMNS, map(_row, found))


@anchors.command()
def show(
    sample: Annotated[str, typer.Argument(help="First characters of a sample's hash.")],
    target: common.AdminTarget = common.ADMIN_TARGET,
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
) -> None:
    """All that is known of a sample, as JSON."""
    with common.admin(target, ca, certificate, key, token_file) as client:
        found = list(client.anchors(sample=sample))
    if not found:
        typer.echo(f"error: no sample begins with {sample!r}; `kvcache anchors list` lists them", err=True)
        raise typer.Exit(1)
    common.print_messages(found)


@anchors.command()
def delete(
    model: Model = "",
    template: Template = "",
    placeholder: Placeholder = "",
    sample: Sample = "",
    yes: Yes = False,
    target: common.AdminTarget = common.ADMIN_TARGET,
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """Forget samples: KV and anchors, in memory, on disk and in the metadata store. What predictors have learned stays.

    Exact KV of whole prompts stays as well; `kvcache clear` forgets everything.
    """
    selection = _selection(model, template, placeholder, sample)
    with common.admin(target, ca, certificate, key, token_file) as client:
        if not yes and any(selection.values()):
            typer.confirm(f"forget {sum(1 for _ in client.anchors(**selection))} samples?", abort=True)
        reply = client.delete(**selection)
    common.report(json_output, {"samples": reply.samples, "host_bytes": reply.host_bytes})


@anchors.command()
def pin(
    how: Annotated[PinName, typer.Argument(help="none: by use; soft: evicted last; hard: never evicted.")],
    model: Model = "",
    template: Template = "",
    placeholder: Placeholder = "",
    sample: Sample = "",
    target: common.AdminTarget = common.ADMIN_TARGET,
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """Change how the KV of samples is kept in host memory, until the service ends."""
    with common.admin(target, ca, certificate, key, token_file) as client:
        count = client.pin(how.value, **_selection(model, template, placeholder, sample))
    common.report(json_output, {"samples": count})


@anchors.command()
def export(
    file: Annotated[Path, typer.Argument(help="A tar file of safetensors, to be written.")],
    model: Model = "",
    target: common.AdminTarget = common.ADMIN_TARGET,
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """Write what was learned to a file: samples, anchors, predictors and calibrations, for `kvcache anchors import` elsewhere.

    It holds KV, which is text in another form: keep it as you would keep the prompts.
    """
    with (
        common.admin(target, ca, certificate, key, token_file) as client,
        common.Bars(common.console(stderr=json_output)) as bars,
    ):
        headers = client.export(file, model)
        first = next(headers, None)
        rest = bars.track(headers, first.records - 1 if first else 0, "exporting")
        count = sum(1 for _ in rest) + (first is not None)
    common.report(json_output, {"records": count, "bytes": file.stat().st_size})


@anchors.command("import")
def import_(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `kvcache anchors export` wrote.")],
    target: common.AdminTarget = common.ADMIN_TARGET,
    ca: common.Ca = None,
    certificate: common.Certificate = None,
    key: common.Key = None,
    token_file: common.TokenFile = None,
    json_output: common.Json = False,
) -> None:
    """Give a service what another one has learned. Its workers must have registered the model and the templates before.

    What is known already stays as it is: import again after whatever went wrong.
    """
    import tarfile

    total: dict[str, int] = dict.fromkeys(("records", "samples", "predictors", "calibrations", "known"), 0)
    with common.admin(target, ca, certificate, key, token_file) as client:
        try:
            for _, reply in client.import_(file):
                for name in total:
                    total[name] += 1 if name == "records" else int(getattr(reply, name))
        except tarfile.TarError as error:
            raise typer.BadParameter(f"{file} is no export: {error}", param_hint="FILE") from error
    common.report(json_output, total)


def _selection(model: str, template: str, placeholder: str, sample: str) -> dict[str, str]:
    return {"model_id": model, "template_id": template, "placeholder": placeholder, "sample": sample}


def _row(found: Any) -> list[str]:
    origin, _, where = found.origin.rpartition(":")
    slots = ", ".join(f"{name[:8]}:{name.rpartition(':')[2]}" for name in found.slots) or "base only"
    return [
        found.placeholder,
        f"{origin[:12]} {where}",
        found.sample[:12],
        str(found.tokens),
        slots,
        str(found.uses),
        str(found.taint),
        f"{found.host_bytes:,}",
        found.DESCRIPTOR.fields_by_name["pin"].enum_type.values_by_number[found.pin].name.removeprefix("PIN_").lower(),
    ]
