"""Locations as parameters of flows, and checks of their credentials."""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from prefect import State, get_client, get_run_logger
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from blocks import Bucket, HuggingFaceCredentials
from blocks.loading import find_block
from millrace.audit import check_access
from millrace.checkpoints import HubSpec
from millrace.datasets import SourceLocation
from millrace.datasets.settings import check_mirrored_source
from millrace.datasets.sources import SourceSettings
from millrace.errors import ConfigurationError
from millrace.storage import Location, Right, StoreSpec, open_store
from tasks.retries import retried_task

_NAME = re.compile(r"(millrace-bucket/)?[a-z0-9][a-z0-9-]*")
_SHOWN = 20  # names of blocks in a sentence


def _check_url(url: str) -> str:
    """Refuse a value that is neither a URL nor an absolute path.

    The working folder of a flow run is deleted, so a relative path is refused.

    Raises:
        ValueError: The value is a relative path.
    """
    scheme, separator, rest = url.partition("://")
    if url.startswith(("/", "~/")) or (
        separator and scheme and (scheme != "file" or rest.startswith(("/", "localhost/")))
    ):
        return url
    raise ValueError(
        f"{url!r} is no location: the folder that a flow run works in is deleted when the run "
        "ends. Write an absolute path (/folder), a URL (file:///folder, s3://bucket/prefix, "
        "r2://account/bucket), or, of a bucket, the name of its Millrace Bucket block (dataset)."
    )


def _check_node_url(url: str) -> str:
    """Refuse a value that is no location, except a folder that the node's environment names.

    Raises:
        ValueError: The value is a relative path.
    """
    return url if url.startswith("file://$") else _check_url(url)


def _check_folder(folder: str) -> str:
    """Refuse a relative path.

    Raises:
        ValueError: The folder is a relative path.
    """
    if folder.startswith(("/", "~/", "$")):
        return folder
    raise ValueError(f"{folder!r} is a relative path: write an absolute one, or begin with $NAME")


def _check_location(location: Bucket | str) -> Bucket | str:
    """Refuse a value that is no block, no name of a block, no URL and no absolute path."""
    if isinstance(location, Bucket) or _NAME.fullmatch(location):
        return location
    return _check_url(location)


Url = Annotated[str, AfterValidator(_check_url)]
"""A URL of a store, or an absolute path."""

NodeUrl = Annotated[str, AfterValidator(_check_node_url)]
"""A URL for other machines, which fill in `$NAME` from their environment."""

NodeFolder = Annotated[str, AfterValidator(_check_folder)]
"""An absolute path of a folder on other machines, which fill in `$NAME`."""

BucketLocation = Annotated[Bucket | str, AfterValidator(_check_location)]
"""Location of a bucket: a block, a block's name, a URL, or an absolute path."""


def make_store_spec(location: Bucket | str, right: Right) -> StoreSpec:
    """Return the store of a location, with credentials for one right.

    Raises:
        ConfigurationError: The block or its credentials do not exist, or the location is below the
            temporary folder of a flow run.
    """
    found = require_location(location)
    spec = found.make_spec(right) if isinstance(found, Bucket) else StoreSpec(url=found)
    if spec.url.startswith(("/", "~", "file:")):
        refuse_temporary(Path(Location.parse(spec.url).bucket))
    return spec


def make_mirror_specs(location: Bucket | str) -> list[StoreSpec]:
    """Return the mirrors of a location, with credentials to read. Only a block has mirrors.

    Raises:
        ConfigurationError: A mirror, its block or its credentials do not exist.
    """
    found = require_location(location)
    return found.make_mirror_specs() if isinstance(found, Bucket) else []


def refuse_temporary(folder: Path) -> None:
    """Refuse a folder below the temporary folder that a Prefect worker starts a flow run in.

    Raises:
        ConfigurationError: The folder is below the temporary one.
    """
    if "PREFECT__FLOW_RUN_ID" not in os.environ:
        return  # no worker has started this process in a temporary folder
    here, temporary = Path.cwd().resolve(), Path(tempfile.gettempdir()).resolve()
    if here.is_relative_to(temporary) and folder.resolve().is_relative_to(here):
        raise ConfigurationError(
            f"{folder} is below {here}, the temporary folder of this flow run, which is deleted "
            "when the run ends. Write the absolute path of a folder elsewhere."
        )


def find_location(location: Bucket | str) -> Bucket | str | None:
    """Look up a location whose block may not exist yet, as in a schedule.

    Returns:
        The block or the URL; None if there is no block of this name.

    Raises:
        ConfigurationError: The location is a relative path, or fields of the block are invalid.
    """
    if isinstance(location, Bucket):
        return location
    if _NAME.fullmatch(location):
        return find_block(Bucket, location.removeprefix("millrace-bucket/"))
    try:
        return _check_url(location)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _measure_similarity(matcher: SequenceMatcher[str], name: str) -> float:
    """Return the similarity of a name to the requested one, from 0 to 1."""
    matcher.set_seq1(name)
    return matcher.ratio()


def require_location(location: Bucket | str) -> Bucket | str:
    """Look up a location whose block must exist.

    Raises:
        ConfigurationError: There is no block of this name. The message names the existing blocks.
    """
    found = find_location(location)
    if found is None:
        matcher = SequenceMatcher(b=str(location))
        names = [
            repr(name)
            for name in sorted(list_bucket_names(), key=lambda n: -_measure_similarity(matcher, n))
        ]
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        existing = (
            f"There are {', '.join(names[:_SHOWN])}{more}" if names else "There is none at all"
        )
        raise ConfigurationError(
            f"There is no Millrace Bucket block {location!r}. {existing}. Correct the name, make "
            "the block with `millrace setup`, or write a URL (file:///folder for a folder)."
        )
    return found


def skip_run(
    buckets: Sequence[Bucket | str], consequence: str, others: Sequence[str] = ()
) -> State[None]:
    """Log that blocks do not exist, and return the state of a run that does nothing.

    Args:
        buckets: Names of missing blocks of buckets.
        consequence: Skipped work, as the end of the sentence.
        others: Other missing blocks, each with its type.

    Raises:
        ConfigurationError: A person has named a block of a bucket (`may_skip`).
    """
    for bucket in buckets:
        if not may_skip(bucket):
            require_location(bucket)
    missing = [*(f"Millrace Bucket block {bucket}" for bucket in buckets), *others]
    message = (
        f"There is no {' and no '.join(missing)}: {consequence}. `millrace setup` makes blocks."
    )
    get_run_logger().info(message)
    return Completed(message=message)


def may_skip(name: object) -> bool:
    """Decide whether the current flow run may do nothing because a block does not exist yet.

    It may if a schedule has started the run, or if the name is one of the deployment's defaults. A
    name that a person has typed must be right.

    Args:
        name: Name of the block.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is not None and run.auto_scheduled:
        return True
    if run is None or run.deployment_id is None:
        return False
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment(run.deployment_id)
    drawn = (deployment.parameter_openapi_schema or {}).get("properties", {})
    defaults = [one.get("default") for one in drawn.values()]
    return name in list(_list_texts([*defaults, deployment.parameters]))


def _list_texts(value: Any) -> Iterator[str]:
    """Yield the texts in lists and dicts of parameters."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _list_texts(list(cast("dict[str, Any]", value).values()))
    elif isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from _list_texts(one)


def list_bucket_names() -> list[str]:
    """Return the names of the Millrace Bucket blocks on the server."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_block_documents_by_type("millrace-bucket", include_secrets=False)
        except ObjectNotFound:
            return []
    return sorted(document.name for document in found if document.name)


class InputLocation(BaseModel):
    """A location to read from: a URL, or a block and a prefix in it."""

    url: Url | None = Field(
        default=None,
        title="URL",
        description="A location without a block, by the worker's credentials: `file:///folder` or "
        "`s3://bucket/prefix`.",
    )
    bucket: BucketLocation | None = Field(
        default=None,
        description="Or a Millrace Bucket block with read credentials, its name, or a URL.",
    )
    prefix: str = Field(
        default="",
        description="Prefix of the files in the bucket; only with `bucket`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_emptied_field(cls, data: Any) -> Any:
        """Take an emptied field of a form beside the other one for one that is not given."""
        if not isinstance(data, dict):
            return data
        given = cast("dict[str, Any]", data)
        fields = ("url", "bucket")
        if any(given.get(name) is None for name in fields):
            return given  # an empty text alone is refused as a location
        return {**given, **{name: given[name] or None for name in fields}}

    @model_validator(mode="after")
    def _check_one_location(self) -> "InputLocation":
        if (self.url is None) == (self.bucket is None):
            raise ValueError("name either a url or a bucket")
        if self.prefix and self.bucket is None:
            raise ValueError("a prefix goes with a bucket: write it into the url")
        return self

    @property
    def location(self) -> Bucket | str:
        """The block or the URL."""
        return self.bucket or self.url or ""

    def make_spec(self) -> StoreSpec:
        """Return the store of the files, with the credentials to read them."""
        return make_store_spec(self.location, Right.READ).with_prefix(self.prefix)

    def make_mirror_specs(self) -> list[StoreSpec]:
        """Return the mirrors of a block with the same prefix; empty for a URL."""
        return [spec.with_prefix(self.prefix) for spec in make_mirror_specs(self.location)]


L = TypeVar("L", bound=InputLocation)


def _check_hub_credentials(location: L, credentials: HuggingFaceCredentials | None) -> L:
    """Refuse a token of the Hub for another location."""
    if credentials and not str(location.location).startswith("hf://"):
        raise ValueError("`credentials` are for `hf://` URLs: remove them, or correct `url`")
    return location


class HubRepository(BaseModel):
    """A repository of the Hugging Face Hub."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: str = Field(description="Repository as `owner/name`. It must exist.")
    credentials: HuggingFaceCredentials = Field(
        description="A block with a token that may write the repository."
    )
    revision: str = Field(default="main", description="Name of the branch.")

    def make_spec(self) -> HubSpec:
        """Return the repository, with the account's token."""
        return HubSpec(
            repo=self.repo,
            revision=self.revision,
            token=self.credentials.token,
            endpoint=self.credentials.endpoint,
        )


class WeightsInput(InputLocation):
    """Weights that another tool saved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Url | None = Field(
        default=None,
        title="URL",
        description="A folder or a file, `file:///models/llama` or `s3://bucket/runs/step_1000`, "
        "by the worker's credentials; or a model of the Hugging Face Hub, `hf://owner/name`.",
    )
    credentials: HuggingFaceCredentials | None = Field(
        default=None,
        description="A block with a token that may read the model, for `hf://` URLs. By default "
        "the token of the worker's environment.",
    )

    @model_validator(mode="after")
    def _check_credentials(self) -> "WeightsInput":
        return _check_hub_credentials(self, self.credentials)

    def make_place(self) -> StoreSpec | HubSpec:
        """Return the store or the repository of the weights, with the credentials to read them."""
        url = str(self.location)
        if not url.startswith("hf://"):
            return self.make_spec()
        spec, block = HubSpec.parse(url), self.credentials
        if block is None:
            return spec
        return spec.model_copy(update={"token": block.token, "endpoint": block.endpoint})


class SourceInput(SourceSettings, InputLocation):
    """Store, prefix and names of the files whose rows become samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    credentials: HuggingFaceCredentials | None = Field(
        default=None,
        description="A block with a token that may read the dataset, for `hf://` URLs. By default "
        "the token of the worker's environment.",
    )
    mirrors: list[InputLocation] = Field(
        default=[],
        max_length=8,
        description="Other locations of the same files. When a location fails, files are read from "
        "the next one whose files are proven equal. They can change at every run. Not for the kind "
        "`huggingface`.",
    )

    @model_validator(mode="after")
    def _check_mirrors(self) -> "SourceInput":
        if self.mirrors:
            check_mirrored_source(self, str(self.location))
        return self

    @model_validator(mode="after")
    def _check_credentials(self) -> "SourceInput":
        return _check_hub_credentials(self, self.credentials)

    def make_spec(self) -> StoreSpec:
        """Return the store of the files, with the credentials to read them."""
        spec, block = super().make_spec(), self.credentials
        if block is None:
            return spec
        options = {**spec.options, "token": block.token}
        return spec.model_copy(
            update={"options": options, "endpoint": block.endpoint or spec.endpoint}
        )

    def make_source(self) -> SourceLocation:
        """Return the source as the engine takes it, with the credentials to read it.

        Raises:
            ConfigurationError: A block or its credentials do not exist.
        """
        return SourceLocation(
            **dict(self.make_spec()),
            **{name: getattr(self, name) for name in SourceSettings.model_fields},
            mirrors=[one.make_spec() for one in self.mirrors],
        )


@retried_task
def check_right(location: Bucket | str, right: Right, scope: str = "") -> None:
    """Refuse a run whose credentials are insufficient, before the run reads anything.

    Args:
        location: A block, its name, or a URL for the credentials of the environment.
        right: Right that the run needs there.
        scope: Prefix that the run works below.
    """
    found = require_location(location)
    if isinstance(found, Bucket):
        found.check(right, scope)
    else:
        check_access(open_store(found, make_folder=right is Right.WRITE), right, scope)
