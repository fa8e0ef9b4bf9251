"""Versions of the code that decides the bytes of shards. A plan has them, and workers compare."""

from collections.abc import Iterable, Sequence

from millrace import errors
from millrace.datasets.formats import ShardFormat, open_format
from millrace.datasets.sources import SourceKind
from millrace.schemas.dataset import Partition, RowRange, ShardLayout

# Versions of the code that turns a row into the bytes of a sample. A change of that code which
# changes the bytes must change a version.
_ROW_VERSIONS = {"rows": "3", "json": "orjson-3"}
_PYARROW = "pyarrow"  # its version is that of a package
_TABLE_VERSIONS = {"table": "4"}  # of rows of Arrow tables
_KIND_VERSIONS = {
    SourceKind.JSONL.value: {"jsonl": "2"},
    SourceKind.PARQUET.value: _TABLE_VERSIONS,
    SourceKind.HUGGINGFACE.value: _TABLE_VERSIONS,
    SourceKind.CSV.value: {"csv": "1"},
    SourceKind.WEBDATASET.value: {"tar": "2"},
    SourceKind.URLS.value: {"urls": "2"},
}


def list_writers(
    formats: Iterable[ShardFormat], source_kind: str, partition: Partition | None
) -> dict[str, str]:
    """Return the versions of the code of this process that decides the bytes of shards.

    Args:
        formats: Formats of the shards.
        source_kind: Kind of the source.
        partition: Any partition of the source, since a list of URLs may be a table; None if there
            is none.
    """
    is_table = partition is not None and isinstance(partition.source_range, RowRange)
    return {
        **{name: version for one in formats for name, version in one.writer.items()},
        **_ROW_VERSIONS,
        **_KIND_VERSIONS.get(source_kind, {}),
        **(_TABLE_VERSIONS if is_table else {}),
    }


def describe_writers(
    dataset: str,
    layout: ShardLayout,
    source_kind: str,
    partition: Partition | None,
    formats: Sequence[str] | None = None,
) -> str:
    """Describe the versions of a plan's writers that differ from those of this process.

    Args:
        dataset: Name of the dataset.
        layout: Layout of the shards in the plan.
        source_kind: Kind of the source.
        partition: Any partition, as for `list_writers`.
        formats: Formats whose writers count; by default all of the plan.

    Returns:
        Sentences, the last one with what to install and without its end; empty if all are equal.
    """
    own = list_writers(
        map(open_format, layout.formats if formats is None else formats), source_kind, partition
    )
    all_formats = map(open_format, layout.formats)
    others = {name for one in all_formats for name in one.writer} - own.keys()
    planned = {name: one for name, one in layout.writer.items() if name not in others}
    differing = {
        name: f"{name} {planned.get(name, 'none')}, now {own.get(name, 'none')}"
        for name in sorted(planned.keys() | own)
        if planned.get(name) != own.get(name)
    }
    if not differing:
        return ""
    needed: list[str] = []
    if _PYARROW in differing and _PYARROW in planned:
        needed.append(f"{_PYARROW}=={planned[_PYARROW]}")
    if differing.keys() - {_PYARROW}:
        needed.append("the version of Millrace that planned it")
    return (
        f"The dataset {dataset} was planned with other versions of its writers "
        f"({'; '.join(differing.values())}). Install {' and '.join(needed)}"
    )


def check_writers(
    dataset: str, layout: ShardLayout, source_kind: str, partition: Partition
) -> None:
    """Check that this process makes the bytes that the plan of a dataset means.

    Args:
        dataset: Name of the dataset.
        layout: Layout of the shards in the plan.
        source_kind: Kind of the source.
        partition: Partition to shard.

    Raises:
        ConfigurationError: A version differs.
    """
    if writers := describe_writers(dataset, layout, source_kind, partition):
        raise errors.ConfigurationError(f"{writers} on this machine.")
