"""``millrace campaign``: write a settings file, and run a worker. The flows add `run`."""

import logging
import os
import threading
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millrace.cli.common import (
    CommandResult,
    NounGroup,
    confirm,
    handle_errors,
    print_result,
    write_template,
)
from millrace.formatting import format_count
from millrace.terminal import echo

if TYPE_CHECKING:
    from millrace.campaigns import TrainingOptions
    from millrace.rented_sharding import ShardingMachineSettings

_PREFIX = "campaign."
_TEMPLATE = """\
# A campaign: a dataset is sharded, workers train on the dataset together, and the weights are
# published. `millrace campaign run THIS_FILE` runs the campaign, or continues a stopped campaign.
# ${NAME} is a variable of the environment, ${NAME:-value} has a default.

name: my-campaign               # a prefix below the bucket's URL
# Destination of all objects. For a trial, a folder of this machine. Otherwise `dataset`, the block
# that `millrace setup` makes from R2_DATASET_* (.env.example), or a URL such as s3://bucket/prefix.
bucket: ${LOCAL_STORAGE_PATH:-/tmp/millrace-campaign}

data:
  dataset: my-text              # a prefix below the bucket's URL
  source:                       # leave `source` out if the dataset is complete
    url: file:///path/to/a/folder       # or s3://bucket/prefix
    kind: files                 # a sample of each file; `jsonl` makes a sample of each line
  sharding: {holdout: 0.01}     # share of the bytes that workers measure the loss on

training:
  command: [python, -m, examples.tiny_lm.train]  # your script: `millrace.campaigns.worker.Worker`
  initial_weights:              # first checkpoint; for a tiny model, make one with
    job: models/tiny            # `python -m examples.tiny_lm.begin URL models/tiny`
    tensors: "model."           # first part of the names of the weights
  workers: 2
  machines:
    kind: local                 # workers are processes of this machine, in `folder`
    folder: .
  # machines:                   # or machines of Vast.ai, which need a Vast.ai Credentials block
  #   kind: rented
  #   request: {gpu: RTX_4090, max_hourly: 0.5, max_total: 20}
  #   repo_url: https://github.com/you/your-program
  #   extras: [gradients]
  epochs: 1                     # each ends with a checkpoint
  windows_per_epoch: 10
  run:
    steps: 30                   # steps of a worker in each window
    window_length: PT20M        # this and `gather` may change while the campaign is stopped
    gather: {quorum: 1}

publish:                        # without `publish`, the weights stay in the bucket above
  job: models/trained
  bucket: ${LOCAL_STORAGE_PATH:-/tmp/millrace-campaign}
"""


class _CampaignGroup(NounGroup):
    """Group of the commands of this module, and of the commands that other packages add."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = entry_points(group="millrace.commands").names
        added = {name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)}
        return sorted({*super().list_commands(ctx), *added})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if command := super().get_command(ctx, cmd_name):
            return command
        for point in entry_points(group="millrace.commands", name=_PREFIX + cmd_name):
            return point.load()
        return None


@click.group(cls=_CampaignGroup)
def campaign() -> None:
    r"""Run a whole campaign: shard, rent, prewarm, train, release, publish, clean.

    \b
    Example:
      millrace campaign init campaign.yaml
      millrace campaign run campaign.yaml
    """


@campaign.command()
@click.argument("path", type=click.Path(path_type=Path), default="campaign.yaml")
@print_result
def init(path: Path) -> CommandResult:
    r"""Write a settings file of a campaign to start from.

    \b
    Example: millrace campaign init campaign.yaml
    """
    write_template(path, _TEMPLATE)
    echo(f"Wrote {path}. Set its source, script and checkpoint, then: millrace campaign run {path}")
    return CommandResult({"path": path})


@campaign.command()
@click.argument("settings", type=click.Path(path_type=Path))
@click.option("--attached", is_flag=True, help="End when standard input ends.")
@handle_errors
def worker(settings: Path, *, attached: bool) -> int:
    r"""Run a worker of a campaign: a training script, with the worker's settings file.

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


def confirm_machines(
    name: str,
    training: "TrainingOptions | None",
    sharding: "ShardingMachineSettings | None",
    *,
    yes: bool,
) -> bool:
    """Ask whether to rent the machines of a campaign, if the campaign rents machines.

    Args:
        name: Name of the campaign.
        training: Options of the training; None without a training.
        sharding: Machines that shard the dataset; None without them.
        yes: Whether the question is skipped.
    """
    from millrace.campaigns import RentedWorkerOptions

    rented: list[str] = []
    total = 0.0
    if sharding is not None:
        rented.append(f"{format_count(sharding.machines, 'machine')} to shard the dataset")
        total += sharding.request.max_total
    if training is not None and isinstance(training.machines, RentedWorkerOptions):
        rented.append(f"{format_count(training.workers, 'machine')} to train")
        total += training.machines.request.max_total
    if not rented:
        return True
    machines = " and then ".join(rented)
    limit = f"${total:.2f} in all"
    return confirm(f"Rent {machines}, of Vast.ai, for {name}, for at most {limit}?", yes=yes)


def _end_with_input() -> None:
    """Kill this process, its descendants and its process group when standard input ends."""
    from millrace.processes import kill_group

    def watch() -> None:
        while os.read(0, 4096):  # the end of the interpreter would wait for `sys.stdin.read`
            pass
        kill_group()

    threading.Thread(target=watch, name="attached", daemon=True).start()
