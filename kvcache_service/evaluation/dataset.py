"""Questions from JSON-lines files, and their split: what is learned from is never what is reported."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """question: the text that the user sends; answer: a reference text where the file has one, else empty."""

    question: str
    answer: str


@dataclass(frozen=True)
class Dataset:
    """train: for pools and calibration; test: for reported figures. No row is in both."""

    name: str
    train: list[Row]
    test: list[Row]


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file with a field `question` or `prompt`. Raises ValueError that names the line at fault."""
    out = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            out.append(Row(str(row.get("question") or row["prompt"]), str(row.get("answer", ""))))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: needs a JSON object with a field `question` or `prompt`") from error
    return out


def read(path: Path, seed: int) -> Dataset:
    """Odd lines train, even lines test, each shuffled by `seed`."""
    rows = read_rows(path)
    train, test = rows[0::2], rows[1::2]
    random.Random(seed).shuffle(train)
    random.Random(seed).shuffle(test)
    return Dataset(path.stem, train, test)
