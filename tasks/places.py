"""Locations as flows take them, and whether the credentials allow what a run needs there."""

import os
import re
import tempfile
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, TypeVar

from prefect import State, get_client, get_run_logger, task
from prefect.blocks.core import Block
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from blocks import Bucket
from millrace.datasets.sources import SourceSettings
from millrace.errors import ConfigurationError
from millrace.storage import Location, Right, StoreSpec, check, open_store
from tasks.retries import PAUSES, passing

B = TypeVar("B", bound=Block)

_NAME = re.compile(r"(millrace-bucket/)?[a-z0-9][a-z0-9-]*")
_SHOWN = 20  # names of blocks in a sentence


def _checked_url(url: str) -> str:
    """Refuse what is neither a URL nor an absolute path: a run's working folder is deleted.

    Raises:
        ValueError: It is a relative path.
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


def _checked_node_url(url: str) -> str:
    """Refuse what is no location, but for a folder that the node's own environment names.

    Raises:
        ValueError: It is a relative path.
    """
    return url if url.startswith("file://$") else _checked_url(url)


def _checked_folder(folder: str) -> str:
    """Refuse a relative path.

    Raises:
        ValueError: It is one.
    """
    if folder.startswith(("/", "~/", "$")):
        return folder
    raise ValueError(f"{folder!r} is a relative path: write an absolute one, or begin with $NAME")


def _checked(location: Bucket | str) -> Bucket | str:
    """Likewise, where a block and a block's name are right, too."""
    if isinstance(location, Bucket) or _NAME.fullmatch(location):
        return location
    return _checked_url(location)


Url = Annotated[str, AfterValidator(_checked_url)]
"""A URL of a store, or an absolute path."""

NodeUrl = Annotated[str, AfterValidator(_checked_node_url)]
"""A URL as other machines read it: `$NAME` is filled in there."""

NodeFolder = Annotated[str, AfterValidator(_checked_folder)]
"""A folder on other machines: an absolute path, `$NAME` filled in there."""

BucketLocation = Annotated[Bucket | str, AfterValidator(_checked)]
"""Every bucket that a flow takes: a block, a block's name, a URL, or an absolute path."""


def spec_of(location: Bucket | str, right: Right) -> StoreSpec:
    """Return the store of a location, with credentials for one right.

    Raises:
        ConfigurationError: There is no such block, it has no such credentials, or the location is
            below the folder of a flow run, which is deleted when the run ends.
    """
    found = needed(location)
    spec = found.spec(right) if isinstance(found, Bucket) else StoreSpec(url=found)
    if spec.url.startswith(("/", "~", "file:")):
        refuse_temporary(Path(Location.parse(spec.url).bucket))
    return spec


def refuse_temporary(folder: Path) -> None:
    """Refuse a folder below the temporary one that a Prefect worker starts a flow run in.

    Raises:
        ConfigurationError: It is below that.
    """
    if "PREFECT__FLOW_RUN_ID" not in os.environ:
        return  # a person's own process, and folder
    here, temporary = Path.cwd().resolve(), Path(tempfile.gettempdir()).resolve()
    if here.is_relative_to(temporary) and folder.resolve().is_relative_to(here):
        raise ConfigurationError(
            f"{folder} is below {here}, the temporary folder of this flow run, which is deleted "
            "when the run ends. Write the absolute path of a folder elsewhere."
        )


def known(location: Bucket | str) -> Bucket | str | None:
    """Look a block's name up, as a schedule is given one whose block may not exist yet.

    Returns:
        The block or the URL; None if there is no block of this name.

    Raises:
        ConfigurationError: The location is a relative path.
    """
    if isinstance(location, Bucket):
        return location
    if _NAME.fullmatch(location):
        return block_of(Bucket, location.removeprefix("millrace-bucket/"))
    try:
        return _checked_url(location)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _ratio(alike: SequenceMatcher[str], name: str) -> float:
    """Return how alike a name is to the one that was asked for, from 0 to 1."""
    alike.set_seq1(name)
    return alike.ratio()


def needed(location: Bucket | str) -> Bucket | str:
    """Look a block's name up, where the block must exist.

    Raises:
        ConfigurationError: There is no block of this name; the message names those that exist.
    """
    found = known(location)
    if found is None:
        alike = SequenceMatcher(b=str(location))
        names = [repr(name) for name in sorted(bucket_names(), key=lambda n: -_ratio(alike, n))]
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        there = f"There are {', '.join(names[:_SHOWN])}{more}" if names else "There is none at all"
        raise ConfigurationError(
            f"There is no Millrace Bucket block {location!r}. {there}. Correct the name, make the "
            "block with `millrace setup`, or write a URL (file:///folder for a folder)."
        )
    return found


def skipped(missing: Sequence[str], what: str) -> State[None]:
    """Log that blocks do not exist, and return the state of a run that does nothing for that.

    Args:
        missing: The blocks, each with its type.
        what: What was not done, as the end of the sentence.
    """
    said = f"There is no {' and no '.join(missing)}: {what}. `millrace setup` makes blocks."
    get_run_logger().info(said)
    return Completed(message=said)


def named_bucket(location: Bucket | str) -> str:
    """Return a bucket's name, as messages call it."""
    return f"Millrace Bucket block {location}"


def bucket_names() -> list[str]:
    """Return the names of the Millrace Bucket blocks on the server."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_block_documents_by_type("millrace-bucket", include_secrets=False)
        except ObjectNotFound:
            return []
    return sorted(document.name for document in found if document.name)


def block_of(kind: type[B], name: str) -> B | None:
    """Return a block by its name; None if there is none."""
    try:
        return kind.load(name)  # pyright: ignore[reportReturnType] - sync here
    except ValidationError:
        raise  # there is one, and it is damaged: that is not that there is none
    except ValueError:
        return None


class InputLocation(BaseModel):
    """A place to read from: a URL, or a block and a prefix in it."""

    url: Url | None = Field(
        default=None,
        title="URL",
        description="A place that needs no block: a folder on the worker as `file:///folder`, or "
        "`s3://bucket/prefix` with the credentials of the worker's environment.",
    )
    bucket: BucketLocation | None = Field(
        default=None,
        description="Or a Millrace Bucket block, or its name, opened for reading.",
    )
    prefix: str = Field(
        default="", description="With a bucket: the part of it that the files are in."
    )

    @model_validator(mode="after")
    def _one(self) -> "InputLocation":
        if (self.url is None) == (self.bucket is None):
            raise ValueError("name either a url or a bucket")
        if self.prefix and self.bucket is None:
            raise ValueError("a prefix goes with a bucket: write it into the url")
        return self

    @property
    def place(self) -> Bucket | str:
        """The block or the URL."""
        return self.bucket or self.url or ""

    def store(self) -> StoreSpec:
        """Return the store of the files, with the credentials to read them."""
        spec = spec_of(self.place, Right.READ)
        prefix = self.prefix.strip("/")
        return (
            spec.model_copy(update={"url": f"{spec.url.rstrip('/')}/{prefix}"}) if prefix else spec
        )


class SourceInput(SourceSettings, InputLocation):
    """Location of the samples, and the files of it to take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def samples(self) -> dict[str, Any]:
        """Return the engine's settings of the source."""
        return {name: getattr(self, name) for name in SourceSettings.model_fields}


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def check_right(place: Bucket | str, right: Right, scope: str = "") -> None:
    """Refuse a run whose credentials will not do, before it has read anything.

    Args:
        place: A block, its name, or a URL for the credentials of the environment.
        right: What the run must be able to do there.
        scope: The prefix that it works under.
    """
    found = needed(place)
    if isinstance(found, Bucket):
        found.check(right, scope)
    else:
        check(open_store(found, make_folder=right is Right.WRITE), right, scope)
