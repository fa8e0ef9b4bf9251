"""``millrace setup``: put on a Prefect server what the flows need there.

Run again, it changes what the environment now says otherwise, and nothing else.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit
from uuid import UUID

import click
import httpx
from prefect import get_client
from prefect.blocks.core import Block
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events import AutomationCore, CallWebhook, ChangeFlowRunState, EventTrigger
from prefect.events.schemas.automations import Posture
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type
from prefect_aws import AwsCredentials
from pydantic import SecretStr

from blocks.bucket import Bucket, BucketRole
from blocks.environment import BucketSettings, buckets_of
from blocks.hugging_face import HuggingFaceCredentials
from blocks.limits import POOL, TAG, UPLOADS
from blocks.rules import CleaningRules
from blocks.vast import VastCredentials
from millrace import errors
from millrace.storage import Right

_SLOTS = 32
_HEARTBEAT = timedelta(seconds=30)
_ZOMBIES = "millrace-zombies"
_NOTICES = "millrace-notices"
_NOTIFY = "MILLRACE_NOTIFY_URL"
_BROKEN = {  # what a chat takes for a link, an element or a call of people, and what it becomes
    "&": "&amp;", "<": "&lt;", ">": "&gt;", "://": ": //", "www.": "www .", "WWW.": "WWW .",
    "@": "@ ", "](": "] (", "\\n": " ",
    **dict.fromkeys("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", ""),
}  # fmt: skip
_SAID = 'flow_run.state.message | default("", true) | truncate(500, true, "…", 0)' + "".join(
    f' | replace("{each}", "{instead}")' for each, instead in _BROKEN.items()
)
"""The reason of a failure in a notice: stores and machines have a part in it."""
_HOUSEKEEPING = (
    "abort-uploads", "audit-access", "clean-bucket", "clean-versions", "delete-gathers",
    "reap-instances", "verify-checkpoints", "verify-datasets", "wipe-bucket",
)  # fmt: skip

B = TypeVar("B", bound=Block)


class SetupOutcome(StrEnum):
    """Result of creating one object on the server."""

    MADE = "made"
    CHANGED = "changed"
    SAME = "as it was"


@click.command()
@click.option(
    "--role",
    "roles",
    type=click.Choice([role.value for role in BucketRole]),
    multiple=True,
    help="Only this bucket. May be given several times; all three otherwise.",
)
@click.option("--without-buckets", is_flag=True, help="Only what is the same for everybody.")
@click.option(
    "--right",
    "rights",
    type=click.Choice([right.value for right in Right]),
    multiple=True,
    help="Only these credentials, for who may not write, say. Both otherwise.",
)
@click.option(
    "--uploads",
    type=click.IntRange(min=1),
    help=f"Shards that all runs together upload at once (the limit {UPLOADS}); "
    f"{_SLOTS} when it is made.",
)
@click.option("--check", "checking", is_flag=True, help="Try out what the credentials may do.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
def setup(
    *,
    roles: tuple[str, ...],
    without_buckets: bool,
    rights: tuple[str, ...],
    uploads: int | None,
    checking: bool,
    dry_run: bool,
) -> None:
    """Put blocks, limits and a work pool on the Prefect server at PREFECT_API_URL.

    For each role (gradients, dataset, aggregator) the variables R2_ROLE_ACCOUNT_ID,
    R2_ROLE_BUCKET_NAME, R2_ROLE_READ_ACCESS_KEY_ID, R2_ROLE_READ_SECRET_ACCESS_KEY,
    R2_ROLE_WRITE_ACCESS_KEY_ID and R2_ROLE_WRITE_SECRET_ACCESS_KEY make a block that is called
    as the role. R2_ENDPOINT is another S3 endpoint than R2's own. R2_DATASET_BUCKET_LIST names
    further buckets with the same datasets: a JSON list of URLs, or of {"account_id", "name",
    "credentials": {"read": {"access_key_id", "secret_access_key"}}}, or a file with one.
    VAST_API_KEY and HF_TOKEN make blocks if they are set. MILLRACE_NOTIFY_URL is told, by an
    automation, when an audit or a cleaning fails: a webhook of Slack's kind.
    """
    chosen = [] if without_buckets else [BucketRole(role) for role in roles] or list(BucketRole)
    allowed = [Right(right) for right in rights] or list(Right)
    try:
        buckets = buckets_of(os.environ, chosen, allowed)
        with connect() as client:
            for what, outcome in _set_up(client, buckets, uploads, dry_run=dry_run):
                would = "would be " if dry_run and outcome is not SetupOutcome.SAME else ""
                click.echo(f"{what}: {would}{outcome}")
        if checking:
            _try_out(buckets, allowed)
    except errors.MillraceError as error:
        raise click.ClickException(str(error)) from None
    except PrefectHTTPStatusError as error:
        raise click.ClickException(describe_refusal(error)) from None
    click.echo("Next: millrace deploy, then: prefect worker start --pool " + POOL)


def connect() -> SyncPrefectClient:
    """Return a client of the server at PREFECT_API_URL.

    Raises:
        ConfigurationError: No server is named, or it does not answer.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise errors.ConfigurationError(
            "PREFECT_API_URL names no server. Start one with `prefect server start`, and export "
            "PREFECT_API_URL=http://127.0.0.1:4200/api."
        )
    try:
        httpx.get(f"{url}/health", timeout=10).raise_for_status()
    except httpx.HTTPError as error:
        raise errors.UnavailableError(
            f"No Prefect server answers at {url} ({type(error).__name__}). Start it with "
            "`prefect server start`, or correct PREFECT_API_URL."
        ) from None
    if urlsplit(url).hostname not in {"127.0.0.1", "localhost", "::1"} and (
        not PREFECT_API_AUTH_STRING.value()
    ):
        click.echo(
            f"Careful: {url} is asked without a password, and a Prefect server without one gives "
            "every secret to whoever reaches it. Set PREFECT_SERVER_API_AUTH_STRING on the server "
            "and PREFECT_API_AUTH_STRING here.",
            err=True,
        )
    return get_client(sync_client=True)


def describe_refusal(error: PrefectHTTPStatusError) -> str:
    """Return what an error of the server means, as a sentence."""
    code = error.response.status_code
    if code in {401, 403}:
        return "The Prefect server wants a password: set PREFECT_API_AUTH_STRING to it."
    return f"The Prefect server answered {code} to {error.request.method} {error.request.url}."


def _set_up(
    client: SyncPrefectClient,
    buckets: list[BucketSettings],
    uploads: int | None,
    *,
    dry_run: bool,
) -> Iterator[tuple[str, SetupOutcome]]:
    if not dry_run:
        register_types()
    for bucket in buckets:
        yield from _bucket(bucket, dry_run=dry_run)
    for block, name in _accounts(os.environ):
        yield (
            f"block {type(block).get_block_type_slug()}/{name}",
            _save(block, name, dry_run=dry_run)[1],
        )
    yield from make_essentials(client, uploads, dry_run=dry_run)
    if url := os.environ.get(_NOTIFY):
        block, outcome = _save(Webhook(url=SecretStr(url)), _NOTICES, dry_run=dry_run)
        yield f"block webhook/{_NOTICES}", outcome
        saved = block._block_document_id  # noqa: SLF001 - None where a dry run has not saved it
        if saved is not None:
            outcome = _automation(client, notices(saved), dry_run=dry_run)
        yield f"automation {_NOTICES}", outcome


def make_essentials(
    client: SyncPrefectClient, uploads: int | None = None, *, dry_run: bool = False
) -> Iterator[tuple[str, SetupOutcome]]:
    """Make what every run needs on a server and holds no credentials.

    Args:
        client: Client of the server.
        uploads: Slots of the limit on uploads; by default as many as it has, or 32.
        dry_run: Whether only to find out what would be done.

    Yields:
        Each thing, and what became of it.
    """
    yield f"limit {UPLOADS}", _limit(client, uploads, dry_run=dry_run)
    yield f"work pool {POOL}", _pool(client, dry_run=dry_run)
    yield f"automation {_ZOMBIES}", _automation(client, zombies(), dry_run=dry_run)


def register_types() -> None:
    """Register the types of our blocks, and keep their forms up to date."""
    for kind in (AwsCredentials, Bucket, CleaningRules, HuggingFaceCredentials, VastCredentials):
        kind.register_type_and_schema()


def _bucket(wanted: BucketSettings, *, dry_run: bool) -> Iterator[tuple[str, SetupOutcome]]:
    credentials: dict[Right, AwsCredentials] = {}
    for right, pair in wanted.pairs.items():
        name = f"{wanted.name}-{right}"
        credentials[right], outcome = _save(pair, name, dry_run=dry_run)
        yield f"block aws-credentials/{name}", outcome
    _, outcome = _save(wanted.block(credentials), wanted.name, dry_run=dry_run)
    yield f"block millrace-bucket/{wanted.name}", outcome


def _accounts(environ: Mapping[str, str]) -> Iterator[tuple[Block, str]]:
    if key := environ.get("VAST_API_KEY"):
        yield VastCredentials(api_key=SecretStr(key)), "vast"
    if token := environ.get("HF_TOKEN"):
        yield HuggingFaceCredentials(token=SecretStr(token)), "hugging-face"


def _save(block: B, name: str, *, dry_run: bool) -> tuple[B, SetupOutcome]:
    """Save a block unless it is there already, just so."""
    kind = type(block)
    try:
        there = cast("B", kind.load(name))
    except ValueError:
        there = None
    if there is not None and _content(there) == _content(block):
        return there, SetupOutcome.SAME
    if not dry_run:
        block.save(name, overwrite=True)
    return block, SetupOutcome.MADE if there is None else SetupOutcome.CHANGED


def _content(block: Block) -> Any:
    return _bare(block.model_dump(mode="json", context={"include_secrets": True}))


def _limit(client: SyncPrefectClient, uploads: int | None, *, dry_run: bool) -> SetupOutcome:
    try:
        there = client.read_global_concurrency_limit_by_name(UPLOADS).limit
    except ObjectNotFound:
        there = None
    wanted = uploads or there or _SLOTS
    if there == wanted:
        return SetupOutcome.SAME
    if not dry_run:
        if there is None:
            client.create_global_concurrency_limit(
                GlobalConcurrencyLimitCreate(name=UPLOADS, limit=wanted, active=True)
            )
        else:
            client.upsert_global_concurrency_limit_by_name(UPLOADS, wanted)
    return SetupOutcome.MADE if there is None else SetupOutcome.CHANGED


def _pool(client: SyncPrefectClient, *, dry_run: bool) -> SetupOutcome:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        if not dry_run:
            template = asyncio.run(get_default_base_job_template_for_infrastructure_type("process"))
            client.create_work_pool(
                WorkPoolCreate(name=POOL, type="process", base_job_template=template or {})
            )
        return SetupOutcome.MADE
    return SetupOutcome.SAME


def zombies() -> AutomationCore:
    """Return an automation that ends flow runs of ours whose process has died silently.

    Only runs with our tag: their deployments have them send a heartbeat every 30 seconds, and
    other people's may be slower.
    """
    return AutomationCore(
        name=_ZOMBIES,
        description="Ends a Millrace run that has not been heard of for a minute and a half.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},  # pyright: ignore[reportArgumentType]
            match_related={  # pyright: ignore[reportArgumentType]
                "prefect.resource.role": "tag",
                "prefect.resource.id": f"prefect.tag.{TAG}",
            },
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=3 * _HEARTBEAT,
        ),
        actions=[  # pyright: ignore[reportArgumentType]
            ChangeFlowRunState(
                name="Crashed",
                state=StateType.CRASHED,
                force=False,
                message="Its process is gone. Start it again: it goes on where it was.",
            )
        ],
    )


def notices(webhook: UUID) -> AutomationCore:
    """Return an automation that notifies people when a housekeeping flow has failed.

    An audit fails if a credential can do what it must not, or cannot what it must; a cleaning if
    an object could not be deleted.

    Args:
        webhook: The id of the block of the URL that is told.
    """
    return AutomationCore(
        name=_NOTICES,
        description="Tells a webhook when an audit, a cleaning or a verification has failed.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},  # pyright: ignore[reportArgumentType]
            match_related={  # pyright: ignore[reportArgumentType]
                "prefect.resource.role": "flow",
                "prefect.resource.name": list(_HOUSEKEEPING),
            },
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[  # pyright: ignore[reportArgumentType]
            CallWebhook(
                block_document_id=webhook,
                # Slack, Mattermost and Discord (at its URL with /slack) read `text`.
                payload='{"text": {{ ("Millrace: " ~ flow.name ~ " (" ~ flow_run.name ~ ") has '
                'failed. " ~ (' + _SAID + ') ~ " " ~ (flow_run | ui_url)) | tojson }}}',
            )
        ],
    )


def _automation(
    client: SyncPrefectClient, wanted: AutomationCore, *, dry_run: bool
) -> SetupOutcome:
    there = client.read_automations_by_name(wanted.name)
    fields: Callable[[AutomationCore], Any] = lambda a: a.model_dump(  # noqa: E731
        mode="json", include={"name", "description", "enabled", "trigger", "actions"}
    )
    if there and _bare(fields(there[0])) == _bare(fields(wanted)):
        return SetupOutcome.SAME
    if not dry_run:
        if there:
            client.update_automation(there[0].id, wanted)
        else:
            client.create_automation(wanted)
    return SetupOutcome.CHANGED if there else SetupOutcome.MADE


def _bare(data: Any) -> Any:
    """Only what a person could have said: without the ids that the server gives, in one order."""
    match data:
        case dict():
            return {k: _bare(v) for k, v in data.items() if k != "id" and k[0] != "_"}
        case list():
            return sorted((_bare(item) for item in data), key=repr)
        case _:
            return data


def _try_out(buckets: list[BucketSettings], rights: list[Right]) -> None:
    for bucket in buckets:
        for right in rights:
            bucket.block(bucket.pairs).check(right)
            click.echo(f"{bucket.name}: the {right} credentials do what they are for")
