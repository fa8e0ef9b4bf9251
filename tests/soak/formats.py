"""Source data whose shards have every format, and the readers of the formats."""

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import parquet

from millrace.testing.mosaicml import install_mosaicml
from tests.oracle import make_row_token
from tests.soak.source_data import SourceData
from tests.support.format_readers import read_litdata, read_mds

FORMATS = ("litdata", "mds", "pages", "parquet", "tokens", "webdataset")

_FUNCTION = '''"""Give every sample the same fields. Its tokens are the characters of its text."""


def add_tokens(sample):
    row = sample.get("json") or {}
    text = sample["txt"] if "txt" in sample else row["text"]
    name = sample["name"].decode() if "name" in sample else row["id"]
    return {"id": name, "txt": text, "tokens": text.encode("utf-16-le")}
'''


def make_format_sources(folder: Path, sources: Sequence[SourceData]) -> list[SourceData]:
    """Return the same source data with settings that make shards of every format in one pass.

    Args:
        folder: Folder for the function that gives the samples their fields.
        sources: Source data.
    """
    folder.mkdir(parents=True)
    path = folder / "fields.py"
    path.write_text(_FUNCTION)
    sharding = {
        "shard_bytes": 192 << 10,  # a commit has six shards
        "formats": list(FORMATS),
        "types": {"id": "str", "txt": "str", "tokens": "uint16[]"},
        "transforms": [{"kind": "function", "function": f"{path}:add_tokens"}],
    }
    return [
        replace(
            source,
            name=f"{source.name} in every format",
            source=_rename_id(source.source),
            sharding={**source.sharding, **sharding},
        )
        for source in sources
    ]


def _rename_id(source: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the column ``id`` as text: a field ``id`` would be an integer."""
    if columns := source.get("columns"):
        return {**source, "columns": {"name" if k == "id" else k: v for k, v in columns.items()}}
    return source


class FormatReaders:
    """Readers of the formats, from the projects that define them.

    Args:
        folder: Folder for packages that are installed at the first use.
    """

    def __init__(self, folder: Path) -> None:
        self._packages = folder

    def find_faults(self, dataset: Path, source: SourceData) -> list[str]:
        """Read a dataset in a folder with the reader of each format, and return the faults.

        The oracle reads the shards of WebDataset.
        """
        if "formats" not in source.sharding:
            return []
        if not self._packages.exists():
            install_mosaicml(self._packages)
        readers: dict[str, Callable[[Path], Counter[str]]] = {
            "litdata": lambda split: _count_rows(read_litdata(str(split))),
            "mds": lambda split: _count_rows(read_mds(self._packages, split)),
            "pages": partial(_read_tables, text="text"),
            "parquet": partial(_read_tables, text="txt"),
            "tokens": _read_tokens,
        }
        faults: list[str] = []
        for name, read in readers.items():
            splits = sorted((dataset / "shards" / name).iterdir())
            found = sum((read(split) for split in splits), Counter[str]())
            expected = source.rows
            if name == "tokens":  # this format stores no other field
                expected = Counter(row.partition(" ")[2] for row in source.rows.elements())
            if found != expected:
                faults.append(
                    f"the reader of {name} misses {(expected - found).total()} rows, and has "
                    f"{(found - expected).total()} others"
                )
        return faults


def _count_rows(items: Sequence[dict[str, Any]]) -> Counter[str]:
    return Counter(_check_row(item["id"], item["txt"], item["tokens"]) for item in items)


def _check_row(name: str, text: str, tokens: Any) -> str:
    """Return the token of a row; a token of no row if its fields do not belong together."""
    if np.asarray(tokens, "<u2").tobytes() != text.encode("utf-16-le"):
        return f"{name} with other tokens than its text"
    return make_row_token(name, text.encode())


def _read_tables(split: Path, text: str) -> Counter[str]:
    """Read parquet files. ``text`` is the name of the column with the texts."""
    tables = (parquet.read_table(path).to_pylist() for path in split.rglob("*.parquet"))
    return _count_rows([{**row, "txt": row[text]} for rows in tables for row in rows])


def _read_tokens(split: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in split.glob("*.npy"):
        with io.BytesIO(path.read_bytes()) as file:
            tokens, ends = np.load(file), np.load(file)
        for part in np.split(tokens, ends[:-1].astype(np.int64)):
            text = part.tobytes().decode("utf-16-le").encode()
            found[make_row_token("", text).strip()] += 1
    return found
