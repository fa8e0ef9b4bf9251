"""``millrace setup``: create the objects that the flows need on a Prefect server.

A second run changes only objects that differ from the environment.
"""

import asyncio
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import click
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
from pydantic import SecretStr, ValidationError

from blocks.bucket import Bucket, BucketRole
from blocks.environment import BucketSettings, check_web_url, read_buckets
from blocks.hugging_face import HuggingFaceCredentials
from blocks.loading import describe_faults, load_with_faults
from blocks.rules import CleaningRules
from blocks.server_names import TAG, UPLOAD_LIMIT, WORK_POOL
from blocks.vast import VastCredentials
from millrace import errors
from millrace.storage import Right
from millrace.terminal import echo

_DEFAULT_SLOTS = 32
_REFUSALS = {401, 403}  # status of an answer to a client without the password
_HEARTBEAT_INTERVAL = timedelta(seconds=30)
_ZOMBIES = "millrace-zombies"
_NOTICES = "millrace-notices"
_NOTIFY_VARIABLE = "MILLRACE_NOTIFY_URL"
_REPLACEMENTS = {  # for texts that a chat takes for a link, an element or a mention
    "&": "&amp;", "<": "&lt;", ">": "&gt;", "://": ": //", "www.": "www .", "WWW.": "WWW .",
    "@": "@ ", "](": "] (", "\\n": " ",
    **dict.fromkeys("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", ""),
}  # fmt: skip
_FAILURE_REASON = (
    'flow_run.state.message | default("", true) | truncate(500, true, "…", 0)'
    + "".join(f' | replace("{each}", "{instead}")' for each, instead in _REPLACEMENTS.items())
)
"""Reason of a failure in a notice, with text from stores and machines."""
_WATCHED_FLOWS = (
    "abort-uploads", "audit-access", "clean-bucket", "clean-versions", "cooldown", "copy-bucket",
    "delete-gathers", "reap-machines", "verify-checkpoints", "verify-datasets", "wipe-bucket",
)  # fmt: skip

B = TypeVar("B", bound=Block)


class SetupOutcome(StrEnum):
    """Result of creating one object on the server."""

    CREATED = "created"
    UPDATED = "updated"
    UNCHANGED = "unchanged"


def set_up_server(
    roles: Sequence[BucketRole],
    rights: Sequence[Right],
    uploads: int | None,
    *,
    check: bool,
    dry_run: bool,
) -> dict[str, SetupOutcome]:
    """Create the objects from the environment; print and return each with the outcome.

    Args:
        roles: Buckets that get a block.
        rights: Rights of the credentials of these buckets.
        uploads: Number of shards that all runs upload at once; None leaves the limit as it is.
        check: Whether to check the rights of the credentials.
        dry_run: Whether to change nothing.
    """
    with report_errors():
        buckets = read_buckets(os.environ, roles, rights)
        _read_notify_url(os.environ)  # before anything is made
        outcomes: dict[str, SetupOutcome] = {}
        with connect() as client:
            for item, outcome in _create_objects(client, buckets, uploads, dry_run=dry_run):
                would = "would be " if dry_run and outcome is not SetupOutcome.UNCHANGED else ""
                echo(f"{item}: {would}{outcome}")
                outcomes[item] = outcome
        if check:
            _check_credentials(buckets, rights)
    echo("Next: millrace deploy, then: prefect worker start --pool " + WORK_POOL)
    return outcomes


class _WrongInputError(click.ClickException):
    """Wrong input of a command."""

    exit_code = 2


@contextmanager
def report_errors() -> Generator[None]:
    """Print an error of the block as a sentence, and exit: with 2 for wrong input, else with 1."""
    try:
        yield
    except errors.ConfigurationError as error:
        raise _WrongInputError(str(error)) from None
    except errors.MillraceError as error:
        raise click.ClickException(str(error)) from None
    except PrefectHTTPStatusError as error:
        raise click.ClickException(_describe_refusal(error)) from None


def check_server() -> str:
    """Check that a Prefect server answers at PREFECT_API_URL, and return this URL.

    Raises:
        ConfigurationError: No server is named, or the URL is not that of an API.
        UnavailableError: The server does not answer.
        DeniedError: The server wants a password.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise errors.ConfigurationError(
            "PREFECT_API_URL names no server. Start one with `prefect server start`, and export "
            "PREFECT_API_URL=http://127.0.0.1:4200/api."
        )
    with get_client(sync_client=True) as client:
        error, kind = client.api_healthcheck(), ""
        try:
            if error is None:
                kind = client.request("GET", "/admin/version").headers.get("content-type", "")
        except PrefectHTTPStatusError as refusal:  # Prefect Cloud has no such page
            if refusal.response.status_code in _REFUSALS:
                raise errors.DeniedError(_describe_refusal(refusal)) from None
    is_missing = isinstance(error, PrefectHTTPStatusError) and error.response.status_code == 404
    if is_missing or kind.startswith("text/html"):
        raise errors.ConfigurationError(
            f"{_hide_password(url)} is not the API of a Prefect server, and may be its UI. Correct "
            "PREFECT_API_URL: the URL of the API ends in /api, such as http://127.0.0.1:4200/api."
        )
    if error is not None:
        raise errors.UnavailableError(
            f"No Prefect server answers at {_hide_password(url)} ({type(error).__name__}). Start "
            "it with `prefect server start`, or correct PREFECT_API_URL."
        )
    return url


def connect() -> SyncPrefectClient:
    """Return a client of the server at PREFECT_API_URL.

    Raises:
        ConfigurationError: No server is named, or the URL is not that of an API.
        UnavailableError: The server does not answer.
        DeniedError: The server wants a password.
    """
    url = check_server()
    parts = urlsplit(url)
    has_password = parts.password or PREFECT_API_AUTH_STRING.value()
    if parts.hostname not in {"127.0.0.1", "localhost", "::1"} and not has_password:
        echo(
            f"Warning: {url} is used without a password, and a Prefect server without one gives "
            "every secret to all that reach it. Set PREFECT_SERVER_API_AUTH_STRING on the server "
            "and PREFECT_API_AUTH_STRING here.",
            err=True,
        )
    return get_client(sync_client=True)


def _hide_password(url: str) -> str:
    """Return a URL without its user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _describe_refusal(error: PrefectHTTPStatusError) -> str:
    """Return a sentence for an error of the server."""
    code = error.response.status_code
    if code in _REFUSALS:
        return "The Prefect server wants a password: set PREFECT_API_AUTH_STRING to it."
    url = _hide_password(str(error.request.url))
    return f"The Prefect server answered {code} to {error.request.method} {url}."


def _create_objects(
    client: SyncPrefectClient,
    buckets: list[BucketSettings],
    uploads: int | None,
    *,
    dry_run: bool,
) -> Iterator[tuple[str, SetupOutcome]]:
    if not dry_run:
        register_types()
    for bucket in buckets:
        yield from _save_bucket(bucket, dry_run=dry_run)
    for block, name in _read_account_blocks(os.environ):
        yield (
            f"block {type(block).get_block_type_slug()}/{name}",
            _save_block(block, name, dry_run=dry_run, keeps_fields=True)[1],
        )
    yield from make_essentials(client, uploads, dry_run=dry_run)
    if url := _read_notify_url(os.environ):
        webhook = Webhook(url=SecretStr(url))
        block, outcome = _save_block(webhook, _NOTICES, dry_run=dry_run, keeps_fields=True)
        yield f"block webhook/{_NOTICES}", outcome
        saved = block._block_document_id  # noqa: SLF001 - None where a dry run has not saved it
        if saved is not None:
            outcome = _save_automation(client, make_notice_automation(saved), dry_run=dry_run)
        yield f"automation {_NOTICES}", outcome


def make_essentials(
    client: SyncPrefectClient, uploads: int | None = None, *, dry_run: bool = False
) -> Iterator[tuple[str, SetupOutcome]]:
    """Create the objects that every run needs on a server and that hold no credentials.

    Args:
        client: Client of the server.
        uploads: Slots of the limit on uploads; by default its current slots, or 32.
        dry_run: Whether to change nothing.

    Yields:
        The name of each object, and its outcome.
    """
    yield f"limit {UPLOAD_LIMIT}", _set_upload_limit(client, uploads, dry_run=dry_run)
    yield f"work pool {WORK_POOL}", _create_work_pool(client, dry_run=dry_run)
    yield (
        f"automation {_ZOMBIES}",
        _save_automation(client, make_zombie_automation(), dry_run=dry_run),
    )


def register_types() -> None:
    """Register the types of Millrace's blocks, and update their forms."""
    for kind in (AwsCredentials, Bucket, CleaningRules, HuggingFaceCredentials, VastCredentials):
        kind.register_type_and_schema()


def _save_bucket(wanted: BucketSettings, *, dry_run: bool) -> Iterator[tuple[str, SetupOutcome]]:
    credentials: dict[Right, AwsCredentials] = {}
    for right, pair in wanted.key_pairs.items():
        name = f"{wanted.name}-{right}"
        credentials[right], outcome = _save_block(pair, name, dry_run=dry_run)
        yield f"block aws-credentials/{name}", outcome
    existing = _load_bucket(wanted)
    block = wanted.make_block(credentials, existing)
    if existing and (removed := [url for url in existing.mirrors if url not in block.mirrors]):
        echo(
            f"block millrace-bucket/{wanted.name}: without its mirrors {', '.join(removed)}, which "
            "the environment does not name",
            err=True,
        )
    _, outcome = _save_block(block, wanted.name, dry_run=dry_run)
    yield f"block millrace-bucket/{wanted.name}", outcome


def _read_notify_url(environ: Mapping[str, str]) -> str:
    return check_web_url(environ.get(_NOTIFY_VARIABLE, ""), _NOTIFY_VARIABLE)


def _read_account_blocks(environ: Mapping[str, str]) -> Iterator[tuple[Block, str]]:
    if key := environ.get("VAST_API_KEY", "").strip():
        yield VastCredentials(api_key=SecretStr(key)), "vast"
    if token := environ.get("HF_TOKEN", "").strip():
        yield HuggingFaceCredentials(token=SecretStr(token)), "hugging-face"


def _save_block(
    block: B, name: str, *, dry_run: bool, keeps_fields: bool = False
) -> tuple[B, SetupOutcome]:
    """Save a block unless the server has an equal one.

    Args:
        block: Block.
        name: Name of the block.
        dry_run: Whether to save nothing.
        keeps_fields: Whether fields that the environment does not name stay as they are on the
            server, such as another address of the Hub.
    """
    existing, faults = load_with_faults(type(block), name)
    if existing is not None and keeps_fields:
        given = {field: getattr(block, field) for field in block.model_fields_set}
        block = existing.model_copy(update=given)
    if faults:
        echo(f"{describe_faults(type(block), name, faults)} It is replaced.", err=True)
    if existing is not None and _dump_content(existing) == _dump_content(block):
        return existing, SetupOutcome.UNCHANGED
    if not dry_run:
        block.save(name, overwrite=True)
    return block, SetupOutcome.UPDATED if existing is not None or faults else SetupOutcome.CREATED


def _load_bucket(wanted: BucketSettings) -> Bucket | None:
    """Load the block that setup replaces. Its invalid fields are left out.

    Without its prefix, flows would work on the whole bucket.
    """
    existing, faults = load_with_faults(Bucket, wanted.name)
    if not faults:
        return existing
    with get_client(sync_client=True) as client:
        document = client.read_block_document_by_name(wanted.name, Bucket.get_block_type_slug())
    invalid = {field.partition(".")[0] for field in faults}
    valid = {field: value for field, value in document.data.items() if field not in invalid}
    kept = document.model_copy(update={"data": {"role": wanted.role, **valid}})
    try:
        return Bucket._from_block_document(kept)  # noqa: SLF001 - it keeps the pairs' blocks
    except ValidationError:
        return None


def _dump_content(block: Block) -> Any:
    content = block.model_dump(mode="json", context={"include_secrets": True})
    return _strip_ids(content, is_sorted=False)


def _set_upload_limit(
    client: SyncPrefectClient, uploads: int | None, *, dry_run: bool
) -> SetupOutcome:
    try:
        existing = client.read_global_concurrency_limit_by_name(UPLOAD_LIMIT).limit
    except ObjectNotFound:
        existing = None
    wanted = uploads if uploads is not None else existing
    if wanted is None:
        wanted = _DEFAULT_SLOTS
    if existing == wanted:
        return SetupOutcome.UNCHANGED
    if not dry_run:
        if existing is None:
            client.create_global_concurrency_limit(
                GlobalConcurrencyLimitCreate(name=UPLOAD_LIMIT, limit=wanted, active=True)
            )
        else:
            client.upsert_global_concurrency_limit_by_name(UPLOAD_LIMIT, wanted)
    return SetupOutcome.CREATED if existing is None else SetupOutcome.UPDATED


def _create_work_pool(client: SyncPrefectClient, *, dry_run: bool) -> SetupOutcome:
    try:
        client.read_work_pool(WORK_POOL)
    except ObjectNotFound:
        if not dry_run:
            template = asyncio.run(get_default_base_job_template_for_infrastructure_type("process"))
            client.create_work_pool(
                WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template or {})
            )
        return SetupOutcome.CREATED
    return SetupOutcome.UNCHANGED


def make_zombie_automation() -> AutomationCore:
    """Return an automation that ends flow runs of Millrace whose process has died silently.

    Only runs with Millrace's tag count: their deployments send a heartbeat every 30 seconds, and
    those of others may be slower.
    """
    return AutomationCore(
        name=_ZOMBIES,
        description="Ends a Millrace run that has sent no heartbeat for a minute and a half.",
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
            within=3 * _HEARTBEAT_INTERVAL,
        ),
        actions=[  # pyright: ignore[reportArgumentType]
            ChangeFlowRunState(
                name="Crashed",
                state=StateType.CRASHED,
                force=False,
                message="The process is gone. Start the run again: it continues where it was.",
            )
        ],
    )


def make_notice_automation(webhook: UUID) -> AutomationCore:
    """Return an automation that notifies people when a housekeeping flow has failed.

    An audit fails if a credential has too many or too few rights; a cleaning, if an object could
    not be deleted.

    Args:
        webhook: Id of the block of the webhook.
    """
    return AutomationCore(
        name=_NOTICES,
        description="Calls a webhook when an audit, a cleaning or a verification has failed, "
        "or an epoch has no checkpoint.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},  # pyright: ignore[reportArgumentType]
            match_related={  # pyright: ignore[reportArgumentType]
                "prefect.resource.role": "flow",
                "prefect.resource.name": list(_WATCHED_FLOWS),
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
                'failed. " ~ (' + _FAILURE_REASON + ') ~ " " ~ (flow_run | ui_url)) | tojson }}}',
            )
        ],
    )


def _save_automation(
    client: SyncPrefectClient, wanted: AutomationCore, *, dry_run: bool
) -> SetupOutcome:
    existing = client.read_automations_by_name(wanted.name)
    fields: Callable[[AutomationCore], Any] = lambda a: a.model_dump(  # noqa: E731
        mode="json", include={"name", "description", "enabled", "trigger", "actions"}
    )
    strip = partial(_strip_ids, is_sorted=True)  # the server returns sets in any order
    if existing and strip(fields(existing[0])) == strip(fields(wanted)):
        return SetupOutcome.UNCHANGED
    if not dry_run:
        if existing:
            client.update_automation(existing[0].id, wanted)
        else:
            client.create_automation(wanted)
    return SetupOutcome.UPDATED if existing else SetupOutcome.CREATED


def _strip_ids(data: Any, *, is_sorted: bool) -> Any:
    """Return the data without the ids of the server, with its lists sorted if they are sets."""
    strip = partial(_strip_ids, is_sorted=is_sorted)
    match data:
        case dict():
            return {k: strip(v) for k, v in data.items() if k != "id" and k[0] != "_"}
        case list():
            items = [strip(item) for item in data]
            return sorted(items, key=repr) if is_sorted else items
        case _:
            return data


def _check_credentials(buckets: list[BucketSettings], rights: Sequence[Right]) -> None:
    for bucket in buckets:
        block = bucket.make_block(bucket.key_pairs, _load_bucket(bucket))
        for right in rights:
            if bucket.is_mirror and right not in bucket.key_pairs:
                continue  # a mirror is only read
            block.check(right)
            echo(f"{bucket.name}: the {right} credentials do what they are for")
