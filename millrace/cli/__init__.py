"""The command ``millrace`` at a terminal, with one module per noun.

Other packages add commands through the entry point group ``millrace.commands``. A name with a dot,
such as ``campaign.run``, adds a command to a noun.
"""

import io
import logging
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points

import click

from millrace.cli.common import NounGroup

_NOUNS = ("dataset", "swarm", "checkpoint", "gradient", "machine", "bucket", "campaign")
_SHORT = ("init", "plan", "run", "status", "verify")  # commands of `millrace dataset`
_GROUP = "millrace.commands"


class _Nouns(NounGroup):
    """The nouns, the short commands of datasets, and the commands that other packages add."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        added = sorted(name for name in entry_points(group=_GROUP).names if "." not in name)
        return [*_SHORT, *_NOUNS, *added]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _SHORT:
            return import_module("millrace.cli.dataset").dataset.get_command(ctx, cmd_name)
        if cmd_name in _NOUNS:
            return getattr(import_module(f"millrace.cli.{cmd_name}"), cmd_name)
        for point in entry_points(group=_GROUP, name=cmd_name):
            return point.load()
        return None


@click.group(cls=_Nouns, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="millrace")
@click.option("-v", "--verbose", is_flag=True, help="Print the log of the engine.")
def main(*, verbose: bool) -> None:
    r"""Do the work around the object store that training on rented GPUs depends on.

    Datasets have short commands: `millrace run` is `millrace dataset run`.

    \b
    Example:
      millrace init job.yaml
      millrace plan job.yaml
      millrace run job.yaml
    """
    stdout: object = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        with suppress(OSError):  # Python asks some pipes for their position
            stdout.reconfigure(errors="replace")  # a key may have characters that it lacks
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s"
    )
