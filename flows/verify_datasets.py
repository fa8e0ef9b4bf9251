"""Hold sealed datasets against their manifests, by hand or every night."""

from enum import StrEnum

from prefect import flow

from millrace.datasets import Verification
from millrace.errors import CorruptError
from millrace.storage import Right
from tasks.places import BucketLocation, check_right, known, named_bucket, skipped, spec_of
from tasks.verifying import report_verifications, sealed_datasets, verify_shards


class Depth(StrEnum):
    """Depth of a verification of shards."""

    SIZES = "sizes"
    BYTES = "bytes"


@flow(name="verify-datasets")
def verify_datasets(
    bucket: BucketLocation,
    datasets: list[str] | None = None,
    depth: Depth = Depth.SIZES,
) -> dict[str, Verification] | None:
    """Check that every shard of sealed datasets is there, and is what was written.

    Args:
        bucket: A Millrace Bucket block with read credentials, its name, or a URL.
        datasets: Datasets to verify. Left out: all that are right below the bucket's URL.
        depth: `sizes` asks for each shard's size; `bytes` reads all of it and compares digests.
    """
    found_bucket = known(bucket)
    if found_bucket is None:
        return skipped([named_bucket(bucket)], "nothing was verified")  # pyright: ignore[reportReturnType] - Prefect's way
    place = spec_of(found_bucket, Right.READ)
    check_right(found_bucket, Right.READ)
    found = {
        dataset: verify_shards(place, dataset, digests=depth is Depth.BYTES)
        for dataset in datasets or sealed_datasets(place)
    }
    report_verifications(place.url, found)
    faults = sum(len(seen.faults) for seen in found.values())
    if faults:
        raise CorruptError(
            f"{faults} shards of {place.url} are missing or differ: the report names each. "
            "Shard the dataset again under another name, or bring the objects back."
        )
    return found
