"""Output of commands: texts from outside cannot move the cursor, colour or link in a terminal."""

from typing import TYPE_CHECKING, Any

import click

from millrace.formatting import replace_unprintable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def echo(line: object, *, err: bool = False) -> None:
    """Print a line. Control characters and bidirectional overrides in it become U+FFFD.

    Args:
        line: What is printed; a line break in it, as object keys may have, begins no new line.
        err: Print to standard error.
    """
    click.echo(replace_unprintable(str(line)), err=err)


def echo_text(text: object, *, err: bool = False) -> None:
    """Print a text of several lines. Its control characters but line breaks become U+FFFD."""
    click.echo("\n".join(map(replace_unprintable, str(text).split("\n"))), err=err)


def make_console(*, stderr: bool = False) -> "Console":
    """Return a console of rich's that takes brackets and colons in a text for what they are."""
    from rich.console import Console  # noqa: PLC0415 - commands that draw nothing start sooner

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
