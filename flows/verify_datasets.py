"""Verify complete datasets against their manifests, on demand or every night."""

from prefect import flow

from millrace.checkpoints import VerifyDepth
from millrace.datasets import Verification
from millrace.errors import CorruptError, NotFoundError, format_error
from millrace.storage import Right
from tasks.formatting import format_count
from tasks.forms import draw_form
from tasks.locations import (
    BucketLocation,
    check_right,
    find_location,
    make_mirror_specs,
    make_store_spec,
    skip_run,
)
from tasks.run_names import make_name
from tasks.verifying import (
    list_complete_datasets,
    make_failed_verification,
    report_verifications,
    verify_mirror,
    verify_shards,
)


@draw_form
@flow(name="verify-datasets", flow_run_name=make_name("verify-datasets"))
def verify_datasets(
    bucket: BucketLocation,
    datasets: list[str] | None = None,
    depth: VerifyDepth = VerifyDepth.SIZES,
) -> dict[str, Verification] | None:
    """Check that every shard of complete datasets exists, and has the bytes that were written.

    An object beside the shards that the manifest does not name fails the run, too.

    The mirrors of a block are verified too, against the manifests in the bucket.

    Args:
        bucket: A Millrace Bucket block with read credentials, its name, or a URL.
        datasets: Datasets to verify. By default all complete datasets below the bucket's URL.
        depth: `sizes` compares the size of each shard; `digests` reads all bytes.
    """
    found_bucket = find_location(bucket)
    if found_bucket is None:
        return skip_run([bucket], "nothing was verified")  # pyright: ignore[reportReturnType] - Prefect's way
    spec = make_store_spec(found_bucket, Right.READ)
    check_right(found_bucket, Right.READ)
    with_digests = depth is VerifyDepth.DIGESTS
    mirrors = make_mirror_specs(found_bucket)
    found: dict[str, Verification] = {}
    try:
        for dataset in datasets or list_complete_datasets(spec):
            try:
                found[dataset] = verify_shards(spec, dataset, with_digests=with_digests)
                for mirror in mirrors:
                    found[f"{dataset} in {mirror.url}"] = verify_mirror(
                        spec, mirror, dataset, with_digests=with_digests
                    )
            except (CorruptError, NotFoundError) as error:  # the others are verified
                if datasets:
                    raise
                found[dataset] = make_failed_verification(dataset, error, with_digests=with_digests)
    except BaseException as error:
        if found:
            report_verifications(spec.url, found, format_error(error))
        raise
    report_verifications(spec.url, found)
    faults = sum(len(seen.all_faults) for seen in found.values())
    if faults:
        raise CorruptError(
            f"Missing or different at {spec.url}: {format_count(faults, 'object')}. The report "
            "names each object. Run `shard-dataset` with `repair`, or restore the objects. Delete "
            "objects that are not in the manifest."
        )
    return found
