"""The command ``millrace campaign``: a campaign from a file, run here."""

import signal
from pathlib import Path
from typing import Any

import click
from prefect.blocks.core import Block

from millrace.cli import said
from millrace.errors import ConfigurationError


@click.command()
@click.argument("plan", type=click.Path(path_type=Path), default="campaign.yaml")
@said
def campaign(plan: Path) -> int:
    """Run a campaign here: shard, rent, warm, train, give back, hand over, clean."""
    from flows.campaign import campaign as run
    from tasks.campaigning import describe

    wanted = read(plan)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # machines go back also then
    found = run(wanted)
    click.echo(describe(found, picture=False))
    return 0


def read(path: Path) -> Any:
    """A campaign's plan from a YAML or TOML file; ``$ref`` names a block, as for a deployment.

    Raises:
        ConfigurationError: There is no such file, block or value.
    """
    from flows.campaign_plan import Campaign
    from millrace.settings import load_data, validated

    return validated(Campaign, _with_blocks(load_data(path)), where=str(path))


def _with_blocks(value: Any) -> Any:
    match value:
        case {"$ref": {"block_document_slug": str(slug)}, **rest} if not rest:
            try:
                return Block.load(slug)
            except ValueError as error:
                raise ConfigurationError(f"There is no block {slug}: {error}") from None
        case dict():
            return {name: _with_blocks(each) for name, each in value.items()}
        case list():
            return [_with_blocks(each) for each in value]
        case _:
            return value
