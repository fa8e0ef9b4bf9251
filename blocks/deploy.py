"""``millrace deploy``: deploy the flows to a Prefect server, with the objects that they need.

Prefect looks for the work pool first, so `prefect deploy --all` alone ends with an error on a
server that was not set up.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound

from blocks.bucket import Bucket, BucketRole
from blocks.server_names import WORK_POOL
from blocks.setup import SetupOutcome, connect, make_essentials, register_types, report_errors
from millrace import errors

_DEPLOYMENTS_FILE = Path("prefect.yaml")
_DEPLOYED = re.compile(r"Deployment '(.+)' successfully created")


def deploy_flows() -> None:
    """Deploy all flows of prefect.yaml, after the objects that they need."""
    with report_errors():
        if not _DEPLOYMENTS_FILE.is_file():
            raise errors.ConfigurationError(
                f"There is no {_DEPLOYMENTS_FILE} in {Path.cwd()}. Run this command in the clone "
                "of Millrace."
            )
        with connect() as client:
            register_types()
            for item, outcome in make_essentials(client):
                if outcome is not SetupOutcome.UNCHANGED:
                    click.echo(f"{item}: {outcome}")
            missing = _find_missing_blocks(client)
    if not _deploy_all():
        raise click.ClickException("Some flows were not deployed: see the errors of Prefect above.")
    if missing:
        click.echo(
            f"Missing blocks: {', '.join(missing)}. Runs that need them say so and do nothing, or "
            "fail. `millrace setup` makes them from the variables of .env.example."
        )
    click.echo("Next: prefect worker start --pool " + WORK_POOL)


def _deploy_all() -> bool:
    """Deploy the flows with Prefect's command, and print a line for each.

    Prefect prints twenty lines for each, which are shown if it fails.

    Returns:
        Whether Prefect has deployed all.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    wide = os.environ | {"COLUMNS": "500"}  # no line is broken
    shown: list[str] = []
    with subprocess.Popen(
        command, env=wide, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            shown.append(line)
            if found := _DEPLOYED.search(line):
                click.echo(f"{found[1]}: deployed")
    if process.returncode:
        click.echo("".join(shown))
    return not process.returncode


def _find_missing_blocks(client: SyncPrefectClient) -> list[str]:
    """Return the blocks of buckets that prefect.yaml names and the server does not have."""
    slug, missing = Bucket.get_block_type_slug(), list[str]()
    for role in BucketRole:
        try:
            client.read_block_document_by_name(role.value, slug, include_secrets=False)
        except ObjectNotFound:
            missing.append(f"{slug}/{role.value}")
    return missing
