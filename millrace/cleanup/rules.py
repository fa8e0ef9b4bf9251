"""Rules: what may be deleted. Data, from a settings file, a block's form, or a preset."""

import re
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, cast

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from millrace.checkpoints import VerifyDepth
from millrace.keys import ObjectKind
from millrace.settings import Duration
from millrace.storage import StoreSpec

_VERSION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+-]*[A-Za-z0-9])?")
_CLAUSE = re.compile(r"(===|==|!=|<=|>=|~=|<|>)\s*(\S+)")


Age = Annotated[Duration, Field(ge=timedelta(0), le=timedelta(weeks=5000))]
"""How old an object is: a duration of at most 5000 weeks."""


Pin = Annotated[str, Field(pattern=r"^[^/]")]
"""A key or a folder, below the store's URL: it does not begin with ``/``."""


class What(StrEnum):
    """Kind of objects that a rule is about."""

    GRADIENTS = "gradients"
    START_WINDOWS = "start windows"
    GATHERS = "gathers"  # what an aggregator has merged: links, and the updates that they name
    CHECKPOINTS = "checkpoints"  # whole: the metadata first, then what no other one names
    PARTS = "parts"  # files in checkpoints' folders that no checkpoint names
    SHARDS = "shards"  # a dataset, whole: its manifest first
    ORPHANS = "orphans"  # of a sealed dataset: what its ledger does not name
    PASSING = "passing"  # probes left behind, old plans of cleaning, reports of rented machines
    JUNK = "junk"  # below a worker's own prefix, and none of Millrace's names
    OTHER = "other"  # what Millrace did not write


OBJECTS = {
    ObjectKind.GRADIENT: What.GRADIENTS,
    ObjectKind.START_WINDOW: What.START_WINDOWS,
    ObjectKind.UPDATE: What.GATHERS,
    ObjectKind.LINK: What.GATHERS,
    ObjectKind.OPENING: What.GATHERS,
    ObjectKind.PASSING: What.PASSING,
    ObjectKind.JUNK: What.JUNK,
}
"""What goes by itself, each object as a rule says."""
_VERSIONED = {What.GRADIENTS, What.START_WINDOWS, What.GATHERS}
_WHOLE = {What.CHECKPOINTS, What.SHARDS}


class _Named(BaseModel):
    """Settings that name, in an error, the settings that there are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            there = list(cls.model_fields)
            unknown = [str(name) for name in cast("dict[Any, Any]", data) if name not in there]
            if unknown:
                raise ValueError(f"no setting {', '.join(unknown)}: write {', '.join(there)}")
        return data  # pyright: ignore[reportUnknownVariableType] - pydantic's


class Rule(_Named):
    """Conditions for deletion: an object that meets all is deleted, unless it is protected."""

    what: tuple[What, ...] = Field(
        min_length=1,
        description="`gradients`, `start windows`, `gathers` (what an aggregator has merged), "
        "`checkpoints`, `parts` (files that no checkpoint names), `shards` (whole datasets), "
        "`orphans` (what a sealed dataset's ledger does not name), `passing` (probes, old "
        "plans, reports of rented machines), `junk` (what Millrace does not name below the prefix "
        "of a training worker or member), `other` (what is not Millrace's).",
    )
    older_than: Age = Field(
        default=timedelta(hours=48),
        description="Age by the store's clock: `48h`, `2d`, `90m`; `0h` takes all. A checkpoint "
        "is as "
        "old as its metadata, a dataset as its youngest object.",
    )
    name: str = Field(default="", description="Only of this run, job or dataset.")
    prefix: str = Field(default="", description="Only keys that begin with this.")
    suffix: str = Field(default="", description="Only keys that end with this.")
    version: str = Field(
        default="",
        description="Only of this version, such as `0.2.1`, or of a range, such as "
        "`>=0.2,<0.3` or `!=0.2.11`: compared as versions.",
    )
    keep_last: int = Field(
        default=0, ge=0, description="But for the newest so many windows or steps of each run."
    )
    keep_every: int | None = Field(
        default=None, ge=1, description="But for windows or steps that are multiples of this."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        what = set(self.what)
        if self.version and what - _VERSIONED:
            raise ValueError(f"{_names(what - _VERSIONED)} have no version: leave it out")
        numbered = {*_VERSIONED, What.CHECKPOINTS}
        if (self.keep_last or self.keep_every) and what - numbered:
            raise ValueError(
                f"{_names(what - numbered)} have neither windows nor steps: leave keep_last and "
                "keep_every out"
            )
        if self.suffix and what & _WHOLE:
            raise ValueError(f"{_names(what & _WHOLE)} go whole: leave the suffix out")
        if What.OTHER in what and not self.prefix:
            raise ValueError("what is not Millrace's goes by its name only: give a prefix")
        if self.version:
            in_versions("0", self.version)
        return self


def _names(what: set[What]) -> str:
    return " and ".join(sorted(what))


@lru_cache(maxsize=4096)
def in_versions(version: str, wanted: str) -> bool:
    """Tell whether a version is the one, or in the range, that is wanted.

    Versions are compared as PEP 440 does. One that is none by it equals only its own text, and is
    in no range.

    Raises:
        ValueError: What is wanted is neither a version nor a range.
    """
    if _VERSION.fullmatch(wanted):
        return _same(version, wanted)
    holds = [_holds(version, clause.strip()) for clause in wanted.split(",")]  # each is checked
    return all(holds)


def _holds(version: str, clause: str) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise ValueError(f"{clause!r} is no version or range: write 0.2.1, or >=0.2,<0.3")
    sign, other = match.groups()
    if sign in {"==", "===", "!="} and _VERSION.fullmatch(other):
        return _same(version, other) is (sign != "!=")
    try:
        return SpecifierSet(clause).contains(Version(version), prereleases=True)
    except InvalidSpecifier:
        raise ValueError(
            f"{clause!r} is no range of versions: write 0.2.1, or >=0.2,<0.3"
        ) from None
    except InvalidVersion:
        return False


def _same(one: str, other: str) -> bool:
    try:
        return one == other or Version(one) == Version(other)
    except InvalidVersion:
        return False


class CleanupBucket(_Named):
    """Temporary files: gradients, start windows, what nobody names, probes."""

    preset: Literal["cleanup_bucket"] = "cleanup_bucket"
    older_than: Age = Field(default=timedelta(hours=48), description="Age by the store's clock.")
    checkpoints: int | None = Field(
        default=None,
        ge=1,
        description="Number of checkpoints of each job that stay; left out, all do.",
    )

    def rules(self) -> tuple[Rule, ...]:
        """Return the same as rules."""
        passing = (What.GRADIENTS, What.START_WINDOWS, What.PARTS, What.ORPHANS, What.PASSING)
        first = Rule(what=passing, older_than=self.older_than)
        if self.checkpoints is None:
            return (first,)
        old = Rule(what=(What.CHECKPOINTS,), older_than=self.older_than, keep_last=self.checkpoints)
        return first, old


class DeleteGather(_Named):
    """Preset: delete the merged gradients of one version, up to the newest checkpoint."""

    preset: Literal["delete_gather"] = "delete_gather"
    version: str = Field(min_length=1, description="Version, or a range of versions.")
    name: str = Field(default="", description="Only of this run.")
    older_than: Age = Field(default=timedelta(0), description="Age by the store's clock.")

    def rules(self) -> tuple[Rule, ...]:
        """Return the same as rules."""
        return (
            Rule(
                what=(What.GATHERS,),
                version=self.version,
                name=self.name,
                older_than=self.older_than,
            ),
        )


class CleanVersions(_Named):
    """Preset: delete the objects of every version but the current one."""

    preset: Literal["clean_versions"] = "clean_versions"
    current: str = Field(
        pattern=f"^{_VERSION.pattern}$", description="The version whose objects stay, no range."
    )
    name: str = Field(default="", description="Only of this run.")
    older_than: Age = Field(default=timedelta(0), description="Age by the store's clock.")

    def rules(self) -> tuple[Rule, ...]:
        """Return the same as rules."""
        return (
            Rule(
                what=tuple(sorted(_VERSIONED)),
                version=f"!={self.current}",
                name=self.name,
                older_than=self.older_than,
            ),
        )


class S3Manager(_Named):
    """Preset: delete objects of Millrace by age, prefix and suffix."""

    preset: Literal["s3_manager"] = "s3_manager"
    delete_old: Age = Field(
        default=timedelta(hours=48), description="Age by the store's clock: `48h`; `0h` takes all."
    )
    prefix: str = Field(default="", description="Only keys that begin with this.")
    suffix: str = Field(default="", description="Only keys that end with this.")

    def rules(self) -> tuple[Rule, ...]:
        """Return the same as rules."""
        what = set(What) - {What.JUNK, What.OTHER} - (_WHOLE if self.suffix else set())
        return (
            Rule(
                what=tuple(sorted(what)),
                older_than=self.delete_old,
                prefix=self.prefix,
                suffix=self.suffix,
            ),
        )


_PRESETS = ("cleanup_bucket", "delete_gather", "clean_versions", "s3_manager")


def _kind_of_rule(data: Any) -> str | None:
    """Tell a rule from a preset, so that an error is about that class alone."""
    if isinstance(data, dict):
        preset = cast("dict[str, Any]", data).get("preset", "rule")
    else:
        preset = getattr(data, "preset", "rule")
    return preset if preset in {"rule", *_PRESETS} else None


RuleOrPreset = Annotated[
    Annotated[Rule, Tag("rule")]
    | Annotated[CleanupBucket, Tag("cleanup_bucket")]
    | Annotated[DeleteGather, Tag("delete_gather")]
    | Annotated[CleanVersions, Tag("clean_versions")]
    | Annotated[S3Manager, Tag("s3_manager")],
    Discriminator(
        _kind_of_rule,
        custom_error_type="preset",
        custom_error_message=f"no such preset: write {', '.join(_PRESETS)}",
    ),
]


class CleanSettings(BaseModel):
    """Settings of a cleaning: the store, and the rules."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreSpec = Field(description="Store to clean, with credentials to write.")
    beside: tuple[StoreSpec, ...] = Field(
        default=(),
        description="Other places of the same runs, such as the aggregator's bucket of these "
        "gradients: leases there protect what is here.",
    )
    rules: tuple[RuleOrPreset, ...] = Field(
        min_length=1, description="The first that fits an object takes it."
    )
    pinned: tuple[Pin, ...] = Field(
        default=(), description="Keys and folders that never go, nor what is below them."
    )
    check: VerifyDepth = Field(
        default=VerifyDepth.DIGESTS,
        description="Check of the newest checkpoint: none before it is deleted without it.",
    )

    @property
    def whole(self) -> tuple[Rule, ...]:
        """All rules, those of presets among them."""
        each = (rule.rules() if not isinstance(rule, Rule) else (rule,) for rule in self.rules)
        return tuple(rule for some in each for rule in some)


class PlaceSettings(BaseModel):
    """The store that any settings file names; the rest of the file does not matter."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    store: StoreSpec = Field(description="Store to clean, with credentials to write.")


def taking(rules: tuple[Rule, ...], what: What, fits: Callable[[Rule], bool]) -> int | None:
    """Return the index of the first rule that is about a kind, and fits."""
    for place, rule in enumerate(rules):
        if what in rule.what and fits(rule):
            return place
    return None
