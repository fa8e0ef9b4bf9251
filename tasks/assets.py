"""Record datasets as assets of Prefect, with their sources upstream."""

from prefect import get_run_logger
from prefect.assets import Asset, AssetProperties, add_asset_metadata, materialize
from prefect.cache_policies import NO_CACHE
from pydantic import ValidationError

from millrace.datasets import ShardReport
from millrace.schemas.dataset import SourceRecord
from tasks.formatting import format_count, format_size

_LOCAL = ("file://", "memory://")  # another folder on each machine


def make_asset_key(url: str) -> str | None:
    """Return the key of the asset at a URL; None if the asset would have no key.

    The key is the URL, which has no credentials. A folder of one machine has no key, and neither
    has a URL with characters that Prefect refuses.
    """
    if url.startswith(_LOCAL):
        return None
    try:
        return Asset(key=url).key
    except ValidationError:
        return None


def record_dataset(report: ShardReport) -> None:
    """Materialise the asset of a complete dataset, with its source upstream.

    A dataset or a source without a key is left out, and the log says so.
    """
    key, source = make_asset_key(report.url), _make_source_asset(report.source)
    if key is None:
        log = get_run_logger()
        if report.url.startswith(_LOCAL):
            log.debug("%s is recorded as no asset: it is a folder of this machine.", report.url)
        else:
            log.info(
                "%s is recorded as no asset: Prefect takes no such characters in the key of an "
                "asset.",
                report.url,
            )
        return
    manifest = report.manifest
    asset = Asset(
        key=key,
        properties=AssetProperties(
            name=manifest.dataset,
            description=f"{format_count(report.samples, 'sample')} in "
            f"{format_count(len(manifest.shards), 'shard')}, {format_size(manifest.size)}.",
        ),
    )

    @materialize(
        asset,
        by="millrace",
        name="record-dataset",
        asset_deps=[source] if source else None,
        cache_policy=NO_CACHE,
    )
    def record() -> None:
        """Add the facts about the dataset to its asset."""
        add_asset_metadata(
            asset,
            {
                "manifest": report.manifest_url,
                "plan_digest": manifest.plan_digest,
                "formats": list(manifest.formats),
                "samples": manifest.samples,
                "shards": len(manifest.shards),
                "bytes": manifest.size,
                "new_shards": report.new_shards,
                "source": report.source.url,
                "source_revision": report.source.digest,
            },
        )

    record()


def _make_source_asset(source: SourceRecord) -> Asset | None:
    """Return the asset of a source at its revision; None if its URL is no key."""
    key = make_asset_key(source.url)
    if key is None:
        return None
    description = (
        f"{format_count(source.files, 'file')} of the kind {source.kind}, "
        f"{format_size(source.size)}, at the revision {source.digest}."
    )
    return Asset(key=key, properties=AssetProperties(description=description))
