"""Command line of the flow `campaign`: ``millrace campaign run`` runs a plan from a file here.

The command is in this package, since `millrace` never imports prefect.
"""

import logging
from pathlib import Path
from typing import Any

import click

from millrace.cli.campaign import confirm_machines
from millrace.cli.common import CommandResult, add_yes_option, print_result, take_settings_file
from millrace.cli.machine import interrupt_on_signal
from millrace.errors import ConfigurationError
from millrace.settings import read_settings_file, validate_settings
from millrace.terminal import echo_text

_MAX_RETRIES = 8  # of a request to a server that is away, as in prefect.yaml: more than 6 minutes
_FLOW_NAME = "campaign"  # of the flow
_FAILED_PREFIX = "Finished in state Failed"
_HIDDEN_PREFIXES = (
    "Crash detected!",
    "Encountered exception during execution",
    "Finished in state Crashed",
    _FAILED_PREFIX,
)


@click.command()
@take_settings_file("campaign.yaml")
@add_yes_option
@print_result
def run(settings: Path, *, yes: bool) -> CommandResult:
    r"""Run a campaign here, or go on with one that was stopped.

    Before the command rents machines, it shows the limit of their costs, and asks.

    \b
    Example: millrace campaign run campaign.yaml
    """
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from flows.campaign import run_campaign
    from flows.local_server import start_local_server
    from millrace.rentals import RentalSupervisor
    from tasks.campaign_tasks import describe_campaign

    interrupt_on_signal(RentalSupervisor.has_any_machines)
    for handler in _find_console_handlers():
        handler.addFilter(should_print)
    data = read_settings_file(settings, template="millrace campaign init")
    plan = None if "$ref" in str(data) else read_campaign_plan(settings)  # blocks: on the server
    with start_local_server(), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: _MAX_RETRIES}):
        plan = plan or read_campaign_plan(settings)
        sharding = plan.data.machines if plan.data else None
        if not confirm_machines(plan.name, plan.training, sharding, yes=yes):
            return CommandResult({"campaign": plan.name}, 1)
        found = run_campaign(plan)
    echo_text(describe_campaign(found, with_picture=False))
    return CommandResult(found)


def _find_console_handlers() -> list[logging.Handler]:
    """Return the handlers that print, of this command's logging and of Prefect's."""
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    return [
        handler
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
    ]


def should_print(record: logging.LogRecord) -> bool:
    """Decide whether the command prints a line of Prefect's log.

    The command itself prints at its end why the campaign failed, so its own run's failure is left
    out. The failure of another run is printed: the campaign may go on after it. Tracebacks, and
    failures of tasks, which fail their run, are left out; the server has all lines.
    """
    message = record.getMessage()
    if message.startswith(_FAILED_PREFIX) and record.name == "prefect.flow_runs":
        return getattr(record, "flow_name", _FLOW_NAME) != _FLOW_NAME
    is_last_try = message.startswith("Task run failed") and record.exc_info is not None
    return not is_last_try and not message.startswith(_HIDDEN_PREFIXES)


def read_campaign_plan(path: Path) -> Any:
    """Read a campaign's plan from a YAML or TOML file; ``$ref`` names a block, as for a deployment.

    Raises:
        ConfigurationError: There is no such file, block or value.
    """
    from flows.campaign_plan import CampaignPlan

    return validate_settings(
        CampaignPlan,
        _load_blocks(read_settings_file(path, template="millrace campaign init")),
        source=str(path),
    )


def _load_blocks(value: Any) -> Any:
    from prefect.blocks.core import Block

    from blocks.loading import find_block

    match value:
        case {"$ref": {"block_document_slug": str(slug)}, **rest} if not rest:
            block = find_block(Block, slug)
            if block is None:
                raise ConfigurationError(
                    f"There is no block {slug}: write TYPE/NAME of a block of this server, such as "
                    "millrace-bucket/gradients."
                )
            return block
        case dict():
            return {name: _load_blocks(each) for name, each in value.items()}
        case list():
            return [_load_blocks(each) for each in value]
        case _:
            return value
