"""Settings that choose the samples of a source."""

import codecs
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from enum import StrEnum
from typing import Any, Self, cast

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from millrace.datasets.field_names import check_distinct, check_field_name
from millrace.datasets.sources.csv_values import UTF_8
from millrace.settings import Duration, Size

MAX_BODY_BYTES = 256 << 20
"""Bytes of bodies that a worker holds, and so the largest limit on the size of a body."""

# Names that Python gives to encodings with one byte for each character, of which ASCII is a part.
_SINGLE_BYTE = re.compile(r"iso8859-\d+|cp125\d|cp437|cp85[028]|cp866|koi8-[ru]|mac-roman")

# Arguments of `datasets.load_dataset` that the source sets itself, or that choose what code runs.
_REFUSED_ARGUMENTS = {
    "cache_dir", "download_config", "download_mode", "features", "keep_in_memory", "name",
    "num_proc", "path", "revision", "save_infos", "split", "storage_options", "streaming", "token",
    "trust_remote_code", "verification_mode",
}  # fmt: skip


class SourceKind(StrEnum):
    """Kind of a source."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    HUGGINGFACE = "huggingface"
    FILES = "files"
    WEBDATASET = "webdataset"
    URLS = "urls"


# Compressed tar files are taken, so that they are refused with a sentence.
_INCLUDE = {
    SourceKind.PARQUET: ["*.parquet"],
    SourceKind.WEBDATASET: [
        "*.tar", "*.tar.gz", "*.tgz", "*.tar.bz2", "*.tar.xz", "*.tar.zst", "*.tar.lz4"
    ],
}  # fmt: skip


class UrlSettings(BaseModel):
    """Settings of a list of URLs, which the samples depend on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url_field: str = Field(
        title="Column of the URLs",
        default="url",
        min_length=1,
        description="Column of the URLs in the list. A list of plain text has one URL a line.",
    )
    content_field: str | None = Field(
        default=None,
        description="Field of the body of an answer, such as `jpg`. By default the field is the "
        "extension of the answer's media type, or else that of the URL, or else `bin`.",
    )
    media_types: list[str] = Field(
        default=[],
        description="Patterns of the media types to take, such as `image/*`. Another answer makes "
        "no sample. By default all are taken.",
    )
    max_body_bytes: Size = Field(
        title="Largest body",
        default=ByteSize(8 << 20),
        ge=1,
        le=MAX_BODY_BYTES,
        description="Largest body of an answer; a larger one makes no sample. A worker reserves "
        "this size for each request, and at most 256 MiB, so that a larger limit allows fewer "
        "requests at a time.",
    )

    @field_validator("content_field")
    @classmethod
    def _check_content_field(cls, name: str | None) -> str | None:
        if name is not None:
            check_field_name(name)
        return name


class DownloadSettings(BaseModel):
    """Settings of the requests to the servers of a list of URLs. They can change at every run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: int = Field(
        default=32, ge=1, le=256, description="Requests at a time of each worker."
    )
    requests_per_host: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Requests at a time to one host, by all workers of this machine.",
    )
    host_interval: Duration = Field(
        title="Interval of a host",
        default=timedelta(milliseconds=100),
        ge=timedelta(0),
        le=timedelta(hours=1),
        description="Shortest time between two requests to one host, by all workers of this "
        "machine.",
    )
    timeout: Duration = Field(
        title="Time for a URL",
        default=timedelta(minutes=1),
        ge=timedelta(seconds=1),
        le=timedelta(hours=1),
        description="Longest time of a request, and of the retries of a URL. If a server asks for "
        "a longer pause (`Retry-After`), the URL makes no sample; many such URLs stop the run.",
    )
    max_unanswered: int = Field(
        title="URLs without an answer",
        default=50,
        ge=1,
        description="URLs without an answer or with an error of their server, one after another, "
        "that stop the run, since the network or a host may have failed for a while. Where other "
        "hosts answer, only one counts of a host that did not within the last hour.",
    )
    user_agent: str = Field(
        default="millrace",
        pattern=r"^[!-~]([ -~]*[!-~])?$",
        max_length=500,
        description="Name that the servers see, with an address at which their owners find you, "
        "such as `my-crawler (me@example.com)`. Some servers refuse requests without an address.",
    )


class SourceSettings(BaseModel):
    """Settings that choose the samples of a source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: SourceKind = Field(
        default=SourceKind.JSONL,
        description="`jsonl` makes a sample of each line; `csv`, `parquet` and `huggingface` (a "
        "dataset of the Hub) of each row; `files` of each group of files that share their name up "
        "to the first dot; `webdataset` of each such group in a tar file; `urls` of the answer to "
        "each URL of a list.",
    )
    include: list[str] | None = Field(
        default=None,
        description="Patterns of the files to take, such as `*.jsonl`. By default all files; "
        "`*.parquet` or `*.tar` for `parquet` and `webdataset`.",
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
        "or is this machine; also the URLs of a list, and where they redirect to.",
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
    encoding: str = Field(
        default=UTF_8,
        max_length=40,
        description="Encoding of CSV files: `utf-8`, or one with a byte for each character, such "
        "as `latin-1`, `windows-1252` or `koi8-r`. Samples have UTF-8.",
    )

    urls: UrlSettings = Field(
        title="List of URLs",
        default=UrlSettings(),
        description="Column of the URLs, and limits on the answers (`urls` only).",
    )

    config: str | None = Field(
        default=None,
        description="Configuration (subset) of a dataset of the Hub (`huggingface` only). By "
        "default the dataset's own default.",
    )
    split: str | None = Field(
        default=None,
        description="Split of a dataset of the Hub, such as `train` (`huggingface` only). It may "
        "be left out if there is only one.",
    )
    load_kwargs: dict[str, Any] = Field(
        title="Arguments of the library",
        default={},
        description='More arguments of `datasets.load_dataset`, such as `{"data_dir": "en"}`: '
        "texts, numbers and lists, but nothing that runs code (`huggingface` only).",
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

    @field_validator("encoding")
    @classmethod
    def _name_encoding(cls, name: str) -> str:
        """Return the encoding's own name, which a plan has for all of its aliases."""
        with suppress(LookupError, ValueError):
            found = codecs.lookup(name).name.removesuffix("-sig")
            if found == UTF_8 or _SINGLE_BYTE.fullmatch(found):
                return found
        raise ValueError(
            "`encoding` is UTF-8, or one with a byte for each character: ISO 8859, Windows 125x, "
            "the code pages 437, 850, 852, 858 and 866, KOI8, Mac Roman. Convert other files to "
            "UTF-8, as `iconv -f utf-16 -t utf-8` does"
        )

    @model_validator(mode="after")
    def _check_csv(self) -> Self:
        is_default = self.encoding == UTF_8 and not (self.header or self.delimiter)
        if self.kind is not SourceKind.CSV and not is_default:
            raise ValueError("`header`, `delimiter` and `encoding` are for the kind `csv` only")
        if self.delimiter is not None and self.delimiter in '"\r\n':
            raise ValueError("`delimiter` cannot be a quote or the end of a line")
        try:
            (self.delimiter or "").encode(self.encoding)
        except UnicodeEncodeError:
            raise ValueError(f"`delimiter` is no character of {self.encoding}") from None
        return self

    @model_validator(mode="after")
    def _check_tars(self) -> Self:
        if self.kind is SourceKind.WEBDATASET and self.columns:
            raise ValueError(
                "`columns` are not for the kind `webdataset`, whose fields are the extensions of "
                "the members. Remove them, or name fields by the transform `rename`"
            )
        return self

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        if self.kind is not SourceKind.URLS:
            if self.urls != UrlSettings():
                raise ValueError("`urls` has settings for the kind `urls` only")
        elif (name := self.urls.content_field) is not None:
            row_fields = self.columns or {"json": "the row"}
            if name.lower() in {field.lower() for field in row_fields}:
                raise ValueError(
                    f"`content_field` is {name!r}, which is also a field of the row: choose "
                    "another name, or other `columns`"
                )
        return self

    @field_validator("load_kwargs")
    @classmethod
    def _check_load_kwargs(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if refused := sorted(_REFUSED_ARGUMENTS.intersection(arguments)):
            raise ValueError(
                f"`load_kwargs` cannot have {refused[0]!r}: no code of a dataset is run, and the "
                "source has its own settings for the configuration, the split and the token. "
                "Remove it"
            )
        if not _is_plain(arguments):
            raise ValueError("`load_kwargs` can only have texts, numbers, booleans and lists")
        for name in ("data_dir", "data_files"):
            for path in find_texts(arguments.get(name)):
                if not is_path_of_repository(path):
                    raise ValueError(
                        f"`{name}` in `load_kwargs` can only name files of the dataset, and "
                        f"{path!r} is another location. Write a path below the dataset's folder"
                    )
        return arguments

    @model_validator(mode="after")
    def _check_huggingface(self) -> Self:
        if self.kind is SourceKind.HUGGINGFACE:
            if self.include or self.exclude or self.paths:
                raise ValueError(
                    "`include`, `exclude` and `paths` are not for the kind `huggingface`: choose "
                    "files by `config`, `split` or `load_kwargs`"
                )
        elif self.config or self.split or self.load_kwargs:
            raise ValueError(
                "`config`, `split` and `load_kwargs` are for the kind `huggingface` only"
            )
        return self


def _is_plain(value: object) -> bool:
    """Decide whether a value is one of JSON."""
    match value:
        case dict():
            members = cast("dict[object, object]", value)
            return all(isinstance(key, str) and _is_plain(one) for key, one in members.items())
        case list():
            return all(_is_plain(one) for one in cast("list[object]", value))
        case _:
            return value is None or isinstance(value, str | int | float)


def find_texts(value: object) -> Iterator[str]:
    """Yield the texts in a value of JSON."""
    match value:
        case str():
            yield value
        case dict():
            for one in cast("dict[object, object]", value).values():
                yield from find_texts(one)
        case list():
            for one in cast("list[object]", value):
                yield from find_texts(one)
        case _:
            pass


def is_path_of_repository(path: str) -> bool:
    """Decide whether a path or pattern only leads to files of its repository."""
    parts = path.replace("\\", "/").split("/")
    return not path.startswith(("/", "\\", "~")) and ":" not in path and ".." not in parts
