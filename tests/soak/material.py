"""Sources of the soak: small ones whose rows each have a unique id."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.oracle import make_row_token

_WORDS = ("mill", "race", "wheel", "sluice", "weir", "grain", "stone", "flour", "sack", "gate")


@dataclass(frozen=True, slots=True)
class Material:
    """A source, and the truth about it.

    Attributes:
        name: Of this material.
        folder: Where its files are.
        source: How it is read: settings of a source, less its store.
        sharding: Settings of the sharding.
        rows: The tokens of its rows.
        bad_rows: How many of its rows make no sample.
    """

    name: str
    folder: Path
    source: dict[str, Any]
    sharding: dict[str, Any]
    rows: Counter[str] = field(repr=False)
    bad_rows: int = 0


def make_all(folder: Path, seed: int) -> list[Material]:
    """Every kind of source, about 1 MiB each: four or five partitions, about twenty shards."""
    return [
        make(folder / make.__name__, random.Random(f"{seed} {make.__name__}")) for make in KINDS
    ]


def lines(folder: Path, dice: random.Random) -> Material:
    """JSON lines kept whole, in three files."""
    folder.mkdir(parents=True)
    rows: Counter[str] = Counter()
    for number in range(3):
        written = []
        for i in range(220):
            name, text = f"{number}-{i}", _text(dice, 200, 2600)
            rows[make_row_token(name, text.encode())] += 1
            written.append(json.dumps({"id": name, "text": text}))
        (folder / f"part-{number}.jsonl").write_text("\n".join(written) + "\n")
    return Material(
        "lines",
        folder,
        {"kind": "jsonl"},
        {"shard_bytes": 64 << 10, "partition_bytes": 192 << 10, "seed": 1},
        rows,
    )


def columns(folder: Path, dice: random.Random) -> Material:
    """JSON lines of which two columns are taken, with bad rows among them, and a held-out share."""
    folder.mkdir(parents=True)
    rows: Counter[str] = Counter()
    written, bad = [], 0
    for i in range(500):
        name, text = f"row-{i}", _text(dice, 100, 3200)
        match dice.randrange(25):
            case 0:
                written.append('{"id": "' + name)
                bad += 1
            case 1:
                written.append(json.dumps({"id": name}))
                bad += 1
            case _:
                rows[make_row_token(name, text.encode())] += 1
                written.append(json.dumps({"id": name, "text": text, "more": i}))
    (folder / "all.jsonl").write_text("\n".join(written))  # the last row has no newline
    return Material(
        "columns",
        folder,
        {"kind": "jsonl", "columns": {"txt": "text", "id": "id"}},
        {
            "shard_bytes": 64 << 10,
            "shard_samples": 25,
            "partition_bytes": 192 << 10,
            "holdout": 0.15,
        },
        rows,
        bad,
    )


def files(folder: Path, dice: random.Random) -> Material:
    """Two files a sample, in folders."""
    rows: Counter[str] = Counter()
    for i in range(220):
        name, text = f"{i:04d}", _text(dice, 800, 8000).encode()
        at = folder / f"group-{i % 7}"
        at.mkdir(parents=True, exist_ok=True)
        rows[make_row_token(name, text)] += 1
        (at / f"{name}.txt").write_bytes(text)
        (at / f"{name}.json").write_text(json.dumps({"id": name}))
    return Material(
        "files",
        folder,
        {"kind": "files"},
        {"shard_bytes": 64 << 10, "partition_bytes": 256 << 10, "seed": 3},
        rows,
    )


KINDS = (lines, columns, files)


def _text(dice: random.Random, least: int, most: int) -> str:
    size = dice.randint(least, most)
    return " ".join(dice.choices(_WORDS, k=size // 6 + 1))[:size]
