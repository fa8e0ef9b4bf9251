"""Sources of samples, and their division into partitions."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from millrace import errors
from millrace.datasets.sample import BadRow, Row, Sample
from millrace.datasets.sources.base import Division, PartitionedSource, Source
from millrace.datasets.sources.csv_rows import CsvSource
from millrace.datasets.sources.csv_values import UTF_8
from millrace.datasets.sources.files import LocatedFiles, Patterns, SourceFiles, list_files
from millrace.datasets.sources.folder import FolderSource, partition_folder
from millrace.datasets.sources.http_files import HttpFiles, is_web_url
from millrace.datasets.sources.jsonl import JsonLinesSource
from millrace.datasets.sources.local_files import LocalFiles
from millrace.datasets.sources.mirrors import (
    MirroredFiles,
    MirrorLocation,
    ReportFault,
    StoredDigests,
)
from millrace.datasets.sources.ranges import partition_ranges
from millrace.datasets.sources.settings import (
    DownloadSettings,
    SourceKind,
    SourceSettings,
    UrlSettings,
)
from millrace.datasets.sources.store_files import StoreFiles
from millrace.datasets.sources.tars import TarSource, divide_tars
from millrace.datasets.sources.text_files import divide_files
from millrace.datasets.sources.url_rows import UrlSource, divide_url_lists
from millrace.extras import import_extra_module
from millrace.formatting import clean_text, format_count
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import SourceRecord
from millrace.storage import Backend, Location, Store, StoreSpec, open_store

__all__ = [
    "BadRow",
    "Division",
    "DownloadSettings",
    "MirroredFiles",
    "PartitionedSource",
    "Row",
    "Sample",
    "Source",
    "SourceFiles",
    "SourceKind",
    "SourceSettings",
    "StoredDigests",
    "UrlSettings",
    "complete_spec",
    "describe_again",
    "is_store_url",
    "is_web_url",
    "open_files",
    "open_mirrored_files",
    "open_source",
    "partition_source",
]

_HUB = "hf://"
_CSV_SETTINGS = {"columns", "header", "delimiter", "encoding"}
_DOWNLOAD_NOTE = (
    "The URLs are requested while the run works. Another download may give other bytes, so a shard "
    "that is lost later cannot be made again: keep a copy of the shards."
)


def is_store_url(url: str) -> bool:
    """Decide whether a URL is that of a store, and not of a web server or of the Hub."""
    return not is_web_url(url) and not url.startswith(_HUB)


def open_files(
    spec: StoreSpec,
    *,
    paths: Sequence[str] | None = None,
    allow_private: bool = False,
    committed: str = "",
) -> LocatedFiles:
    """Open the files at the URL of a source. Nothing is sent.

    Args:
        spec: URL and credentials.
        paths: Paths of the files below the URL, for a web server, which cannot be listed.
        allow_private: Whether a web server may be in a private network or on this machine.
        committed: URL of the source in the plan of the dataset, which may name a commit of the Hub;
            empty if there is no plan.

    Raises:
        NotFoundError: There is no such folder.
        ConfigurationError: The URL names no store, or the settings do not fit it.
    """
    if is_web_url(spec.url):
        return HttpFiles(spec, paths, allow_private=allow_private)
    if spec.url.startswith(_HUB):
        return import_extra_module("millrace.datasets.sources.hub_files", "hub").HubFiles(
            spec, committed
        )
    if paths:
        raise errors.ConfigurationError(
            f"`paths` is for https://. Choose the files of {spec.url} by `include` and `exclude`."
        )
    store = open_store(spec, make_folder=False)
    if store.location.backend is Backend.FILE:
        return LocalFiles(Path(store.location.bucket))
    return StoreFiles(store)


def open_mirrored_files(
    specs: Sequence[StoreSpec],
    *,
    paths: Sequence[str] | None = None,
    allow_private: bool = False,
    committed: SourceRecord | None = None,
    digests: StoredDigests | None = None,
    report: ReportFault | None = None,
) -> MirroredFiles:
    """Open the files of a source that has several locations. Nothing is sent.

    Args:
        specs: URL and credentials of each location.
        paths: Paths of the files below each URL; None if a location is listed.
        allow_private: Whether a web server may be in a private network or on this machine.
        committed: Source in the plan of the dataset; None if there is no plan.
        digests: Digests of files, in the store of the dataset; None stores none.
        report: Function that receives faults of locations; by default they are logged.

    Raises:
        ConfigurationError: A URL names no store, or the settings do not fit it.
    """

    def open_location(spec: StoreSpec) -> MirrorLocation:
        is_web = is_web_url(spec.url)
        open_location_files = partial(
            open_files,
            spec,
            paths=(paths or ()) if is_web else None,
            allow_private=allow_private,
            committed=committed.url if committed else "",
        )
        location = MirrorLocation(spec.url, spec.endpoint or "", open_location_files)
        with suppress(errors.NotFoundError):  # a folder may be missing for a while
            _ = location.files
        return location

    return MirroredFiles(
        [open_location(spec) for spec in specs],
        committed=committed,
        digests=digests,
        paths=paths,
        report=report,
    )


def complete_spec(spec: StoreSpec) -> StoreSpec:
    """Return a store with its whole URL, and the endpoint and the region of the environment.

    Raises:
        ConfigurationError: The URL names no store, or the settings do not fit it.
    """
    if not is_store_url(spec.url):
        return spec
    try:
        store = open_store(spec, make_folder=False)
    except errors.NotFoundError:
        return spec.model_copy(update={"url": str(Location.parse(spec.url))})
    return store.spec.model_copy(update={"url": store.url})


def partition_source(
    settings: SourceSettings, files: SourceFiles, keys: DatasetKeys, division: Division
) -> PartitionedSource:
    """Divide a source into partitions. The result depends only on its files and the arguments.

    Args:
        settings: Settings that choose the samples.
        files: Files of the source.
        keys: Names of the dataset.
        division: Settings of the division.

    Raises:
        NotFoundError: The source has no files.
        ConfigurationError: A file cannot be divided.
    """
    if settings.kind is SourceKind.HUGGINGFACE:
        return _import_hub_datasets(files).partition_hub_dataset(settings, files, division)
    patterns = Patterns(settings.get_include(), settings.exclude)
    table = list_files(files, patterns)
    record = SourceRecord(
        kind=settings.kind.value,
        url=files.url,
        settings=_select_settings(settings),
        files=len(table),
        size=table.size,
        digest=table.compute_digest(),
        markers=table.markers,
    )
    match settings.kind:
        case SourceKind.JSONL:
            ranges = divide_files(files, table, division.partition_bytes, keys)
        case SourceKind.CSV:
            ranges = divide_files(files, table, division.partition_bytes, keys, whole=True)
            CsvSource(files, None, **record.settings).check_headers(ranges)
        case SourceKind.PARQUET:
            # pyarrow is imported only for what needs it.
            from millrace.datasets.sources.parquet import divide_row_groups  # noqa: PLC0415

            ranges = divide_row_groups(files, table, division.partition_bytes, settings.columns)
        case SourceKind.WEBDATASET:
            ranges = divide_tars(files, table, keys)
        case SourceKind.URLS:
            ranges = divide_url_lists(files, table, keys, settings, division.partition_files)
        case SourceKind.FILES:
            return partition_folder(record, table, keys, division, local=files.is_local)
    notes = _describe_unseekable(files)
    if not record.is_reproducible:
        notes += (_DOWNLOAD_NOTE,)
    if patterns.left_out is not None:
        path = clean_text(patterns.left_out)
        notes += (f"Files such as {path} are left out: no pattern of `include` takes them.",)
    return PartitionedSource(record, partition_ranges(ranges, division), {}, notes=notes)


def describe_again(settings: SourceSettings, committed: SourceRecord) -> SourceRecord:
    """Return the source of a plan with the settings of this run. Nothing is listed."""
    changed = {"kind": settings.kind.value, "settings": _select_settings(settings)}
    return committed.model_copy(update=changed)


def _import_hub_datasets(files: SourceFiles) -> ModuleType:
    """Import the module that reads datasets of the Hub.

    Raises:
        ConfigurationError: The files are not those of a whole dataset of the Hub, or the library is
            not installed.
    """
    if not getattr(files, "is_whole_dataset", False):
        raise errors.ConfigurationError(
            "The URL of the source is not that of a whole dataset of the Hub. For the kind "
            "`huggingface` write hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME@REVISION, "
            "and name a folder in `load_kwargs: {data_dir: ...}`."
        )
    return import_extra_module("millrace.datasets.sources.huggingface", "datasets")


def _select_settings(settings: SourceSettings) -> dict[str, Any]:
    """Return the settings that the samples of a kind of source depend on."""
    match settings.kind:
        case SourceKind.FILES | SourceKind.WEBDATASET:
            return {}
        case SourceKind.CSV:
            # The plans of earlier versions, which are adopted, have no encoding.
            left_out = {"encoding"} if settings.encoding == UTF_8 else set[str]()
            return settings.model_dump(include=_CSV_SETTINGS - left_out)
        case SourceKind.URLS:
            return settings.model_dump(mode="json", include={"columns", "urls"})
        case _:
            return {"columns": settings.columns}


def _describe_unseekable(files: SourceFiles) -> tuple[str, ...]:
    count = len(files.unseekable)
    if not count:
        return ()
    note = (
        f"The server sends no parts of {format_count(count, 'file')}. Each becomes one partition, "
        "and a run that continues reads it from the beginning."
    )
    return (note,)


def open_source(  # noqa: PLR0911 - one for each kind
    record: SourceRecord,
    files: SourceFiles,
    dataset_store: Store,
    *,
    types: Mapping[str, str] = MappingProxyType({}),
    any_version: bool = False,
    downloads: DownloadSettings | None = None,
    allow_private: bool = False,
) -> Source:
    """Return the source that a plan names.

    Args:
        record: Source of the plan.
        files: Files of the source.
        dataset_store: Store of the dataset.
        types: Types of fields, by their names. Others have the types of their extensions.
        any_version: Whether a file is also read if it was written again after the plan was made.
            The caller must then compare the bytes with a digest.
        downloads: Settings of the requests to the servers of a list of URLs; None for the defaults.
        allow_private: Whether these servers may be in a private network or on this machine.
    """
    columns = record.settings.get("columns")
    match SourceKind(record.kind):
        case SourceKind.JSONL:
            return JsonLinesSource(
                files, dataset_store, columns, types=types, any_version=any_version
            )
        case SourceKind.CSV:
            table_settings = {n: v for n, v in record.settings.items() if n in _CSV_SETTINGS}
            return CsvSource(
                files, dataset_store, **table_settings, types=types, any_version=any_version
            )
        case SourceKind.PARQUET:
            from millrace.datasets.sources.parquet import ParquetSource  # noqa: PLC0415

            return ParquetSource(files, columns, types=types, any_version=any_version)
        case SourceKind.WEBDATASET:
            return TarSource(files, dataset_store, any_version=any_version)
        case SourceKind.HUGGINGFACE:
            return _import_hub_datasets(files).HubDatasetSource(files, record.settings, types)
        case SourceKind.FILES:
            return FolderSource(files, dataset_store, any_version=any_version)
        case SourceKind.URLS:
            return UrlSource(
                files,
                dataset_store,
                columns,
                UrlSettings.model_validate(record.settings["urls"]),
                downloads or DownloadSettings(),
                types=types,
                allow_private=allow_private,
            )
