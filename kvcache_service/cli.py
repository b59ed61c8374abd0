"""The `kvcache` command."""

from __future__ import annotations

import typer

from kvcache_service.commands.admin import clear, drain, models, quota, templates
from kvcache_service.commands.anchors import anchors
from kvcache_service.commands.bench import bench
from kvcache_service.commands.calibrate import calibrate
from kvcache_service.commands.demo import demo
from kvcache_service.commands.doctor import doctor
from kvcache_service.commands.evaluate import evaluate
from kvcache_service.commands.health import health
from kvcache_service.commands.serve import serve
from kvcache_service.commands.settings import config
from kvcache_service.commands.status import status
from kvcache_service.commands.token import token
from kvcache_service.commands.top import top

app = typer.Typer(help="Share KV caches between LLM agents.", no_args_is_help=True)
app.command()(serve)
app.command()(demo)
app.command()(status)
app.command()(top)
app.command()(models)
app.command()(templates)
app.add_typer(anchors, name="anchors")
app.command()(quota)
app.command()(clear)
app.command()(drain)
app.command()(doctor)
app.command()(health)
app.command()(calibrate)
app.command("eval")(evaluate)
app.command()(bench)
app.add_typer(config, name="config")
app.add_typer(token, name="token")

if __name__ == "__main__":
    app()
