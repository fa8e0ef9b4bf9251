"""Real text to shard: the sources of Python's own standard library, cut to size, as JSON lines."""

import sysconfig
from functools import cache
from pathlib import Path

import orjson


@cache
def text() -> str:
    """All of it."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    for file in sorted(root.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            texts.append(file.read_text())
        except UnicodeDecodeError:
            continue  # some of its tests are in other encodings on purpose
    return "".join(texts)


def write_jsonl(file: Path, *, characters: int, size: int) -> int:
    """Write rows ``{"id": n, "text": "..."}`` until the file has the size.

    Args:
        file: Where to; its folder is made.
        characters: Of text in each row.
        size: Bytes of the file, to within a row.

    Returns:
        How many rows.
    """
    whole = text()
    room = len(whole) - characters
    file.parent.mkdir(parents=True, exist_ok=True)
    written = rows = 0
    with file.open("wb") as out:
        while written < size:
            # Another offset on each round through the text, so that no two rows are the same.
            at = rows * characters % room + rows * characters // room
            row = {"id": rows, "text": whole[at : at + characters]}
            written += out.write(orjson.dumps(row) + b"\n")
            rows += 1
    return rows
