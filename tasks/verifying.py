"""Tasks that verify complete datasets against their manifests."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace import datasets, errors
from millrace.datasets import Verification
from millrace.errors import format_error
from millrace.keys.datasets import DatasetKeys
from millrace.storage import StoreSpec, exists, open_store
from tasks.formatting import format_count, format_size
from tasks.reports import (
    Markdown,
    format_code,
    format_markdown,
    format_table,
    format_unfinished,
    join_blocks,
    publish_report,
)
from tasks.retries import retried_task

_SHOWN = 100  # faulty objects in a report


@retried_task
def list_complete_datasets(spec: StoreSpec) -> list[str]:
    """Return the complete datasets below a store's URL, also those below other datasets."""
    store = open_store(spec, make_folder=False)
    names = datasets.find_datasets(store)
    return [name for name in names if exists(store, DatasetKeys(name).manifest)]


@retried_task
def verify_shards(spec: StoreSpec, dataset: str, *, with_digests: bool) -> Verification:
    """Verify every shard of a dataset against its manifest.

    A manifest of a dataset with another name is a fault of this dataset, and others are verified.
    """
    store, keys = open_store(spec, make_folder=False), DatasetKeys(dataset)
    try:
        found = datasets.verify_dataset(store, dataset, digests=with_digests)
    except errors.ConfigurationError as error:
        fault = datasets.ShardFault(keys.manifest, str(error))
        return Verification(0, 0, (), with_digests, other_faults=(fault,))
    get_run_logger().info(
        "%s: %s, %d of them faulty", dataset, format_count(found.shards, "shard"), len(found.faults)
    )
    return found


@retried_task
def verify_mirror(
    spec: StoreSpec, mirror: StoreSpec, dataset: str, *, with_digests: bool
) -> Verification:
    """Verify the copies of a dataset in a mirror against the manifest of the bucket.

    A mirror that cannot be read is a fault of the mirror, and not of the run.
    """
    store = open_store(spec, make_folder=False)
    return datasets.verify_mirror(store, mirror, dataset, digests=with_digests)


def make_failed_verification(
    dataset: str, error: errors.MillraceError, *, with_digests: bool
) -> Verification:
    """Return the result of a verification that an error of the dataset itself has ended."""
    fault = datasets.ShardFault(DatasetKeys(dataset).manifest, format_error(error))
    return Verification(0, 0, (), with_digests, other_faults=(fault,))


@task(cache_policy=NO_CACHE)
def report_verifications(url: str, found: dict[str, Verification], end: str = "") -> None:
    """Publish the report of the verified datasets.

    Args:
        url: URL of the bucket.
        found: Result of each dataset.
        end: Error that ended the run before all datasets were verified; empty without one.
    """
    publish_report(
        describe_verifications(url, found, end),
        key="verified-datasets",
        description="Result of the verification",
    )


def describe_verifications(url: str, found: dict[str, Verification], end: str = "") -> Markdown:
    """Return the report of the verified datasets.

    Args:
        url: URL of the bucket.
        found: Result of each dataset.
        end: Error that ended the run before all datasets were verified; empty without one.
    """
    if not found:
        return format_markdown(
            "{} has no complete dataset, so nothing was verified.", format_code(url)
        )
    faults = [
        (format_code(fault.key), fault.reason)
        for seen in found.values()
        for fault in seen.all_faults
    ]
    shards = sum(len(seen.faults) for seen in found.values())
    parts = [f"{format_count(shards, 'shard')} at fault"] if shards else []
    if not shards and all(seen.shards or not seen.other_faults for seen in found.values()):
        parts = ["every shard is there"]  # otherwise a manifest could not be read
    if others := sum(len(seen.other_faults) for seen in found.values()):
        parts.append(f"{format_count(others, 'other object')} at fault")
    if strays := sum(len(seen.strays) for seen in found.values()):
        parts.append(f"{format_count(strays, 'object')} beside the shards")
    rows = [
        (
            dataset, f"{seen.shards:,}", format_size(seen.size),
            "sizes and digests" if seen.includes_digests else "sizes", f"{len(seen.faults):,}",
        )
        for dataset, seen in found.items()
    ]  # fmt: skip
    return join_blocks(
        format_markdown(
            "{}: {}, {}.",
            format_code(url),
            format_count(len(found), "complete dataset"),
            ", ".join(parts),
        ),
        format_unfinished(end),
        format_table(("Dataset", ">Shards", ">Size", "Compared", ">Faulty shards"), rows),
        *(format_markdown("{}", note) for seen in found.values() for note in seen.notes),
        format_table(("Object", "Fault"), faults, _SHOWN) if faults else Markdown(),
    )
