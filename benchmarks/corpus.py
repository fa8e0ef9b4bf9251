"""Text for the benchmarks: the source code of Python's standard library, also as JSON lines."""

import sysconfig
from functools import cache
from pathlib import Path

import orjson


@cache
def read_text() -> str:
    """Return the source code of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    for file in sorted(root.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            texts.append(file.read_text())
        except UnicodeDecodeError:
            continue  # some files are deliberately in other encodings
    return "".join(texts)


def write_jsonl(file: Path, *, characters: int, size: int) -> int:
    """Write rows ``{"id": n, "text": "..."}`` until the file has the size.

    Args:
        file: Path of the file, in a folder that is created if it does not exist.
        characters: Number of characters of each text.
        size: Smallest size of the file in bytes. It is exceeded by less than one row.

    Returns:
        Number of rows.
    """
    whole = read_text()
    starts = len(whole) - characters
    file.parent.mkdir(parents=True, exist_ok=True)
    written = rows = 0
    with file.open("wb") as out:
        while written < size:
            # Each pass over the text begins one character later, so that all rows differ.
            at = rows * characters % starts + rows * characters // starts
            row = {"id": rows, "text": whole[at : at + characters]}
            written += out.write(orjson.dumps(row) + b"\n")
            rows += 1
    return rows
