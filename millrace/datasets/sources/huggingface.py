"""Datasets of the Hugging Face Hub, whose files the library `datasets` finds.

The library resolves the configuration and the split to data files, at the commit that the plan
pins. Parquet files are then read as of the kind `parquet`. Other files are read by the library, one
shard of its iterable dataset after another, and images and sound are not decoded.

A cursor has the number of a shard, and the number of a row within the shard. The library's own
state (`state_dict`) has the same two numbers, and the library reads a shard from its beginning in
any case. So a run that continues opens the shard of its cursor, skips the rows before the cursor,
and needs no stored state.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from millrace import errors
from millrace.datasets.sample import Row, RowBatch, iterate_rows
from millrace.datasets.sources.arrow_rows import check_columns, guess_types, make_rows
from millrace.datasets.sources.base import Division, PartitionedSource
from millrace.datasets.sources.files import ExactPaths, list_files
from millrace.datasets.sources.http_files import RetryClock
from millrace.datasets.sources.hub_dataset import (
    FOLDERS,
    LIBRARY_VERSION,
    PARQUET,
    Columns,
    HubDataset,
    is_media,
    list_fields,
    open_hub_dataset,
    translate_error,
)
from millrace.datasets.sources.hub_files import HubFiles
from millrace.datasets.sources.parquet import divide_row_groups, read_schema, refuse_int96
from millrace.datasets.sources.ranges import partition_ranges
from millrace.datasets.sources.settings import SourceKind, SourceSettings
from millrace.datasets.sources.table import FileTable, unpack_row
from millrace.hub.client import find_asked_pause
from millrace.schemas.dataset import HubShardRange, SourceRange, SourceRecord


def partition_hub_dataset(
    settings: SourceSettings, files: HubFiles, division: Division
) -> PartitionedSource:
    """Divide a split of a dataset of the Hub into partitions.

    Each shard of the library's iterable dataset is one partition. The shards of a folder of images
    or sounds are single files, so several of these are one partition.

    Raises:
        NotFoundError: There is no such dataset, configuration or split.
        ChangedError: The commit of the plan is gone.
        ConfigurationError: The library cannot read the dataset, or lacks a column.
    """
    files.check_commit()
    dataset = open_hub_dataset(
        files.committed_spec,
        settings.config,
        settings.split,
        settings.load_kwargs,
        settings.columns,
    )
    table = list_files(files, ExactPaths(dataset.paths))
    described = SourceRecord(
        kind=settings.kind.value,
        url=files.url,
        settings={},
        files=len(table),
        size=table.size,
        digest=table.compute_digest(),
    )
    if dataset.rows is None:
        schema = read_schema(files, unpack_row(table.rows[0]))
        columns = _name_media_bytes(settings.columns, schema)
        ranges = divide_row_groups(files, table, division.partition_bytes, columns)
        record = described.model_copy(
            update={"kind": SourceKind.PARQUET.value, "settings": {"columns": columns}}
        )
        partitions = partition_ranges(ranges, division)
    else:
        refs = map(unpack_row, table.rows)
        refuse_int96(files, (file for file in refs if file.path.lower().endswith(PARQUET)))
        schema = dataset.read_schema()
        columns = _name_media_bytes(settings.columns, schema)
        check_columns(files.url, schema, columns)
        chosen = {
            "columns": columns,
            "config": settings.config,
            "split": dataset.split,
            "load_kwargs": settings.load_kwargs,
            "commit": files.committed_spec.revision,
            "reader": f"datasets {LIBRARY_VERSION}",
        }
        record = described.model_copy(update={"settings": chosen})
        shards = _divide_shards(dataset, dataset.rows.n_shards, table, division)
        partitions = partition_ranges(shards, division)
    return PartitionedSource(
        record,
        partitions,
        {},
        notes=_describe_guesses(dataset),
        field_types=guess_types(schema, columns),
    )


def _describe_guesses(dataset: HubDataset) -> tuple[str, ...]:
    """Return the note that the library guesses the types of values, if it does."""
    if dataset.builder_name == "csv":
        note = (
            "The library `datasets` guesses the types of CSV values, and writes 007 as 7. `kind: "
            "csv` at the same URL keeps them as they are."
        )
    elif dataset.builder_name == "json":
        note = (
            "The library `datasets` guesses the types of JSON values. `kind: jsonl` at the same "
            "URL keeps those of JSON lines as they are."
        )
    else:
        return ()
    return (note,)


def _divide_shards(
    dataset: HubDataset, shards: int, table: FileTable, division: Division
) -> list[HubShardRange]:
    """Return the ranges of shards, in the order of the library."""
    sizes = {file.path: file.size for file in map(unpack_row, table.rows)}
    if shards == len(dataset.paths):
        shard_sizes = [sizes.get(path, 1) for path in dataset.paths]
    else:
        shard_sizes = [max(1, table.size // shards)] * shards
    groups: list[list[int]] = []
    held = 0
    for number, size in enumerate(shard_sizes):
        if (
            not groups
            or dataset.builder_name not in FOLDERS
            or held + size > division.partition_bytes
            or len(groups[-1]) >= division.partition_files
        ):
            groups.append([])
            held = 0
        groups[-1].append(number)
        held += size
    total = max(1, sum(shard_sizes))
    ranges: list[HubShardRange] = []
    for group in groups:
        size = sum(shard_sizes[number] for number in group)
        rows = dataset.expected_rows * size // total
        ranges.append(
            HubShardRange(start=group[0], end=group[-1] + 1, size=max(1, size), rows=rows)
        )
    return ranges


class HubDatasetSource:
    """The rows of a split of a dataset of the Hub, as the library `datasets` reads them.

    Args:
        files: Files of the dataset.
        settings: Settings of the plan's source.
        types: Types of fields, by their names. Others have the types of their extensions.
    """

    def __init__(
        self, files: HubFiles, settings: Mapping[str, Any], types: Mapping[str, str]
    ) -> None:
        self._files, self._types = files, types
        self._columns: Columns = settings["columns"]
        self._open = lambda: open_hub_dataset(
            files.committed_spec,
            settings["config"],
            settings["split"],
            settings["load_kwargs"],
            self._columns,
        )

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows of a range of shards, from a cursor on."""
        return iterate_rows(self.iterate_batches(source_range, cursor))

    def iterate_batches(self, source_range: SourceRange, cursor: int) -> Iterator[RowBatch | Row]:
        """Yield the same rows in batches, where all of them make samples."""
        if not isinstance(source_range, HubShardRange):
            raise errors.ConfigurationError(
                f"Datasets of the Hub are divided by shards, not {source_range.kind}."
            )
        dataset = self._open()
        shard, row = source_range.locate(cursor)
        spec = self._files.committed_spec
        clock = RetryClock(spec.retry_timeout.total_seconds())
        while source_range.start + shard < source_range.end:
            number = source_range.start + shard
            where = f"{self._files.url}, split {dataset.split}, shard {number}"
            try:
                for batch in dataset.iterate_batches(number, row, self._columns):
                    yield from make_rows(
                        batch, self._columns, file_index=number,
                        first=row, cursor=source_range.make_cursor(shard, row), where=where,
                        types=self._types,
                    )  # fmt: skip
                    row += batch.num_rows
                    clock.restart()
            except Exception as error:  # noqa: BLE001 - the library raises errors of many kinds
                failure = translate_error(spec, where, f"read it after row {row}", error)
                clock.wait(failure, find_asked_pause(error))
                continue
            shard, row = shard + 1, 0


def _name_media_bytes(columns: Columns, schema: pa.Schema) -> dict[str, str] | None:
    """Return the columns of the fields, with the bytes of images, sounds and films."""
    media = {field.name for field in list_fields(schema) if is_media(field)}
    if columns is None:
        return None
    return {
        field: f"{column}.bytes" if column in media else column for field, column in columns.items()
    }
