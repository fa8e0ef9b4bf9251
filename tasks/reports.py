"""Make reports of Markdown that is safe to show. No other module gives Markdown to Prefect.

Much of a report comes from outside: object keys, output of stores and machines, names, reasons.
`format_markdown`, `format_table` and `publish_report` escape and cut every plain string. Only
`Markdown`, which the functions of this module make, stays unchanged.
"""

import re
from collections.abc import Iterable, Sequence
from typing import LiteralString

from prefect.artifacts import create_markdown_artifact

from millrace.formatting import MAX_LENGTH, clean_text
from millrace.storage import ObjectFailure

SHOWN_ROWS = 50
"""Keys and errors in a report."""

_MAX_CODE_LENGTH = 200
_MAX_ROWS = 500  # of a table
_MAX_PLAIN_LENGTH = 2000  # characters of a report that is not Markdown
_SPECIAL = re.compile(
    r"[\\`*_\[\]<>|&~@]"
    r"|(?<=/)/"  # the second slash of a URL
    r"|(?<=[^\W\d])\.(?=\w)|(?<=\w)\.(?=[^\W\d])"  # a dot of a host name, not of a number
)
_BLOCK_MARKER = re.compile(
    r"\d+(?=[.)](?: |$))|(?=[#+\-=]+(?: |$))"
)  # marker of a list, a heading or a horizontal rule
_CODE = re.compile(r"[^`|\\]+")
_PLOT_PREFIX = "data:image/svg+xml;base64,"
_LINK = re.compile(r"https?://[\w.:-]+(/[\w.~/-]*)?")
_BARE_PIPE = re.compile(r"(?<!\\)\|")


class Markdown(str):
    """Text that is Markdown. All text from outside in the Markdown is escaped."""

    __slots__ = ()


def escape(value: object, max_length: int = MAX_LENGTH) -> Markdown:
    """Return a text as Markdown that shows only the text: no link, image, element or table.

    Args:
        value: Text from outside.
        max_length: Characters that are shown.
    """
    escaped = _SPECIAL.sub(r"\\\g<0>", clean_text(str(value), max_length))
    begins = _BLOCK_MARKER.match(escaped)
    if begins:
        escaped = f"{begins[0]}\\{escaped[begins.end() :]}"
    return Markdown(escaped)


def format_code(value: object, max_length: int = _MAX_CODE_LENGTH) -> Markdown:
    """Return a key, a URL or a name as code, or as escaped text if code cannot hold the name.

    Args:
        value: Text from outside.
        max_length: Characters that are shown; a longer text is cut in its middle.
    """
    text = " ".join(str(value).split())
    if len(text) > max_length:
        text = f"{text[: max_length // 2]}…{text[-(max_length // 2 - 1) :]}"
    text = clean_text(text, max_length)
    return Markdown(f"`{text}`") if _CODE.fullmatch(text) else escape(text, max_length)


def format_link(text: object, url: str) -> Markdown:
    """Return a link to a page that Millrace itself names, never a URL from outside.

    Raises:
        ValueError: The URL is not that of a web page, or has characters that end a link.
    """
    if not _LINK.fullmatch(url):
        raise ValueError(f"a report links to plain web pages only, not to {url!r}")
    return Markdown(f"[{_escape_plain(text)}]({url})")


def format_bold(value: object) -> Markdown:
    """Return a text in bold."""
    return Markdown(f"**{_escape_plain(value)}**")


def format_markdown(template: LiteralString, *values: object) -> Markdown:
    """Fill values into a template of Markdown, as `str.format` does; plain strings are escaped.

    Args:
        template: Markdown of this code, with ``{}`` for each value.
        values: Values to fill in. `Markdown` stays unchanged.
    """
    return Markdown(template.format(*map(_escape_plain, values)))


def join(parts: Iterable[object], separator: LiteralString) -> Markdown:
    """Join values; plain strings are escaped."""
    return Markdown(separator.join(str(_escape_plain(part)) for part in parts))


def format_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], max_rows: int = _MAX_ROWS
) -> Markdown:
    """Return a table. Plain strings in it are escaped.

    Args:
        columns: Headings; a heading that begins with ``>`` is aligned right, for numbers.
        rows: Rows, each with as many cells as there are columns.
        max_rows: Number of rows that are shown. The last line has the number of hidden rows.

    Raises:
        ValueError: A row has another number of cells.
    """
    lines = [
        _format_row([column.removeprefix(">") for column in columns]),
        f"|{'|'.join('--:' if column.startswith('>') else '---' for column in columns)}|",
    ]
    hidden = 0
    for cells in rows:
        if len(cells) != len(columns):
            raise ValueError(f"a row of {len(cells)} cells in a table of {len(columns)} columns")
        if len(lines) < max_rows + 2:
            lines.append(_format_row(cells))
        else:
            hidden += 1
    if hidden:
        lines.append(_format_row([f"and {hidden:,} more", *[""] * (len(columns) - 1)]))
    return Markdown("\n".join(lines))


def tabulate_failures(failures: Sequence[ObjectFailure]) -> Markdown:
    """Return a table of objects that a run failed for; empty without any."""
    rows = [(format_code(one.key), one.reason) for one in failures]
    return format_table(("Object", "Error"), rows, SHOWN_ROWS) if rows else Markdown()


def format_unfinished(end: str) -> Markdown:
    """Return a sentence about the error that ended a run before all was done; empty without one."""
    if not end:
        return Markdown()
    return format_markdown("**The run ended before all was verified:** {}", end)


def format_bullets(items: Iterable[object]) -> Markdown:
    """Return a list. Plain strings in it are escaped."""
    return Markdown("\n".join(f"- {_escape_plain(item)}" for item in items))


def format_image(uri: str, alt: LiteralString) -> Markdown:
    """Return an image of `tasks.plot`.

    Raises:
        ValueError: The URI is not such an image. A report never loads an image from a server.
    """
    if not uri.startswith(_PLOT_PREFIX) or ")" in uri:
        raise ValueError("a report shows SVG in a data URI only")
    return Markdown(f"![{alt}]({uri})")


def join_blocks(*blocks: Markdown) -> Markdown:
    """Return a report of blocks: sentences, tables, lists, pictures. Empty blocks are left out."""
    return Markdown("\n\n".join(block for block in blocks if block) + "\n")


def publish_report(text: str, *, key: str, description: str) -> None:
    """Publish a report as a Markdown artifact.

    Args:
        text: Text of the report; a plain string is escaped.
        key: Key of the artifact.
        description: Description of the artifact; a plain string is escaped.
    """
    shown = text if isinstance(text, Markdown) else escape(text, _MAX_PLAIN_LENGTH)
    create_markdown_artifact(str(shown), key=key, description=str(_escape_plain(description)))


def _format_row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(_format_cell(cell) for cell in cells)} |"


def _format_cell(value: object) -> str:
    """Return a cell on one line, without a pipe that would end the cell."""
    return _BARE_PIPE.sub(r"\\|", " ".join(str(_escape_plain(value)).split()))


def _escape_plain(value: object) -> object:
    return escape(value) if isinstance(value, str) and not isinstance(value, Markdown) else value
