"""Settings: which source wins, what is refused and in which words, and what the commands show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from kvcache_client import KVCacheClient

from kvcache_service.config import Config, read_settings

DOC = Path(__file__).parents[2] / "docs" / "configuration.md"
KVCACHE = Path(sys.executable).with_name("kvcache")


def write(folder: Path, text: str) -> Path:
    path = folder / "kvcache.toml"
    path.write_text(text)
    return path


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHE_")}
    return subprocess.run([KVCACHE, *map(str, words)], env=clean | environment, capture_output=True, text=True)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, 'threads = 1\npool_anchors = 2\nhost_codec = "int8"\ndisk_dir = "/x"\n')
    settings = read_settings({"KVCACHE_THREADS": "3", "KVCACHE_POOL_ANCHORS": "4", "HOME": "/"}, file, {"threads": "5"})
    config = settings.config
    assert (config.threads, config.pool_anchors, config.host_codec, config.disk_dir) == (5, 4, "int8", Path("/x"))
    assert {settings.origins[name] for name in ("threads",)} == {"flag"}
    assert [settings.origins[n] for n in ("pool_anchors", "host_codec", "gamma")] == ["environment", "file", "default"]
    assert read_settings({"KVCACHE_CONFIG": str(file)}).config.threads == 1


@pytest.mark.parametrize(
    ("environment", "text", "words"),
    [
        ({"KVCACHE_THREDS": "3"}, "", ["unknown setting KVCACHE_THREDS; did you mean KVCACHE_THREADS?"]),
        ({}, "host_byte = 3", ["unknown setting host_byte; did you mean host_bytes?"]),
        ({"KVCACHE_THREADS": "0"}, "", ["threads is '0' (KVCACHE_THREADS): input should be greater than 0; it means: "]),
        (
            {},
            'gamma = -1\nhost_codec = "int4"',
            ["gamma is -1 (file): ", "host_codec is 'int4' (file): input should be 'none', "],
        ),
        ({}, "gamma = = 1", ["kvcache.toml: ", "it must be TOML"]),
        ({"KVCACHE_CONFIG": "/no/such.toml"}, None, ["/no/such.toml", "No such file"]),
    ],
)
def test_what_is_wrong_is_named(environment: dict[str, str], text: str | None, words: list[str], tmp_path: Path) -> None:
    file = None if text is None else write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        read_settings(environment, file)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    done = run("config", "show", *(["--config", file] if file else []), **environment)
    assert done.returncode == 2
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())
    assert all(word in done.stderr for word in words)


def test_a_wrong_secret_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="redis_url") as caught:
        read_settings({}, write(tmp_path, "redis_url = 12345"))
    assert "12345" not in str(caught.value)


def test_show_tells_values_and_sources_and_no_secret(tmp_path: Path) -> None:
    file = write(tmp_path, "threads = 3")
    words = ("config", "show", "--config", file, "--set", "gamma=0.5")
    environment = {"KVCACHE_REDIS_URL": "redis://:hush@h/0"}
    shown = json.loads(run(*words, "--json", **environment).stdout)
    assert shown.keys() == Config.model_fields.keys()
    assert shown["threads"] == {"value": 3, "from": "file"}
    assert shown["gamma"] == {"value": 0.5, "from": "flag"}
    assert shown["redis_url"] == {"value": "**********", "from": "environment"}
    text = run(*words, **environment).stdout
    assert re.search(r"^threads +3 +file$", text, re.MULTILINE)
    assert "hush" not in text + json.dumps(shown)


def test_a_flag_that_is_no_pair_is_refused() -> None:
    done = run("config", "show", "--set", "gamma")
    assert done.returncode == 2
    assert "NAME=VALUE" in done.stderr


def test_the_schema_accepts_what_the_service_accepts() -> None:
    schema = json.loads(run("config", "schema").stdout)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"threads": 3, "host_codec": "int8"})
    assert not validator.is_valid({"thread": 3})
    assert not validator.is_valid({"threads": 0})


def test_the_service_runs_by_its_file(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'listen = "127.0.0.1:0"\nadmin_listen = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\nmax_prompt_tokens = 4242\n',
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHE_")}
    with subprocess.Popen([KVCACHE, "serve", "--config", file], env=clean, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = re.match(r"kvcache ready grpc=(\S+)", process.stdout.readline())
            assert ready
            with KVCacheClient(ready[1]) as client:
                assert client.status().uptime_seconds >= 0
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0


def table() -> str:
    """What docs/configuration.md has to list."""
    lines = ["| setting | default | |", "|---|---|---|"]
    for name, field in Config.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`"
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def test_the_documentation_lists_every_setting() -> None:
    assert table() in DOC.read_text(), f"put this table into {DOC.name}:\n{table()}"
