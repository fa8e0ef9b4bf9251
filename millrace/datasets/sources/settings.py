"""Settings that choose the samples of a source."""

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from millrace.datasets.field_names import check_distinct, check_field_name


class SourceKind(StrEnum):
    """Kind of a source."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    FILES = "files"
    WEBDATASET = "webdataset"


# Compressed tar files are taken, so that they are refused with a sentence.
_INCLUDE = {
    SourceKind.PARQUET: ["*.parquet"],
    SourceKind.WEBDATASET: [
        "*.tar", "*.tar.gz", "*.tgz", "*.tar.bz2", "*.tar.xz", "*.tar.zst", "*.tar.lz4"
    ],
}  # fmt: skip


class SourceSettings(BaseModel):
    """Settings that choose the samples of a source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: SourceKind = Field(
        default=SourceKind.JSONL,
        description="`jsonl` makes a sample of each line, `csv` and `parquet` of each row. `files` "
        "makes a sample of each file, or of each group of files that share their name up to the "
        "first dot. `webdataset` makes a sample of each such group of members of a tar file.",
    )
    include: list[str] | None = Field(
        default=None,
        description="Patterns of the files to take, such as `*.jsonl`. By default all files are "
        "taken; of the kind `parquet`, those whose names end in `.parquet`, and of `webdataset` in "
        "`.tar`.",
    )
    exclude: list[str] = Field(default=[], description="Patterns of the files to leave out.")
    paths: list[str] | None = Field(
        default=None,
        description="Files below an `https://` URL, which cannot be listed, such as "
        '`["a.jsonl", "b.jsonl"]`. Without them the URL is that of one file.',
    )
    allow_private: bool = Field(
        title="Allow private addresses",
        default=False,
        description="Read an `http://` or `https://` URL also if its host is in a private network, "
        "or is this machine.",
    )
    columns: dict[str, str] | None = Field(
        default=None,
        description='Column of each field of a sample, such as `{"txt": "text"}`, or part of a '
        'parquet column, such as `{"jpg": "image.bytes"}`. Not for `files` and `webdataset`. By '
        "default each row is kept whole as `json`.",
    )

    header: list[str] | None = Field(
        default=None,
        description="Names of the columns of CSV files without a header. By default they are the "
        "first row of each file.",
    )
    delimiter: str | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="Character between two values of CSV files. By default a tab for files that "
        "end in `.tsv` or `.tab`, and a comma for others.",
    )

    def get_include(self) -> list[str]:
        """Return the patterns of the files to take."""
        if self.include is not None:
            return self.include
        return _INCLUDE.get(self.kind, ["*"])

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str] | None) -> dict[str, str] | None:
        for name in columns or {}:
            check_field_name(name)
        check_distinct(columns or {})
        return columns or None

    @model_validator(mode="after")
    def _check_csv(self) -> Self:
        if self.kind is not SourceKind.CSV and (self.header or self.delimiter):
            raise ValueError("`header` and `delimiter` are for the kind `csv` only")
        if self.delimiter is not None and self.delimiter in '"\r\n':
            raise ValueError("`delimiter` cannot be a quote or the end of a line")
        return self

    @model_validator(mode="after")
    def _check_tars(self) -> Self:
        if self.kind is SourceKind.WEBDATASET and self.columns:
            raise ValueError(
                "`columns` are not for the kind `webdataset`, whose fields are the extensions of "
                "the members. Remove them, or name fields by the transform `rename`"
            )
        return self
