"""Settings of the transforms between a source and the shards."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from millrace.datasets.field_names import check_distinct, check_field_name
from millrace.digest import OwnDigest
from millrace.formatting import shorten_url
from millrace.settings import Size

_FUNCTION = re.compile(r"(?P<where>[^:].*):(?P<name>[A-Za-z_]\w*)")

FieldName = Annotated[str, AfterValidator(check_field_name)]
"""Name of a field: an extension that webdataset reads back."""

FileDigest = Annotated[
    OwnDigest | None,
    Field(
        description="Digest that the file or the installed module must have. A machine without the "
        "file takes the file with this digest from the dataset."
    ),
]
"""Digest of the file or the module of a transform."""


class FilterSettings(BaseModel):
    """Settings of the transform that keeps the samples that meet all of its conditions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["filter"] = Field(
        default="filter", description="Name of this transform: `filter`."
    )
    field: FieldName = Field(description="Field that decides, such as `txt`.")
    min_size: Size | None = Field(
        default=None, ge=1, description="Smallest size of the field in bytes, such as `200`."
    )
    max_size: Size | None = Field(
        default=None, ge=1, description="Largest size of the field in bytes, such as `1MiB`."
    )
    include: str | None = Field(
        default=None,
        description="Regular expression that the text of the field must match somewhere. The "
        "syntax is that of RE2, without look-around and back-references.",
    )
    exclude: str | None = Field(
        default=None,
        description="Regular expression that the text of the field must not match anywhere.",
    )

    @field_validator("include", "exclude")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            # pyarrow is imported only for what needs it.
            import pyarrow  # noqa: PLC0415

            from millrace.datasets.transforms.patterns import match_pattern  # noqa: PLC0415

            try:
                match_pattern(pyarrow.array([""], pyarrow.large_string()), pattern)
            except ValueError as error:
                raise ValueError(
                    f"{pattern!r} is no regular expression of RE2 ({error}): write one without "
                    "look-around and back-references"
                ) from None
        return pattern

    @model_validator(mode="after")
    def _check_conditions(self) -> Self:
        smallest, largest = self.min_size, self.max_size
        if smallest is None and largest is None and self.include is None and self.exclude is None:
            raise ValueError(
                "a filter without a condition keeps every sample: set min_size, max_size, include "
                "or exclude"
            )
        if smallest is not None and largest is not None and smallest > largest:
            raise ValueError("min_size is larger than max_size: the filter would keep no sample")
        return self


class RenameSettings(BaseModel):
    """Settings of the transform that renames fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["rename"] = Field(
        default="rename", description="Name of this transform: `rename`."
    )
    fields: dict[FieldName, FieldName] = Field(
        min_length=1, description='New name of each field to rename, such as `{"text": "txt"}`.'
    )

    @field_validator("fields")
    @classmethod
    def _check_fields(cls, fields: dict[str, str]) -> dict[str, str]:
        check_distinct(fields.values())
        if len(set(fields.values())) < len(fields):
            raise ValueError("two fields get one name: give each field a name of its own")
        return fields


class JoinSettings(BaseModel):
    """Settings of the transform that adds a row of a table to each sample."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["join"] = Field(default="join", description="Name of this transform: `join`.")
    table: str = Field(
        description="Path or URL of the table, such as `./metadata.csv`: CSV or TSV with a header, "
        "JSON lines (`.jsonl`) or parquet, of at most 128 MiB. The bytes are stored in the dataset."
    )
    digest: FileDigest = None
    column: str = Field(
        default="file_name",
        description="Column that names the sample of a row: one of its files, such as "
        "`cats/1.jpg`, or its key, such as `cats/1`.",
    )
    field: FieldName | None = Field(
        default=None,
        description="Field whose text is equal to the value in `column`, such as `id`. By default "
        "the files and the key of a sample name its row.",
    )
    columns: dict[FieldName, str] | None = Field(
        default=None,
        min_length=1,
        description='Column of each new field, such as `{"txt": "caption"}`. By default the whole '
        "row becomes the field `json`.",
    )
    missing: Literal["quarantine", "drop", "keep"] = Field(
        default="quarantine",
        description="Treatment of a sample without a row: `quarantine`, `drop`, or `keep`, which "
        "leaves it without the new fields.",
    )

    @field_validator("table")
    @classmethod
    def _check_table(cls, table: str) -> str:
        if "://" in table and re.search("[?#]", table):  # which may be a signature
            raise ValueError(
                f"the URL {shorten_url(table)} has a query: name a URL without one, or a file"
            )
        if PurePosixPath(table).suffix.lower() not in {".csv", ".tsv", ".jsonl", ".parquet"}:
            raise ValueError(
                f"{table!r} is no table that can be read: name a file .csv, .tsv, .jsonl or "
                ".parquet"
            )
        return table

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str] | None) -> dict[str, str] | None:
        check_distinct(columns or {})
        return columns

    @property
    def extension(self) -> str:
        """Extension of the table, which decides how it is read."""
        return PurePosixPath(self.table).suffix.lower().removeprefix(".")


class FunctionSettings(BaseModel):
    """Settings of a transform that is a Python function."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["function"] = Field(
        default="function", description="Name of this transform: `function`."
    )
    function: str = Field(
        description="Function to call with each sample: `module:function` of an installed module, "
        "or `./clean.py:function` of a file. The function takes a dict of the fields, and "
        "returns a dict, a list of dicts, or None to drop the sample. A second argument "
        "gets a `random.Random` with a seed of the sample's own."
    )
    digest: FileDigest = None

    @field_validator("function")
    @classmethod
    def _check_function(cls, function: str) -> str:
        if not _FUNCTION.fullmatch(function):
            raise ValueError(
                f"{function!r} names no function: write module:function or ./file.py:function"
            )
        return function

    @property
    def file(self) -> str | None:
        """Path of the file of the function; None if the function is in an installed module."""
        where = self.function.rpartition(":")[0]
        is_file = where.endswith(".py") or len(PurePosixPath(where).parts) > 1
        return where if is_file else None

    @property
    def module(self) -> str:
        """Name of the installed module of the function."""
        return self.function.rpartition(":")[0]

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.rpartition(":")[2]


class TokenizeSettings(BaseModel):
    """Settings of the transform that replaces a text by its tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["tokenize"] = Field(
        default="tokenize", description="Name of this transform: `tokenize`."
    )
    tokenizer: str = Field(
        description="Path or URL of the `tokenizer.json` of a Hugging Face tokenizer, such as "
        "`./tokenizer.json`, `s3://bucket/tokenizer.json` or `https://...`. The bytes are stored "
        "in the dataset."
    )
    digest: FileDigest = None
    field: FieldName = Field(
        default="txt",
        description="Field with the text. The field `tokens` replaces it: little-endian integers "
        "of 16 bits if the vocabulary allows it, of 32 bits otherwise.",
    )
    end_token: str | None = Field(
        default=None,
        description="Token that is appended to each document, such as `<|endoftext|>`.",
    )
    add_special_tokens: bool = Field(
        default=False,
        description="Add the special tokens that the tokenizer itself adds to a text.",
    )
    truncate: int | None = Field(
        default=None, ge=1, description="Number of tokens after which a document is cut off."
    )
    pack: int | None = Field(
        default=None,
        ge=2,
        le=1 << 24,
        description="Number of tokens of a sample. The documents of a partition are joined, and "
        "divided into samples of this length. The last sample of a partition is "
        "shorter. No token is lost. Other fields are dropped.",
    )

    @model_validator(mode="after")
    def _check_packing(self) -> Self:
        if self.pack is not None and self.end_token is None:
            raise ValueError(
                "pack joins documents: set end_token, the token that ends each document"
            )
        if self.pack is not None and self.truncate is not None:
            raise ValueError("pack loses no token, and truncate does: set one of them")
        return self


_REQUIRED = {
    "tokenizer": "tokenize", "function": "function", "table": "join", "fields": "rename",
    "field": "filter",
}  # fmt: skip


def _find_kind(settings: Any) -> str | None:
    """Return the kind of a transform: as it is written, or by the settings that it requires."""
    if not isinstance(settings, dict):
        return getattr(settings, "kind", None)
    given = cast("dict[str, Any]", settings)
    return given.get("kind") or next((_REQUIRED[n] for n in _REQUIRED if n in given), None)


TransformSettings = Annotated[
    Annotated[FilterSettings, Tag("filter")]
    | Annotated[RenameSettings, Tag("rename")]
    | Annotated[JoinSettings, Tag("join")]
    | Annotated[FunctionSettings, Tag("function")]
    | Annotated[TokenizeSettings, Tag("tokenize")],
    Discriminator(
        _find_kind,
        custom_error_type="transform_kind",
        custom_error_message="a transform has a `kind`: filter, rename, join, function or tokenize",
    ),
]


def _check_order(transforms: list[TransformSettings]) -> list[TransformSettings]:
    for transform in transforms[:-1]:
        if isinstance(transform, TokenizeSettings) and transform.pack is not None:
            raise ValueError("a sample of packed tokens is of no one row: make pack the last step")
    return transforms


TransformList = Annotated[list[TransformSettings], AfterValidator(_check_order)]
"""Transforms in the order in which they are applied."""
