"""Reports as Markdown, made safe: the only module that gives Prefect Markdown.

Much of a report comes from outside: object keys, what a store or a machine says, names, reasons.
`write`, `table` and `publish` escape and cut every plain string that they are given. Only
`Markdown`, which the functions of this module make, stands in a report as it is.
"""

import re
from collections.abc import Iterable, Sequence
from typing import LiteralString

from prefect.artifacts import create_markdown_artifact

from millrace.words import MAX_LENGTH, clean_text

_LONGEST_CODE = 200
_ROWS = 500  # of a table
_REPORT = 2000  # characters of a report that is no Markdown
_SPECIAL = re.compile(
    r"[\\`*_\[\]<>|&~@]"
    r"|(?<=/)/"  # the second slash of a URL
    r"|(?<=[^\W\d])\.(?=\w)|(?<=\w)\.(?=[^\W\d])"  # the dots of a host name, none of a number
)
_BEGINNING = re.compile(r"\d+(?=[.)](?: |$))|(?=[#+\-=]+(?: |$))")  # of a list, a heading, a rule
_CODE = re.compile(r"[^`|\\]+")
_PICTURE = "data:image/svg+xml;base64,"
_BARE_PIPE = re.compile(r"(?<!\\)\|")


class Markdown(str):
    """Text that is Markdown. What comes from outside is escaped in it."""

    __slots__ = ()


def escape(value: object, longest: int = MAX_LENGTH) -> Markdown:
    """Return a text as Markdown that shows just that text: no link, image, element or table.

    Args:
        value: Text from outside.
        longest: Characters that are shown.
    """
    escaped = _SPECIAL.sub(r"\\\g<0>", clean_text(str(value), longest))
    begins = _BEGINNING.match(escaped)
    if begins:
        escaped = f"{begins[0]}\\{escaped[begins.end() :]}"
    return Markdown(escaped)


def code(value: object, longest: int = _LONGEST_CODE) -> Markdown:
    """Return a key, a URL or a name as code; one that code cannot hold is escaped text.

    Args:
        value: Text from outside.
        longest: Characters that are shown; of a longer one its beginning and its end are.
    """
    text = " ".join(str(value).split())
    if len(text) > longest:
        text = f"{text[: longest // 2]}…{text[-(longest // 2 - 1) :]}"
    text = clean_text(text, longest)
    return Markdown(f"`{text}`") if _CODE.fullmatch(text) else escape(text, longest)


def bold(value: object) -> Markdown:
    """Return a text in bold."""
    return Markdown(f"**{_inline(value)}**")


def write(template: LiteralString, *values: object) -> Markdown:
    """Fill values into a template of Markdown, as `str.format` does; plain strings are escaped.

    Args:
        template: Our own Markdown, with ``{}`` for each value.
        values: `Markdown` stays as it is.
    """
    return Markdown(template.format(*map(_inline, values)))


def join(parts: Iterable[object], between: LiteralString) -> Markdown:
    """Join values; plain strings are escaped."""
    return Markdown(between.join(str(_inline(part)) for part in parts))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], most: int = _ROWS) -> Markdown:
    """Return a table. Plain strings in it are escaped.

    Args:
        columns: Their headings; one that begins with ``>`` is of numbers, at the right.
        rows: Each with as many cells as there are columns.
        most: Rows that are shown; the last line tells how many more there are.

    Raises:
        ValueError: A row has another number of cells.
    """
    lines = [
        _row([column.removeprefix(">") for column in columns]),
        f"|{'|'.join('--:' if column.startswith('>') else '---' for column in columns)}|",
    ]
    hidden = 0
    for cells in rows:
        if len(cells) != len(columns):
            raise ValueError(f"a row of {len(cells)} cells in a table of {len(columns)} columns")
        if len(lines) < most + 2:
            lines.append(_row(cells))
        else:
            hidden += 1
    if hidden:
        lines.append(_row([f"and {hidden:,} more", *[""] * (len(columns) - 1)]))
    return Markdown("\n".join(lines))


def bullets(items: Iterable[object]) -> Markdown:
    """Return a list. Plain strings in it are escaped."""
    return Markdown("\n".join(f"- {_inline(item)}" for item in items))


def picture(uri: str, alt: LiteralString) -> Markdown:
    """Return an image of `tasks.plot`.

    Raises:
        ValueError: It is no such image: a report shows none that a server elsewhere has.
    """
    if not uri.startswith(_PICTURE) or ")" in uri:
        raise ValueError("a report shows SVG in a data URI only")
    return Markdown(f"![{alt}]({uri})")


def document(*blocks: Markdown) -> Markdown:
    """Return a report of blocks: sentences, tables, lists, pictures. Empty ones are left out."""
    return Markdown("\n\n".join(block for block in blocks if block) + "\n")


def publish(text: str, *, key: str, description: str) -> None:
    """Leave a report that a person reads.

    Args:
        text: The report; a plain string is escaped.
        key: The artifact's.
        description: What it is about; a plain string is escaped.
    """
    shown = text if isinstance(text, Markdown) else escape(text, _REPORT)
    create_markdown_artifact(str(shown), key=key, description=str(_inline(description)))


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(value: object) -> str:
    """Return a cell: `Markdown` in it is on one line, and has no pipe that ends the cell."""
    return _BARE_PIPE.sub(r"\\|", " ".join(str(_inline(value)).split()))


def _inline(value: object) -> object:
    return escape(value) if isinstance(value, str) and not isinstance(value, Markdown) else value
