"""Places as a person names them, and whether we may do there what we must."""

from typing import Any, TypeVar

from prefect import task
from prefect.blocks.core import Block
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from blocks import Bucket
from millrace.errors import ConfigurationError
from millrace.sources import SourceSettings
from millrace.storage import Right, StoreSpec, check, open_store
from tasks.retries import PAUSES, passing

B = TypeVar("B", bound=Block)


def spec_of(place: Bucket | str, right: Right) -> StoreSpec:
    """The store of a block or a URL, with credentials for one right.

    Raises:
        ConfigurationError: The block has no credentials for it.
    """
    return place.spec(right) if isinstance(place, Bucket) else StoreSpec(url=place)


def known(place: Bucket | str) -> Bucket | str | None:
    """What a schedule is given: a block, a URL, or a block's name, that may not be there yet.

    Returns:
        The block or the URL; None if there is no block of this name.
    """
    if isinstance(place, Bucket) or "://" in place or place.startswith(("/", "~", ".")):
        return place
    return block_of(Bucket, place)


def needed(place: Bucket | str) -> Bucket | str:
    """As `known`, where it has to be there.

    Raises:
        ConfigurationError: There is no block of this name.
    """
    found = known(place)
    if found is None:
        raise ConfigurationError(
            f"There is no Millrace Bucket block {place}: make it with `millrace setup`."
        )
    return found


def block_of(kind: type[B], name: str) -> B | None:
    """A block by its name; None if there is none."""
    try:
        return kind.load(name)  # pyright: ignore[reportReturnType] - sync here
    except ValidationError:
        raise  # there is one, and it is damaged: that is not that there is none
    except ValueError:
        return None


class Place(BaseModel):
    """A place to read from: a URL, or a block and a prefix in it."""

    url: str | None = Field(
        default=None,
        title="URL",
        description="A place that needs no block: a folder on the worker as `file:///folder`, or "
        "`s3://bucket/prefix` with the credentials of the worker's environment.",
    )
    bucket: Bucket | None = Field(
        default=None, description="Or a Millrace Bucket block, opened for reading."
    )
    prefix: str = Field(
        default="", description="With a block: the part of the bucket that the files are in."
    )

    @model_validator(mode="after")
    def _one(self) -> "Place":
        if (self.url is None) == (self.bucket is None):
            raise ValueError("name either a url or a bucket block as the source")
        if self.prefix and self.bucket is None:
            raise ValueError("a prefix goes with a bucket block: write it into the url")
        return self

    @property
    def place(self) -> Bucket | str:
        """The block or the URL."""
        return self.bucket or self.url or ""

    def store(self) -> StoreSpec:
        """Where the files are, with the credentials to read them."""
        spec = spec_of(self.place, Right.READ)
        prefix = self.prefix.strip("/")
        return spec.model_copy(update={"url": f"{spec.url}/{prefix}"}) if prefix else spec


class Source(SourceSettings, Place):
    """Where the samples are, and which of the files there to take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def samples(self) -> dict[str, Any]:
        """Which samples: what the engine calls the source's settings."""
        return {name: getattr(self, name) for name in SourceSettings.model_fields}


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def check_right(place: Bucket | str, right: Right, scope: str = "") -> None:
    """Refuse a run whose credentials will not do, before it has read anything.

    Args:
        place: A block, or a URL for the credentials of the environment.
        right: What the run must be able to do there.
        scope: The prefix that it works under.
    """
    if isinstance(place, Bucket):
        place.check(right, scope)
    else:
        check(open_store(place, make_folder=right is Right.WRITE), right, scope)
