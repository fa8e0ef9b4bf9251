"""``millrace deploy``: put the flows on a Prefect server, and first what their deployments need.

Prefect looks for the work pool before anything of ours runs, so `prefect deploy --all` alone ends
with an error on a server that was not set up.
"""

import subprocess
import sys
from pathlib import Path

import click
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from blocks.bucket import Bucket, BucketRole
from blocks.limits import POOL
from blocks.setup import SetupOutcome, connect, describe_refusal, make_essentials, register_types
from millrace import errors

_FILE = Path("prefect.yaml")


@click.command()
def deploy() -> None:
    """Deploy all flows of prefect.yaml to the Prefect server at PREFECT_API_URL.

    Makes what is missing and is the same for everybody: types of blocks, limits, the work pool.
    Blocks hold credentials: `millrace setup` makes them, before or after.
    """
    try:
        if not _FILE.is_file():
            raise errors.ConfigurationError(
                f"There is no {_FILE} in {Path.cwd()}. Run this in the folder that Millrace was "
                "cloned to."
            )
        with connect() as client:
            register_types()
            for what, outcome in make_essentials(client):
                if outcome is not SetupOutcome.SAME:
                    click.echo(f"{what}: {outcome}")
            missing = _missing_blocks(client)
    except errors.MillraceError as error:
        raise click.ClickException(str(error)) from None
    except PrefectHTTPStatusError as error:
        raise click.ClickException(describe_refusal(error)) from None
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    if subprocess.run(command, check=False).returncode:
        raise click.ClickException("Not everything was deployed: Prefect says above what failed.")
    if missing:
        click.echo(
            f"Missing blocks: {', '.join(missing)}. Runs that need them say so and do nothing, or "
            "fail. `millrace setup` makes them from the variables of .env.example."
        )
    click.echo("Next: prefect worker start --pool " + POOL)


def _missing_blocks(client: SyncPrefectClient) -> list[str]:
    """Return the blocks of buckets that prefect.yaml names and the server does not have."""
    slug, missing = Bucket.get_block_type_slug(), list[str]()
    for role in BucketRole:
        try:
            client.read_block_document_by_name(role.value, slug, include_secrets=False)
        except ObjectNotFound:
            missing.append(f"{slug}/{role.value}")
    return missing
