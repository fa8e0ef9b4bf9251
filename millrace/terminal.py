"""Output of commands: texts from outside cannot move the cursor, colour or link in a terminal."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from millrace.formatting import replace_unprintable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class _Output:
    """Stream that takes what people read."""

    is_stdout_reserved = False


@contextmanager
def reserve_stdout(is_reserved: bool) -> Generator[None]:  # noqa: FBT001 - it is one value
    """Send what people read to standard error meanwhile, as standard output is for programs."""
    _Output.is_stdout_reserved = is_reserved
    try:
        yield
    finally:
        _Output.is_stdout_reserved = False


def print_json(data: object) -> None:
    """Print a value as JSON: records, dataclasses, times, paths and plain values."""
    import orjson  # noqa: PLC0415 - commands that print no JSON start sooner

    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    click.echo(orjson.dumps(data, default=_convert_value, option=options))


def _convert_value(value: object) -> object:
    """Return a value that orjson does not know as one that it knows."""
    from pydantic import BaseModel  # noqa: PLC0415 - as above

    match value:
        case BaseModel():
            return value.model_dump(mode="json")
        case timedelta():
            return value.total_seconds()
        case set() | frozenset():
            return sorted(str(each) for each in value)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        case _:
            return str(value)


def echo(line: object, *, err: bool = False) -> None:
    """Print a line. Control characters and bidirectional overrides in it become U+FFFD.

    Args:
        line: What is printed; a line break in it, as object keys may have, begins no new line.
        err: Print to standard error.
    """
    click.echo(replace_unprintable(str(line)), err=err or _Output.is_stdout_reserved)


def echo_text(text: object, *, err: bool = False) -> None:
    """Print a text of several lines. Its control characters but line breaks become U+FFFD."""
    lines = map(replace_unprintable, str(text).split("\n"))
    click.echo("\n".join(lines), err=err or _Output.is_stdout_reserved)


def make_console(*, stderr: bool = False) -> "Console":
    """Return a console of rich's that takes brackets and colons in a text for what they are."""
    from rich.console import Console  # noqa: PLC0415 - commands that draw nothing start sooner

    stderr = stderr or _Output.is_stdout_reserved
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def make_table(*columns: str) -> "Table":
    """Return a table of rich's whose cells are just text; numbers follow the first column."""
    from rich import box  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415

    class PlainTable(Table):
        def add_row(self, *cells: Any, **style: Any) -> None:
            super().add_row(*(replace_unprintable(str(cell)) for cell in cells), **style)

    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(replace_unprintable(column), justify="right" if number else "left")
    return table
