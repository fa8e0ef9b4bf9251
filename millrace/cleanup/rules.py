"""Rules that choose the objects to delete: from a settings file, a block's form, or a preset."""

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
from millrace.keys.kinds import ObjectKind
from millrace.settings import Duration
from millrace.storage import StoreSpec

_VERSION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+-]*[A-Za-z0-9])?")
_CLAUSE = re.compile(r"(===|==|!=|<=|>=|~=|<|>)\s*(\S+)")


Age = Annotated[Duration, Field(ge=timedelta(0), le=timedelta(weeks=5000))]
"""Age of an object: a duration of at most 5000 weeks."""


Pin = Annotated[str, Field(pattern=r"^[^/]")]
"""Key or folder below the store's URL, without a ``/`` at the beginning."""


class CleanupKind(StrEnum):
    """Kind of objects that a rule is about."""

    GRADIENTS = "gradients"
    START_WINDOWS = "start windows"  # and registrations: what workers report of themselves
    GATHERS = "gathers"  # links, the updates that they name, and the rules of windows
    CHECKPOINTS = "checkpoints"  # whole: the metadata first, then files that no other names
    CHECKPOINT_ORPHANS = "checkpoint orphans"  # files that no checkpoint names
    DATASETS = "datasets"  # whole: the manifest first
    DATASET_ORPHANS = "dataset orphans"  # objects that a complete dataset's ledger does not name
    TEMPORARY = "temporary"  # old probes, plans of cleaning, reports of rented machines
    JUNK = "junk"  # keys below a worker's prefix that Millrace does not name
    OTHER = "other"  # objects that Millrace did not write


KINDS_OF_SINGLE_OBJECTS = {
    ObjectKind.GRADIENT: CleanupKind.GRADIENTS,
    ObjectKind.START_WINDOW: CleanupKind.START_WINDOWS,
    ObjectKind.REGISTRATION: CleanupKind.START_WINDOWS,
    ObjectKind.UPDATE: CleanupKind.GATHERS,
    ObjectKind.LINK: CleanupKind.GATHERS,
    ObjectKind.OPENING: CleanupKind.GATHERS,
    ObjectKind.SCORES: CleanupKind.GATHERS,
    ObjectKind.TEMPLAR_GATHER: CleanupKind.GATHERS,
    ObjectKind.TEMPLAR_CHECKPOINT: CleanupKind.CHECKPOINTS,
    ObjectKind.TEMPORARY: CleanupKind.TEMPORARY,
    ObjectKind.JUNK: CleanupKind.JUNK,
}
"""Kinds of objects that are deleted one by one, by the kind of their key."""
_VERSIONED = {CleanupKind.GRADIENTS, CleanupKind.START_WINDOWS, CleanupKind.GATHERS}
_UNIT_KINDS = {CleanupKind.CHECKPOINTS, CleanupKind.DATASETS}


class _StrictSettings(BaseModel):
    """Settings whose errors list the known names when a name is unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = list(cls.model_fields)
            unknown = [str(name) for name in cast("dict[Any, Any]", data) if name not in known]
            if unknown:
                raise ValueError(f"no setting {', '.join(unknown)}: write {', '.join(known)}")
        return data  # pyright: ignore[reportUnknownVariableType] - pydantic's


class Rule(_StrictSettings):
    """Conditions for deletion. An object that meets all of them is deleted, unless protected.

    `keep_last` and `keep_every` are no conditions. They exempt objects that meet all others but the
    age, from this rule and from later ones.
    """

    kinds: tuple[CleanupKind, ...] = Field(
        min_length=1,
        description="Kinds of objects. `gathers`: links and updates of an aggregator. `checkpoint "
        "orphans`: files that no checkpoint names. `datasets`: whole datasets. "
        "`dataset orphans`: objects that a complete dataset's ledger does not name. "
        "`temporary`: probes, old plans, reports of rented machines. `junk`: keys "
        "below the prefix of a training worker or member that Millrace does not name. "
        "`other`: objects that Millrace did not write. Templar's objects at the root of a bucket "
        "are of these kinds too. Its start windows and its gathers in `.npz` files are taken only "
        "by a rule with a version.",
    )
    older_than: Age = Field(
        default=timedelta(hours=48),
        description="Least age by the store's clock, such as `48h`, `2d` or `90m`; `0h` for any. "
        "A checkpoint is as old as its metadata, a dataset as its youngest object.",
    )
    name: str = Field(default="", description="Only objects of this run, job or dataset.")
    prefix: str = Field(default="", description="Only keys that begin with this text.")
    suffix: str = Field(default="", description="Only keys that end with this text.")
    match: str = Field(
        default="",
        description="Only keys that match this pattern, such as `logs/*.txt`. `*` matches slashes, "
        "too.",
    )
    version: str = Field(
        default="",
        description="Only objects of this version, such as `0.2.1`, or of a range of versions, "
        "such as `>=0.2,<0.3` or `!=0.2.11`.",
    )
    keep_last: int = Field(
        default=0,
        ge=0,
        description="Number of the newest windows or steps of each run to keep, at any age. No "
        "later rule takes them.",
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="Keep windows or steps that are multiples of this, at any age. No later rule "
        "takes them.",
    )

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        kinds = set(self.kinds)
        if self.version and kinds - _VERSIONED:
            raise ValueError(f"{_join_kinds(kinds - _VERSIONED)} have no version: leave it out")
        numbered = {*_VERSIONED, CleanupKind.CHECKPOINTS}
        if (self.keep_last or self.keep_every) and kinds - numbered:
            raise ValueError(
                f"{_join_kinds(kinds - numbered)} have neither windows nor steps: leave keep_last "
                "and keep_every out"
            )
        if (self.suffix or self.match) and kinds & _UNIT_KINDS:
            raise ValueError(
                f"{_join_kinds(kinds & _UNIT_KINDS)} go whole: leave suffix and match out"
            )
        if CleanupKind.OTHER in kinds and not (self.prefix or self.suffix or self.match):
            raise ValueError(
                "objects that Millrace did not write go by name only: give a prefix, a suffix, or "
                "match (`*` for all)"
            )
        if self.version:
            is_version_in("0", self.version)
        return self


def _join_kinds(kinds: set[CleanupKind]) -> str:
    return " and ".join(sorted(kinds))


@lru_cache(maxsize=4096)
def is_version_in(version: str, wanted: str) -> bool:
    """Tell whether a version equals the wanted one, or is in the wanted range.

    Versions are compared by PEP 440. A text that is no PEP 440 version equals only itself, and is
    in no range.

    Raises:
        ValueError: ``wanted`` is neither a version nor a range.
    """
    if _VERSION.fullmatch(wanted):
        return _is_same_version(version, wanted)
    clauses = [clause.strip() for clause in wanted.split(",")]
    results = [_is_clause_met(version, clause) for clause in clauses]  # an invalid clause raises
    return all(results)


def _is_clause_met(version: str, clause: str) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise ValueError(f"{clause!r} is no version or range: write 0.2.1, or >=0.2,<0.3")
    sign, other = match.groups()
    if sign in {"==", "===", "!="} and _VERSION.fullmatch(other):
        return _is_same_version(version, other) is (sign != "!=")
    try:
        return SpecifierSet(clause).contains(Version(version), prereleases=True)
    except InvalidSpecifier:
        raise ValueError(
            f"{clause!r} is no range of versions: write 0.2.1, or >=0.2,<0.3"
        ) from None
    except InvalidVersion:
        return False


def _is_same_version(one: str, other: str) -> bool:
    try:
        return one == other or Version(one) == Version(other)
    except InvalidVersion:
        return False


class CleanupBucketPreset(_StrictSettings):
    """Preset: delete gradients, start windows, orphans and temporary objects."""

    preset: Literal["cleanup_bucket"] = Field(
        default="cleanup_bucket", description="Name of the preset."
    )
    older_than: Age = Field(
        default=timedelta(hours=48), description="Least age by the store's clock."
    )
    keep_checkpoints: int | None = Field(
        default=None,
        ge=1,
        description="Number of newest checkpoints of each job to keep; by default all.",
    )

    def make_rules(self) -> tuple[Rule, ...]:
        """Return the rules of the preset."""
        kinds = (
            CleanupKind.GRADIENTS,
            CleanupKind.START_WINDOWS,
            CleanupKind.CHECKPOINT_ORPHANS,
            CleanupKind.DATASET_ORPHANS,
            CleanupKind.TEMPORARY,
        )
        first = Rule(kinds=kinds, older_than=self.older_than)
        if self.keep_checkpoints is None:
            return (first,)
        old = Rule(
            kinds=(CleanupKind.CHECKPOINTS,),
            older_than=self.older_than,
            keep_last=self.keep_checkpoints,
        )
        return first, old


class DeleteGatherPreset(_StrictSettings):
    """Preset: delete the merged gradients of one version, up to the newest checkpoint."""

    preset: Literal["delete_gather"] = Field(
        default="delete_gather", description="Name of the preset."
    )
    version: str = Field(min_length=1, description="Version, or a range of versions.")
    name: str = Field(default="", description="Only objects of this run.")
    older_than: Age = Field(default=timedelta(0), description="Least age by the store's clock.")

    def make_rules(self) -> tuple[Rule, ...]:
        """Return the rules of the preset."""
        return (
            Rule(
                kinds=(CleanupKind.GATHERS,),
                version=self.version,
                name=self.name,
                older_than=self.older_than,
            ),
        )


class CleanVersionsPreset(_StrictSettings):
    """Preset: delete the objects of every version but the current one."""

    preset: Literal["clean_versions"] = Field(
        default="clean_versions", description="Name of the preset."
    )
    current_version: str = Field(
        pattern=f"^{_VERSION.pattern}$",
        description="Version whose objects stay. A range is not allowed.",
    )
    name: str = Field(default="", description="Only objects of this run.")
    older_than: Age = Field(default=timedelta(0), description="Least age by the store's clock.")

    def make_rules(self) -> tuple[Rule, ...]:
        """Return the rules of the preset."""
        return (
            Rule(
                kinds=tuple(sorted(_VERSIONED)),
                version=f"!={self.current_version}",
                name=self.name,
                older_than=self.older_than,
            ),
        )


class S3ManagerPreset(_StrictSettings):
    """Preset: delete objects of Millrace by age, prefix and suffix."""

    preset: Literal["s3_manager"] = Field(default="s3_manager", description="Name of the preset.")
    older_than: Age = Field(
        default=timedelta(hours=48),
        description="Least age by the store's clock, such as `48h`; `0h` for any.",
    )
    prefix: str = Field(default="", description="Only keys that begin with this text.")
    suffix: str = Field(default="", description="Only keys that end with this text.")

    def make_rules(self) -> tuple[Rule, ...]:
        """Return the rules of the preset."""
        kinds = (
            set(CleanupKind)
            - {CleanupKind.JUNK, CleanupKind.OTHER}
            - (_UNIT_KINDS if self.suffix else set())
        )
        return (
            Rule(
                kinds=tuple(sorted(kinds)),
                older_than=self.older_than,
                prefix=self.prefix,
                suffix=self.suffix,
            ),
        )


_PRESETS = ("cleanup_bucket", "delete_gather", "clean_versions", "s3_manager")


def _find_rule_tag(data: Any) -> str | None:
    """Tell a rule from a preset, so that an error is about that class alone."""
    if isinstance(data, dict):
        preset = cast("dict[str, Any]", data).get("preset", "rule")
    else:
        preset = getattr(data, "preset", "rule")
    return preset if preset in {"rule", *_PRESETS} else None


RuleOrPreset = Annotated[
    Annotated[Rule, Tag("rule")]
    | Annotated[CleanupBucketPreset, Tag("cleanup_bucket")]
    | Annotated[DeleteGatherPreset, Tag("delete_gather")]
    | Annotated[CleanVersionsPreset, Tag("clean_versions")]
    | Annotated[S3ManagerPreset, Tag("s3_manager")],
    Discriminator(
        _find_rule_tag,
        custom_error_type="preset",
        custom_error_message=f"no such preset: write {', '.join(_PRESETS)}",
    ),
]


class CleanupSettings(BaseModel):
    """Settings of a cleaning: the store, and the rules."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreSpec = Field(description="Store to clean, with credentials to write.")
    related_stores: tuple[StoreSpec, ...] = Field(
        default=(),
        description="Other stores of the same runs, such as the aggregator's bucket for these "
        "gradients. Leases in them protect the objects of this store.",
    )
    rules: tuple[RuleOrPreset, ...] = Field(
        min_length=1,
        description="Rules in order. The first rule that takes or keeps an object decides.",
    )
    pins: tuple[Pin, ...] = Field(
        default=(),
        description="Keys and folders that are never deleted, with all that is below them.",
    )
    check: VerifyDepth = Field(
        default=VerifyDepth.DIGESTS,
        description="Check of the newest checkpoint. Older ones are deleted only after it passes.",
    )

    @property
    def expanded_rules(self) -> tuple[Rule, ...]:
        """All rules, with each preset replaced by its rules."""
        each = (rule.make_rules() if not isinstance(rule, Rule) else (rule,) for rule in self.rules)
        return tuple(rule for some in each for rule in some)


class StoreOnlySettings(BaseModel):
    """Store of any settings file. Other settings of the file are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    store: StoreSpec = Field(description="Store to clean, with credentials to write.")


def find_rule(
    rules: tuple[Rule, ...], kind: CleanupKind, is_match: Callable[[Rule], bool]
) -> int | None:
    """Return the index of the first rule for a kind that matches, or None."""
    for index, rule in enumerate(rules):
        if kind in rule.kinds and is_match(rule):
            return index
    return None
