"""What the documentation shows is run or parsed here; the site builds without a broken link."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from kvcache_service.engine.plan import Reason
from kvcache_service.errors import Code
from kvcache_service.evaluation.service import ServiceProcess
from tests.commands import commands_of_ours, parse
from tests.conftest import VOCABULARY, tiny_llama

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CLIENT_PAGES = [p for p in PAGES if "KVCacheClient(" in p.read_text() and p.name in ("README.md", "index.md", "python.md")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:[A-Z_]+=\S* )*((?:\S*/)?(kvcache|make|docker|helm|kubectl)) ")  # settings may stand before it


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every line of an unmarked block that is a command: page, words without settings, comments and redirections."""
    for page in PAGES:
        for block in blocks(page, "", "bash", "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                found = COMMAND.match(line)
                if found is not None:
                    words = shlex.split(line[found.start(1) :].partition(">>")[0], comments=True)
                    yield page.name, [found[2], *words[1:]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model and a tokenizer of single characters, as from_pretrained reads them."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(WordLevel({chr(i): i for i in range(VOCABULARY)}, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    tiny_llama().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("page", CLIENT_PAGES, ids=lambda page: page.name)
def test_python_runs_as_it_stands(
    page: Path, saved: str, start_service: Callable[..., ServiceProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """Top to bottom in one namespace. Only the address is another: the service of the test has a port of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    known: dict[str, Any] = {"NAME": saved, "model": AutoModelForCausalLM.from_pretrained(saved)}
    known["tokenizer"] = AutoTokenizer.from_pretrained(saved)
    found = blocks(page, "python")
    assert found
    with start_service() as service:
        for text in found:
            assert "127.0.0.1:50051" in text or known.keys() & {"shared", "client"}
            exec(compile(text.replace("127.0.0.1:50051", service.target), str(page), "exec"), known)
        metrics = service.metrics()
        for name in ("client", "shared"):
            if name in known:
                getattr(known[name], "client", known[name]).close()
    assert sum(v for k, v in metrics.items() if k.startswith("kvcache_turns_total")) > 0
    assert capsys.readouterr().out


def test_other_python_is_python() -> None:
    for page in PAGES:
        for text in blocks(page, "python"):
            compile(text, str(page), "exec")


def test_data_is_well_formed() -> None:
    for page in PAGES:
        for text in blocks(page, "yaml"):
            yaml.safe_load(text)
        for text in blocks(page, "toml"):
            tomllib.loads(text)
        for text in blocks(page, "json"):
            json.loads(text)


@pytest.mark.parametrize(("page", "words"), [(p, w) for p, w in commands() if w[0] == "kvcache"], ids=lambda v: str(v)[:60])
def test_commands_of_ours_are_accepted(page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed with every option, in a folder where the files that they name are."""
    monkeypatch.chdir(tmp_path)
    for word in words:
        if re.fullmatch(r"\w+\.(jsonl|toml|pem|tar)", word):
            (tmp_path / word).write_text("")
    parse(words)


def test_the_table_of_commands_is_whole() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    table = {name for line in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([\w ]+)`", line)}
    assert table == set(commands_of_ours())


def test_every_command_speaks_to_machines() -> None:
    silent = {name for name, options in commands_of_ours().items() if "--json" not in options}
    assert silent == {"serve", "config schema", "anchors show"}, "these print JSON always, or a ready line"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {word for _, words in commands() if words[0] == "make" for word in words[1:] if re.fullmatch(r"[a-z]+", word)}
    assert asked >= {"demo", "test"}
    assert asked <= targets


def test_files_that_commands_name_are_there() -> None:
    named = {w for _, words in commands() if words[0] in {"helm", "kubectl"} for w in words if w.startswith("deploy/")}
    assert named
    assert all((ROOT / name).exists() for name in named)


def test_troubleshooting_knows_every_code_and_reason() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = {code for line in re.findall(r"^### (.*)$", text, re.MULTILINE) for code in line.split(", ")}
    assert headings - {"UNAVAILABLE", "DEADLINE_EXCEEDED"} == {code.name for code in Code}
    table = {reason for line in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for reason in re.findall(r"`(\w+)`", line)}
    assert table == {reason.name.lower() for reason in Reason if reason is not Reason.NONE}
    protocol = (ROOT / "docs" / "protocol.md").read_text()
    told = {code for line in re.findall(r"^\| ([A-Z_, ]+) \|", protocol, re.MULTILINE) for code in line.split(", ")}
    assert told == {code.name for code in Code}


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("mkdocs"), "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = {str(path.relative_to(tmp_path / "site").parent) for path in (tmp_path / "site").rglob("index.html")}
    assert {"concepts", "python", "protocol", "troubleshooting", "deploy", "security", "metrics", "decisions"} <= made
    python = (tmp_path / "site" / "python" / "index.html").read_text()
    for name in ("KVCacheClient", "open_turn", "SharedModel", "Credentials", "retry_after"):
        assert name in python
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not loaded, "pages load nothing from elsewhere"
