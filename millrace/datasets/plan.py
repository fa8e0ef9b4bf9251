"""Make the plan of a dataset, its partitions and layout, and commit the plan once for all runs."""

import contextlib
import logging
import time
from collections import ChainMap
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Any, cast

from millrace import errors
from millrace.dataset_ledger import fetch_plan
from millrace.datasets.formats import open_format
from millrace.datasets.formats.fields import decide_fields
from millrace.datasets.manifest_size import check_manifest_size
from millrace.datasets.plan_digest import compute_plan_digest
from millrace.datasets.progress_events import (
    PlanRemoved,
    PlanReplacementStarted,
    ShardDeletionStarted,
)
from millrace.datasets.settings import ShardingSettings
from millrace.datasets.sources import (
    Division,
    PartitionedSource,
    SourceFiles,
    SourceKind,
    SourceSettings,
    describe_again,
    is_web_url,
    partition_source,
)
from millrace.datasets.sources.files import Patterns, describe_difference, list_files
from millrace.datasets.sources.folder import MAX_SAMPLE_LIST_BYTES
from millrace.datasets.sources.sample_table import decode_sample_list
from millrace.datasets.sources.table import unpack_row
from millrace.datasets.transforms import list_transform_changes, record_transforms
from millrace.datasets.writers import describe_writers, list_writers
from millrace.deletion import PlannedObject, delete_planned
from millrace.formatting import format_count
from millrace.keys.datasets import DatasetKeys
from millrace.keys.leases import PLAN_REMOVAL, LeaseKeys
from millrace.lease import Census, Heartbeat, Holder, Lease, StoreClock, acquire
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once, fetch, is_stored, list_differences
from millrace.schemas.dataset import (
    DatasetPlan,
    FileRef,
    HubShardRange,
    Manifest,
    PartitionEnd,
    SampleList,
    ShardCommit,
    ShardLayout,
    SourceRecord,
)
from millrace.storage import Store, create, delete, exists, list_objects, put, read

logger = logging.getLogger(__name__)

_LEASE_TIMEOUT = timedelta(seconds=30)
_POLL_INTERVAL = 1.0  # seconds between two checks of a removal by another run
_MAX_NAMED = 3  # files named in the error about a changed source
_CONCURRENCY = 16  # concurrent uploads of the objects of a plan


def make_plan(
    keys: DatasetKeys,
    source: SourceSettings,
    files: SourceFiles,
    settings: ShardingSettings,
    store: Store | None = None,
    committed: DatasetPlan | None = None,
) -> tuple[DatasetPlan, PartitionedSource]:
    """Divide the source into partitions, and describe them. Lists the source, writes nothing.

    Args:
        keys: Names of the dataset.
        source: Settings of the source.
        files: Files of the source.
        settings: Settings of the shards.
        store: Store of the dataset, where the files of transforms are found by their digests.
        committed: Committed plan whose files and partitions are taken, instead of a listing.

    Returns:
        The plan, and the partitioned source with the sample lists that the plan names, and with
        the objects of its transforms.
    """
    division = Division(
        partition_bytes=settings.partition_bytes,
        partition_files=settings.partition_files,
        seed=settings.seed,
        holdout=settings.holdout,
    )
    formats = [open_format(name) for name in settings.formats]
    transforms = record_transforms(
        settings.transforms,
        keys,
        seed=settings.seed,
        dataset_store=store,
        allow_private=source.allow_private,
    )
    steps = transforms.record.get("steps", [])
    if source.kind is SourceKind.URLS and any("pack" in step for step in steps):
        raise errors.ConfigurationError(
            "`pack` is not for a list of URLs: a packed sample has parts of several bodies, and "
            "another download may give other bytes. Shard the URLs first, and then the shards with "
            "`pack` (`kind: webdataset`), under another dataset name."
        )
    fields: dict[str, str] = {}
    if source.kind is not SourceKind.HUGGINGFACE:  # refused before a long listing
        fields = decide_fields(formats, source, steps, settings.types)
    if committed is None:
        partitioned = partition_source(source, files, keys, division)
    else:
        partitioned = PartitionedSource(
            describe_again(source, committed.source), committed.partitions, {}
        )
    if partitioned.field_types is not None:
        fields = decide_fields(
            formats, source, steps, settings.types, schema_types=partitioned.field_types
        )
    if transforms.record:
        described = {**partitioned.record.settings, "transforms": transforms.record}
        partitioned = replace(
            partitioned,
            record=partitioned.record.model_copy(update={"settings": described}),
            objects=ChainMap(
                dict(transforms.objects), cast("dict[str, bytes]", partitioned.objects)
            ),
        )
    # The stored plan has sorted keys. Runs that read it must make the same of a sample as this one:
    # functions get the fields, and reasons name the first fault, in the order of the columns.
    sorted_settings = _sort_keys(partitioned.record.settings)
    record = partitioned.record.model_copy(update={"settings": sorted_settings})
    partitioned = replace(partitioned, record=record)
    plan = DatasetPlan(
        dataset=keys.dataset,
        source=partitioned.record,
        layout=ShardLayout(
            formats=tuple(one.name for one in formats),
            fields=fields,
            writer=list_writers(
                formats, partitioned.record.kind, next(iter(partitioned.partitions), None)
            ),
            shard_bytes=settings.shard_bytes,
            shard_samples=settings.shard_samples,
        ),
        seed=settings.seed,
        holdout=settings.holdout,
        partition_bytes=settings.partition_bytes,
        partitions=partitioned.partitions,
        partition_files=settings.partition_files,
    )
    return plan, partitioned


def check_committed(
    store: Store, keys: DatasetKeys, plan: DatasetPlan, objects: Mapping[str, bytes]
) -> DatasetPlan | None:
    """Check by read requests that `commit_plan` would not refuse a plan. Writes nothing.

    Returns:
        The committed plan; None if this plan was not committed before.

    Raises:
        ConflictError, ChangedError: The dataset has commits by another plan.
    """
    committed = find_committed_plan(store, keys)
    if committed is None:
        _check_commits(store, keys, plan)
        return None
    try:
        return _adopt_plan(store, keys, committed, plan, objects)
    except (errors.ConflictError, errors.ChangedError):
        if _has_commits(store, keys):
            raise
        return None


def check_manifest(store: Store, keys: DatasetKeys, plan: DatasetPlan, manifest: Manifest) -> None:
    """Check that a complete dataset was made by its committed plan.

    Raises:
        ConflictError: The manifest was made by another plan.
    """
    if manifest.plan_digest != compute_plan_digest(plan):
        raise errors.ConflictError(
            f"{store.make_url(keys.manifest)} was made by another plan than {keys.plan}. Delete "
            f"{keys.plan}, and run the dataset with the settings and the source that it was made "
            "with, or give this one another name."
        )


def check_still_committed(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> None:
    """Refuse to go on with a plan that was replaced after this run had read it.

    A run that replaces a plan deletes the plan first, and then looks for commits. Before a dataset
    is completed, all commits of its plan are made. So either this function finds that the plan is
    deleted, or the other run finds the commits.

    Raises:
        ConflictError: Another run has replaced the plan.
    """
    try:
        is_committed = is_stored(store, keys.plan, plan)
    except errors.NotFoundError:
        is_committed = False
    if not is_committed:
        raise errors.ConflictError(
            f"{keys.dataset}: another run has replaced the plan meanwhile. Run it again."
        )


def commit_plan(
    store: Store,
    keys: DatasetKeys,
    plan: DatasetPlan,
    objects: Mapping[str, bytes],
    progress: Progress = ignore_event,
) -> DatasetPlan:
    """Commit the plan, unless the same plan was committed before.

    A different plan is replaced if there are no commits by that plan and no run uses it.

    Returns:
        The committed plan, which all runs use. If its partitions equal those of the given plan, it
        has the latter, so that only one copy of them stays in memory.

    Raises:
        ConfigurationError: A new dataset would have more shards than its manifest can name.
        ConflictError: The dataset was planned with other settings, and the message names the
            fields. Or the plan is lost, and the dataset has commits by another plan than this one.
        ChangedError: The source has changed since the plan was committed. The message names the
            first files.
    """
    while True:
        committed = find_committed_plan(store, keys)
        if committed is None:
            if exists(store, keys.plan_removed) and not _try_finish_removal(store, keys, progress):
                time.sleep(_POLL_INTERVAL)
                continue
            if not _check_commits(store, keys, plan) and (warning := check_manifest_size(plan)):
                logger.warning("%s", warning)
            _store_objects(store, objects)
            committed = commit_once(store, keys.plan, plan).record
        try:
            return _adopt_plan(store, keys, committed, plan, objects)
        except (errors.ConflictError, errors.ChangedError) as difference:
            if not _try_remove_plan(store, keys, committed, progress, difference):
                raise


def list_planned_files(store: Store, plan: DatasetPlan) -> list[FileRef]:
    """Return the files of a plan. Reads the sample lists."""
    groups = _iterate_files(plan, _StoredSampleLists(store))
    return list({file.path: file for files in groups for file in files}.values())


def find_committed_plan(store: Store, keys: DatasetKeys) -> DatasetPlan | None:
    """Return the committed plan; None if there is none.

    Raises:
        ConfigurationError: The plan is that of a dataset with another name.
    """
    try:
        return fetch_plan(store, keys)
    except errors.NotFoundError:
        return None


def _check_commits(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> bool:
    """Check that a dataset without a plan has no commits, or commits by this plan.

    Returns:
        Whether there are commits.

    Raises:
        ConflictError: The dataset was made by another plan.
    """
    digest = _find_plan_digest(store, keys)
    if digest not in {None, compute_plan_digest(plan)}:
        raise errors.ConflictError(
            f"{store.make_url(keys.dataset)} has no plan.json, and its shards were made by another "
            "plan than this one. Run it with the settings and the source that it was made with, "
            "or give this one another name."
        )
    return digest is not None


def _find_plan_digest(store: Store, keys: DatasetKeys) -> str | None:
    """Return the digest of the plan in the manifest, or else in a commit; None without commits."""
    with contextlib.suppress(errors.NotFoundError):
        return fetch(store, keys.manifest, Manifest).plan_digest
    for stat in list_objects(store, keys.commits):
        if keys.parse_commit(stat.key):
            return fetch(store, stat.key, ShardCommit).plan_digest
        if keys.parse_end(stat.key):
            return fetch(store, stat.key, PartitionEnd).plan_digest
    return None


def _store_objects(store: Store, objects: Mapping[str, bytes]) -> None:
    def store_object(item: tuple[str, bytes]) -> None:
        # The key contains the digest of the object, and every reader checks the digest.
        with contextlib.suppress(errors.ExistsError):
            create(store, *item)

    bodies = iter(objects.items())
    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="plan-objects") as pool:
        while batch := list(islice(bodies, _CONCURRENCY)):
            list(pool.map(store_object, batch))


def _try_remove_plan(
    store: Store,
    keys: DatasetKeys,
    committed: DatasetPlan,
    progress: Progress,
    difference: errors.MillraceError,
) -> bool:
    """Remove a plan without commits; return whether the caller has to look for the plan again.

    A suspended run of the old plan may still commit afterwards. Commits contain the digest of
    their plan, so no run uses the commits of another plan. A run completes its dataset only while
    its plan is stored. Therefore this function deletes the plan first, and then looks for commits.
    If there are commits by the plan, the plan is restored.

    If this process is suspended for longer than its lease, another run may replace the plan. So
    the plan is read again just before its removal. Commits by a plan that was committed even after
    that are left without a plan. Then `commit_plan` commits only that plan again.

    Raises:
        ConflictError: Another run works on the dataset.
    """
    if _has_commits(store, keys):
        return False
    with _claim_removal(store, keys) as (holder, clock, _):
        held = Census(store, keys.dataset, "", clock).find_holders()
        others = [one.holder for one in held.values() if one.holder.id != holder.id]
        if others:
            raise errors.ConflictError(
                f"{difference} A run of {others[0].host} (process {others[0].pid}) works on it."
            )
        progress(PlanReplacementStarted(key=keys.plan))
        put(store, keys.plan_removed, b"")
        if find_committed_plan(store, keys) != committed:
            return True  # the marker stays, since another run may need it
        if delete(store, [keys.plan]):
            return False
        progress(PlanRemoved(key=keys.plan))
        if _has_commits(store, keys):
            is_own = _find_plan_digest(store, keys) == compute_plan_digest(committed)
            if is_own:
                commit_once(store, keys.plan, committed)
            delete(store, [keys.plan_removed])
            return not is_own
        _delete_uncommitted_shards(store, keys, progress)
    return True


@contextlib.contextmanager
def _claim_removal(store: Store, keys: DatasetKeys) -> Generator[tuple[Holder, StoreClock, bool]]:
    """Claim the removal of a plan.

    Yields:
        This process, the store's clock, and whether the claim succeeded. The claim fails while
        another run removes the plan.
    """
    holder = Holder.describe_this_process()
    clock = StoreClock.read(store, keys.dataset, holder)
    with Heartbeat(_LEASE_TIMEOUT) as heartbeat:
        lease = acquire(store, LeaseKeys(keys.dataset, PLAN_REMOVAL), holder, _LEASE_TIMEOUT, clock)
        if isinstance(lease, Lease):
            heartbeat.keep(lease)
        yield holder, clock, isinstance(lease, Lease)


def _try_finish_removal(store: Store, keys: DatasetKeys, progress: Progress) -> bool:
    """Finish the removal of a plan; return False while another run finishes the removal.

    The other run deletes shards without a commit. If this run committed a plan meanwhile, the other
    run would delete the first shards of that plan.
    """
    with _claim_removal(store, keys) as (_, _, is_claimed):
        if (
            is_claimed
            and exists(store, keys.plan_removed)
            and find_committed_plan(store, keys) is None
        ):
            _delete_uncommitted_shards(store, keys, progress)
        return is_claimed


def _delete_uncommitted_shards(store: Store, keys: DatasetKeys, progress: Progress) -> None:
    """Delete the uncommitted shards of a removed plan, since new shards have the same names.

    If this process is suspended for longer than its lease, another run may commit such a shard
    before this process deletes the shard. The other run compares its shards with the ledger before
    it completes the dataset. The dataset may be complete already, so this run looks for commits
    again.

    Raises:
        ConflictError: Another run has committed or written shards meanwhile.
        DeniedError: Shards could not be deleted. The next run tries again.
    """
    if not _has_commits(store, keys):
        progress(ShardDeletionStarted(prefix=keys.shards))
        prefixes = (keys.shards, keys.quarantined)
        stats = (stat for prefix in prefixes for stat in list_objects(store, prefix))
        planned = [PlannedObject(stat) for stat in stats if keys.is_shard_or_quarantine(stat.key)]
        result = delete_planned(store, planned)
        if _has_commits(store, keys):
            raise errors.ConflictError(
                f"{store.make_url(keys.dataset)}: another run committed shards while this run "
                "deleted the shards of a replaced plan. Some of them may be missing. Run `millrace "
                "run FILE --repair` with the settings of that run to make them again."
            )
        for failure in result.failures:
            raise errors.DeniedError(
                f"{store.make_url(failure.key)} is of a replaced plan and could not be deleted "
                f"({failure.reason}): allow deletion, and start the run again."
            )
        if result.skipped:
            raise errors.ConflictError(
                f"{store.make_url(keys.dataset)}: another run wrote shards while this run deleted "
                "the shards of a replaced plan. End that run, and start this one again."
            )
    delete(store, [keys.plan_removed])


def _has_commits(store: Store, keys: DatasetKeys) -> bool:
    return next(list_objects(store, keys.commits), None) is not None or exists(store, keys.manifest)


def _adopt_plan(
    store: Store,
    keys: DatasetKeys,
    committed: DatasetPlan,
    proposed: DatasetPlan,
    objects: Mapping[str, bytes],
) -> DatasetPlan:
    """Return the committed plan for a run that proposes the same plan.

    A file of a web server that sends no parts becomes one partition. If this has changed since the
    dataset was begun, the run uses the committed partitions, since any part can be read.

    Raises:
        ConflictError, ChangedError: The plans differ.
    """
    _check_same_plan(store, committed, proposed, objects)
    if committed.partitions == proposed.partitions:
        return committed.model_copy(update={"partitions": proposed.partitions})
    url = proposed.source.url
    if not is_web_url(url):
        raise errors.ConflictError(
            f"The dataset {proposed.dataset} was planned by a version of Millrace that divides "
            "sources in another way. Finish it with that version, or give this one another name."
        )
    if not _has_commits(store, keys):
        raise errors.ConflictError(
            f"The dataset {proposed.dataset} was planned while the server of {url} sent parts of "
            "other files than now. Run it again later, or give this one another name."
        )
    logger.warning(
        "the server of %s sends parts of other files than when %s was planned; the run keeps the "
        "planned partitions, and may read the bytes before a partition again",
        url,
        proposed.dataset,
    )
    return committed


def _check_same_plan(
    store: Store, committed: DatasetPlan, proposed: DatasetPlan, objects: Mapping[str, bytes]
) -> None:
    """Check that two plans are equal, except for their partitions.

    A complete dataset may have been planned with other versions of its writers, since no shard is
    written.

    Raises:
        ConflictError, ChangedError: The plans differ.
    """
    differing = [
        f"{name} ({_shorten(a)}, now {_shorten(b)})"
        for name, a, b in _find_field_changes(committed, proposed)
        if name not in {"source", "layout", "partitions"}
    ]
    differing += [
        f"layout.{n} ({_shorten(a)}, now {_shorten(b)})"
        for n, a, b in _find_field_changes(committed.layout, proposed.layout)
        if n != "writer"
    ]
    differing += [
        f"source.{n} ({_shorten(a)}, now {_shorten(b)})"
        for n, a, b in _find_field_changes(committed.source, proposed.source)
        if n == "kind" or (n == "settings" and _drop_transforms(a) != _drop_transforms(b))
    ]
    differing += list_transform_changes(
        *(plan.source.settings.get("transforms", {}) for plan in (committed, proposed))
    )
    if differing:
        raise errors.ConflictError(
            f"The dataset {proposed.dataset} was planned with other settings: "
            f"{', '.join(differing)}. Run it with those, or give this one another name."
        )
    first = next(iter(committed.partitions), None)
    writers = describe_writers(committed.dataset, committed.layout, committed.source.kind, first)
    if writers and not exists(store, DatasetKeys(proposed.dataset).manifest):
        raise errors.ConflictError(f"{writers} to finish it, or give this one another name.")
    if committed.source.digest != proposed.source.digest:
        new_files = (ref for files in _iterate_files(proposed, objects) for ref in files)
        raise _make_changed_error(store, committed, proposed.source, new_files)


def check_source(
    store: Store, keys: DatasetKeys, settings: SourceSettings, files: SourceFiles
) -> None:
    """Check that the files of a source are those of the committed plan, without reading them.

    A file that was replaced often cannot be divided into partitions. Then this check tells why.

    Raises:
        ChangedError: The dataset has commits, and the source has other files now.
    """
    committed = find_committed_plan(store, keys)
    if committed is None or committed.source.kind != settings.kind or not _has_commits(store, keys):
        return
    try:
        table = list_files(files, Patterns(settings.get_include(), settings.exclude))
    except errors.NotFoundError as error:
        raise errors.ChangedError(
            f"The source {files.url} has changed since {committed.dataset} was planned. {error} "
            "Restore the source, or shard it under another dataset name."
        ) from error
    if table.compute_digest() != committed.source.digest:
        present = committed.source.model_copy(
            update={"url": files.url, "files": len(table), "size": table.size}
        )
        raise _make_changed_error(store, committed, present, map(unpack_row, table.rows))


def _make_changed_error(
    store: Store, committed: DatasetPlan, present: SourceRecord, new_files: Iterable[FileRef]
) -> errors.ChangedError:
    """Return the error for a source that has other files than the plan.

    Args:
        store: Store of the dataset.
        committed: The committed plan.
        present: The source as it is now.
        new_files: Files of the source as it is now.
    """
    old_files = {
        ref.path: ref
        for files in _iterate_files(committed, _StoredSampleLists(store))
        for ref in files
    }
    return errors.ChangedError(
        f"The source {present.url} has changed since {committed.dataset} was planned: "
        f"{_describe_changes(old_files, new_files)} "
        f"({format_count(committed.source.files, 'file')} of {committed.source.size} bytes then, "
        f"{format_count(present.files, 'file')} of {present.size} now). "
        "Restore the source, or shard it under another dataset name."
    )


def _sort_keys(value: Any) -> Any:
    """Return a value of JSON whose objects have sorted keys."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {name: _sort_keys(members[name]) for name in sorted(members)}
    return [*map(_sort_keys, cast("list[Any]", value))] if isinstance(value, list) else value


def _drop_transforms(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "transforms"}


class _StoredSampleLists:
    """Sample lists of a committed plan, read from its store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, key: str) -> bytes:
        return read(self._store, key, max_size=MAX_SAMPLE_LIST_BYTES)


def _iterate_files(
    plan: DatasetPlan, objects: "Mapping[str, bytes] | _StoredSampleLists"
) -> Iterator[list[FileRef]]:
    """Yield the files of each partition of a plan."""
    for partition in plan.partitions:
        if isinstance(partition.source_range, SampleList):
            with contextlib.suppress(errors.NotFoundError):
                samples = decode_sample_list(objects[partition.source_range.listing])
                yield [file for sample in samples for file in sample.files]
        elif not isinstance(partition.source_range, HubShardRange):
            yield [partition.source_range.file]


def _describe_changes(old_files: dict[str, FileRef], new_files: Iterable[FileRef]) -> str:
    """Describe the first files that changed."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for file in new_files:
        seen.add(file.path)
        if file.path not in old_files:
            found[file.path] = "is new"
        elif file != old_files[file.path]:
            found[file.path] = describe_difference(old_files[file.path], file.size)
    found |= {path: "is gone" for path in old_files if path not in seen}
    shown = [f"{path} {change}" for path, change in sorted(found.items())[:_MAX_NAMED]]
    more = (
        [f"{format_count(len(found) - _MAX_NAMED, 'more file')}"] if len(found) > _MAX_NAMED else []
    )
    return ", ".join(shown + more) or "empty files were added or removed"


def _find_field_changes(committed: Any, proposed: Any) -> list[tuple[str, Any, Any]]:
    return [
        (n, getattr(committed, n), getattr(proposed, n))
        for n in list_differences(committed, proposed)
    ]


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
