"""``millrace campaign``: a worker of a campaign; `run` and `init` come from the flows."""

import logging
import os
import threading
from importlib.metadata import entry_points
from pathlib import Path

import click

from millrace.cli.common import NounGroup, handle_errors

_PREFIX = "campaign."


class _CampaignGroup(NounGroup):
    """The command `worker`, and those that other packages add."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = entry_points(group="millrace.commands").names
        added = {name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)}
        return sorted({*super().list_commands(ctx), *added})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for point in entry_points(group="millrace.commands", name=_PREFIX + cmd_name):
            return point.load()
        return super().get_command(ctx, cmd_name)


@click.group(cls=_CampaignGroup)
def campaign() -> None:
    r"""Run a whole campaign: shard, rent, prewarm, train, release, publish, clean.

    \b
    Example:
      millrace campaign init campaign.yaml
      millrace campaign run campaign.yaml
    """


@campaign.command()
@click.argument("settings", type=click.Path(path_type=Path))
@click.option("--attached", is_flag=True, help="End when standard input ends.")
@handle_errors
def worker(settings: Path, *, attached: bool) -> int:
    r"""Run a worker of a campaign: its training script, by the worker's settings file.

    A campaign starts this command on each of its machines.

    \b
    Example: millrace campaign worker worker.yaml
    """
    from millrace.campaigns.worker import launch_worker
    from millrace.processes import adopt_orphans

    adopt_orphans()
    if attached:
        _end_with_input()
    logging.getLogger("millrace").setLevel(logging.INFO)
    return launch_worker(settings)


def _end_with_input() -> None:
    """End this process, all that it has started, and all of its group when standard input does."""
    from millrace.processes import kill_group

    def watch() -> None:
        while os.read(0, 4096):  # not by a reader that the end of the interpreter waits for
            pass
        kill_group()

    threading.Thread(target=watch, name="attached", daemon=True).start()
