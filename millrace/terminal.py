"""Print the output of commands. Text from outside cannot control the terminal."""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from millrace.formatting import replace_unprintable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_SURROGATE = re.compile("[\ud800-\udfff]")  # such as a byte that is not UTF-8 in a name
_FILE_WIDTH = 100_000  # characters of a line that no terminal breaks


class _Output:
    """State of the output: whether standard output is reserved for a program."""

    is_stdout_reserved = False


@contextmanager
def reserve_stdout(is_reserved: bool) -> Generator[None]:  # noqa: FBT001 - it is one value
    """Print text for people to standard error while the block lasts, if stdout is reserved."""
    _Output.is_stdout_reserved = is_reserved
    try:
        yield
    finally:
        _Output.is_stdout_reserved = False


def is_stdout_reserved() -> bool:
    """Decide whether standard output is reserved for a program, which reads JSON."""
    return _Output.is_stdout_reserved


def print_json(data: object) -> None:
    """Print a value as JSON: records, dataclasses, times, paths and plain values."""
    import orjson  # noqa: PLC0415 - commands that print no JSON start sooner

    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    try:
        text = orjson.dumps(data, default=_convert_value, option=options)
    except TypeError:  # a text is not UTF-8, such as the name of a file
        text = orjson.dumps(_replace_surrogates(data), default=_convert_value, option=options)
    click.echo(text)


def _convert_value(value: object) -> object:
    """Convert a value of a type that orjson does not know to a type that orjson knows."""
    from pydantic import BaseModel  # noqa: PLC0415 - as above

    match value:
        case BaseModel():
            return value.model_dump(mode="json")
        case timedelta():
            return value.total_seconds()
        case set() | frozenset():
            return sorted(_SURROGATE.sub("\ufffd", str(each)) for each in value)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        case _:
            return _SURROGATE.sub("\ufffd", str(value))


def _replace_surrogates(value: object) -> object:
    """Return a value for JSON in which U+FFFD stands for what is not UTF-8 in the texts."""
    from pydantic import BaseModel  # noqa: PLC0415 - as above

    match value:
        case str():
            return _SURROGATE.sub("\ufffd", value)
        case BaseModel():
            return _replace_surrogates(value.model_dump(mode="json"))
        case dict():
            return {_replace_surrogates(k): _replace_surrogates(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        case list() | tuple():
            return [_replace_surrogates(each) for each in value]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        case _ if is_dataclass(value) and not isinstance(value, type):
            found = {one.name: getattr(value, one.name) for one in fields(value)}
            return {
                name: _replace_surrogates(each)
                for name, each in found.items()
                if not name.startswith("_")  # as orjson does
            }
        case _:
            return value


def echo(line: object, *, err: bool = False) -> None:
    """Print a line. Control characters and bidirectional overrides become U+FFFD.

    Args:
        line: Text of the line. A line break, which an object's key may contain, also becomes
            U+FFFD.
        err: Whether to print to standard error.
    """
    click.echo(replace_unprintable(str(line)), err=err or _Output.is_stdout_reserved)


def echo_text(text: object, *, err: bool = False) -> None:
    """Print a text of several lines. Control characters except line breaks become U+FFFD."""
    lines = map(replace_unprintable, str(text).split("\n"))
    click.echo("\n".join(lines), err=err or _Output.is_stdout_reserved)


def make_console(*, stderr: bool = False) -> "Console":
    """Return a console of rich that prints brackets and colons unchanged.

    Lines of a pipe or a file are not broken, unless COLUMNS is set.
    """
    from rich.console import Console  # noqa: PLC0415 - commands that draw nothing start sooner

    stderr = stderr or _Output.is_stdout_reserved
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not (console.is_terminal or os.environ.get("COLUMNS", "").isdigit()):
        console.width = _FILE_WIDTH
    return console


def make_table(*columns: str) -> "Table":
    """Return a table of rich with cells of plain text. All columns but the first align right.

    A cell that is too long for the terminal is continued on the next line.
    """
    from rich import box  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415

    class PlainTable(Table):
        def add_row(self, *cells: Any, **style: Any) -> None:
            super().add_row(*(replace_unprintable(str(cell)) for cell in cells), **style)

    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(
            replace_unprintable(column), justify="right" if number else "left", overflow="fold"
        )
    return table
