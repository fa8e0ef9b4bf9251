"""Hold sealed datasets against what their manifests say."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace import datasets
from millrace.datasets import Verification
from millrace.keys import DatasetKeys
from millrace.storage import StoreSpec, exists, open_store
from tasks.reports import Markdown, code, document, publish, table, write
from tasks.retries import PAUSES, passing
from tasks.words import format_count, size

_SHOWN = 100  # shards at fault in a report


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def sealed_datasets(place: StoreSpec) -> list[str]:
    """Return the datasets right below a store's URL that are complete."""
    store = open_store(place, make_folder=False)
    names = datasets.find_datasets(store)
    return [name for name in names if exists(store, DatasetKeys(name).manifest)]


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def verify_shards(place: StoreSpec, dataset: str, *, digests: bool) -> Verification:
    """Hold every shard of a dataset against its manifest."""
    found = datasets.verify(open_store(place, make_folder=False), dataset, digests=digests)
    get_run_logger().info(
        "%s: %s, %d at fault", dataset, format_count(found.shards, "shard"), len(found.faults)
    )
    return found


@task(cache_policy=NO_CACHE)
def report_verifications(place: str, found: dict[str, Verification]) -> None:
    """Leave a report that a person wants to read."""
    publish(
        describe(place, found), key="verified-datasets", description="Result of the verification"
    )


def describe(place: str, found: dict[str, Verification]) -> Markdown:
    """Return the report."""
    faults = [(code(fault.key), fault.reason) for seen in found.values() for fault in seen.faults]
    verdict = f"{format_count(len(faults), 'shard')} at fault" if faults else "every shard is there"
    rows = [
        (
            dataset, f"{seen.shards:,}", size(seen.size),
            "sizes and SHA-256" if seen.digests else "sizes", f"{len(seen.faults):,}",
        )
        for dataset, seen in found.items()
    ]  # fmt: skip
    return document(
        write("{}: {}, {}.", code(place), format_count(len(found), "sealed dataset"), verdict),
        table(("dataset", ">shards", ">bytes", "looked at", ">at fault"), rows),
        table(("shard", "what is wrong"), faults, _SHOWN) if faults else Markdown(),
    )
