"""Parts of Markdown pages."""

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")
_SPECIAL = re.compile(r"([*<])")


def escape_text(text: str) -> str:
    """Return a text on one line that Markdown shows as it is, except for code between backticks."""
    parts = _CODE.split(" ".join(text.split()).replace("``", "`"))
    return "".join(part if part.startswith("`") else _SPECIAL.sub(r"\\\1", part) for part in parts)


def format_code(text: str) -> str:
    """Return a text as code within a line."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def format_block(text: str, language: str = "") -> str:
    """Return a text as a block of code."""
    return f"```{language}\n{text}\n```"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_escape_cell, line))} |" for line in lines)


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


def make_anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def join_words(words: Sequence[str], last: str = "or") -> str:
    """Return words as a list in a sentence: `a, b or c`."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def join_parts(parts: Iterable[str]) -> str:
    """Return the parts of a page with an empty line between them."""
    return "\n\n".join(parts) + "\n"
