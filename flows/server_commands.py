"""Commands ``millrace setup`` and ``millrace deploy``, which prepare a Prefect server.

`millrace --help` imports this module. Prefect takes seconds to import, so only the commands do.
"""

import click

from millrace.cli.common import CommandResult, print_result
from millrace.storage import Right

_ROLES = ("gradients", "dataset", "aggregator")  # of `blocks.BucketRole`, which imports prefect


@click.command()
@click.option(
    "--role",
    "roles",
    type=click.Choice(_ROLES),
    multiple=True,
    help="Make the block of this bucket only. May be given several times. By default all three.",
)
@click.option("--without-buckets", is_flag=True, help="Make no blocks of buckets.")
@click.option(
    "--right",
    "rights",
    type=click.Choice([right.value for right in Right]),
    multiple=True,
    help="Make credentials for this right only, such as `read` for a user without write access. "
    "By default both.",
)
@click.option(
    "--uploads",
    type=click.IntRange(min=1),
    help="Number of shards that all runs together upload at once (the limit millrace-uploads). By "
    "default the limit stays as it is; a new one is 32.",
)
@click.option("--check", is_flag=True, help="Check the rights of the credentials.")
@click.option("--dry-run", is_flag=True, help="Show the changes, and change nothing.")
@print_result
def setup(
    *,
    roles: tuple[str, ...],
    without_buckets: bool,
    rights: tuple[str, ...],
    uploads: int | None,
    check: bool,
    dry_run: bool,
) -> CommandResult:
    """Put blocks, limits and a work pool on the Prefect server at PREFECT_API_URL.

    For each role (gradients, dataset, aggregator) the variables R2_ROLE_ACCOUNT_ID,
    R2_ROLE_BUCKET_NAME, R2_ROLE_READ_ACCESS_KEY_ID, R2_ROLE_READ_SECRET_ACCESS_KEY,
    R2_ROLE_WRITE_ACCESS_KEY_ID and R2_ROLE_WRITE_SECRET_ACCESS_KEY make a block with the
    name of the role. R2_ENDPOINT names another S3 endpoint than that of R2.

    R2_DATASET_BUCKET_LIST names further buckets with the same datasets: a JSON list, or the path of
    a file with one. An item is a URL, or {"account_id", "name", "credentials": {"read":
    {"access_key_id", "secret_access_key"}}}.

    VAST_API_KEY and HF_TOKEN make blocks if they are set. MILLRACE_NOTIFY_URL is a webhook that
    takes messages as Slack does: an automation calls it when an audit, a cleaning or a verification
    fails, or an epoch has no checkpoint.
    """
    from blocks.bucket import BucketRole
    from blocks.setup import set_up_server

    chosen = [] if without_buckets else [BucketRole(role) for role in roles or _ROLES]
    outcomes = set_up_server(
        chosen,
        [Right(right) for right in rights] or list(Right),
        uploads,
        check=check,
        dry_run=dry_run,
    )
    return CommandResult({"objects": outcomes, "dry_run": dry_run})


@click.command()
@print_result
def deploy() -> CommandResult:
    """Deploy all flows of prefect.yaml to the Prefect server at PREFECT_API_URL.

    The command first creates missing types of blocks, limits and the work pool. Blocks hold
    credentials: `millrace setup` creates them, before or after.
    """
    from blocks.deploy import deploy_flows

    result = deploy_flows()
    return CommandResult(result, 0 if result.is_complete else 1)
