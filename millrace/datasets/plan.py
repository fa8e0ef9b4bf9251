"""The plan: how a dataset is cut, pinned once for everybody who works on it."""

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import Any

from millrace import errors
from millrace.datasets.formats import webdataset
from millrace.datasets.settings import CutSettings
from millrace.datasets.sources import Cut, SourceSettings, cut
from millrace.datasets.sources.files import difference_of
from millrace.datasets.sources.folder import LISTING_BYTES, decode_listing
from millrace.keys import DatasetKeys, LeaseKeys
from millrace.lease import Census, Heartbeat, Holder, Lease, StoreClock, acquire
from millrace.progress import Event, Progress, silent
from millrace.records import commit_once, fetch, list_differences
from millrace.schemas.dataset import DatasetPlan, FileGroup, FileRef, ShardLayout
from millrace.storage import Store, create, delete, exists, list_objects, put, read
from millrace.words import format_count

_CLAIM = timedelta(seconds=30)
_LOOK = 1.0  # seconds between two looks at a removal that another run does
_NAMED = 3  # files in the error about a source that changed
_AT_ONCE = 16  # listings on their way to the store
# Versions of what turns a row into the bytes of a sample: a change of the bytes is a change here.
_ROWS = {"rows": "2", "json": "orjson-3"}


def make_plan(
    keys: DatasetKeys, source: SourceSettings, source_store: Store, settings: CutSettings
) -> tuple[DatasetPlan, Cut]:
    """Cut the source and describe the result. Reads the source's listing, writes nothing.

    Returns:
        The plan, and what it was made from, with the objects it refers to.
    """
    pieces = cut(
        source,
        source_store,
        keys,
        split_bytes=settings.split_bytes,
        split_files=settings.split_files,
        seed=settings.seed,
        holdout=settings.holdout,
    )
    plan = DatasetPlan(
        dataset=keys.dataset,
        source=pieces.record,
        layout=ShardLayout(
            format="webdataset",
            writer={**webdataset.WRITER, **_ROWS},
            shard_bytes=settings.shard_bytes,
            shard_samples=settings.shard_samples,
        ),
        seed=settings.seed,
        holdout=settings.holdout,
        split_bytes=settings.split_bytes,
        splits=pieces.splits,
        split_files=settings.split_files,
    )
    return plan, pieces


def check_pinned(
    store: Store, keys: DatasetKeys, plan: DatasetPlan, listings: Mapping[str, bytes]
) -> bool:
    """Check by reading that `pin_plan` would not refuse a plan. Writes nothing.

    Returns:
        Whether this plan was committed before.

    Raises:
        ConflictError, ChangedError: The dataset was planned otherwise, and has commits by that.
    """
    there = _committed_plan(store, keys)
    if there is None:
        return False
    try:
        _check_same(store, there, plan, listings)
    except (errors.ConflictError, errors.ChangedError):
        if _has_commits(store, keys):
            raise
        return False
    return True


def pin_plan(
    store: Store,
    keys: DatasetKeys,
    plan: DatasetPlan,
    listings: Mapping[str, bytes],
    progress: Progress = silent,
) -> DatasetPlan:
    """Commit the plan, or find that it is the one that was committed before.

    A plan that differs is replaced as long as nothing was committed by it and no run works by it.

    Returns:
        The plan that everybody works by.

    Raises:
        ConflictError: The dataset was planned otherwise: the fields that differ are named, or
            that the source has changed since.
    """
    while True:
        there = _committed_plan(store, keys)
        if there is None:
            if exists(store, keys.plan_removed) and not _cleared(store, keys, progress):
                time.sleep(_LOOK)
                continue
            _keep(store, listings)
            there = commit_once(store, keys.plan, plan).record
        try:
            _check_same(store, there, plan, listings)
        except (errors.ConflictError, errors.ChangedError) as difference:
            if not _removed(store, keys, there, progress, difference):
                raise
        else:
            return there


def _committed_plan(store: Store, keys: DatasetKeys) -> DatasetPlan | None:
    try:
        return fetch(store, keys.plan, DatasetPlan)
    except errors.NotFoundError:
        return None


def _keep(store: Store, listings: Mapping[str, bytes]) -> None:
    def keep(listing: tuple[str, bytes]) -> None:
        # Its name holds its digest, and whoever reads it checks.
        with contextlib.suppress(errors.ExistsError):
            create(store, *listing)

    bodies = iter(listings.items())
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="listings") as pool:
        while batch := list(islice(bodies, _AT_ONCE)):
            list(pool.map(keep, batch))


def _removed(
    store: Store,
    keys: DatasetKeys,
    there: DatasetPlan,
    progress: Progress,
    difference: errors.MillraceError,
) -> bool:
    """Remove a plan by which nothing was committed; return whether it is gone.

    A run by the old plan that was suspended may still commit afterwards. Commits bear the digest
    of their plan, so neither run takes those of the other; and a run completes its dataset only
    while its plan is pinned. So the plan is deleted first, and put back if there are commits then.

    Raises:
        ConflictError: Another run works on the dataset.
    """
    if _has_commits(store, keys):
        return False
    with _claimed(store, keys) as (holder, clock, _):
        held = Census(store, keys.dataset, "", clock).find_holders()
        others = [one.holder for one in held.values() if one.holder.id != holder.id]
        if others:
            raise errors.ConflictError(
                f"{difference} A run of {others[0].host} (process {others[0].pid}) works on it."
            )
        progress(Event("plan.replacing", keys.plan))
        put(store, keys.plan_removed, b"")
        if delete(store, [keys.plan]):
            return False
        progress(Event("plan.removed", keys.plan))
        if _has_commits(store, keys):
            commit_once(store, keys.plan, there)
            delete(store, [keys.plan_removed])
            return False
        _clear(store, keys, progress)
    return True


@contextlib.contextmanager
def _claimed(store: Store, keys: DatasetKeys) -> Generator[tuple[Holder, StoreClock, bool]]:
    """Claim the removal of a plan; the last value tells whether no other run has claimed it."""
    holder = Holder.this_process()
    clock = StoreClock.read(store, keys.dataset, holder)
    with Heartbeat(_CLAIM) as heartbeat:
        lease = acquire(store, LeaseKeys(keys.dataset, "plan"), holder, _CLAIM, clock)
        if isinstance(lease, Lease):
            heartbeat.keep(lease)
        yield holder, clock, isinstance(lease, Lease)


def _cleared(store: Store, keys: DatasetKeys, progress: Progress) -> bool:
    """Finish the removal of a plan; return False while another run does that.

    That run deletes shards without a commit: those of a plan committed meanwhile would be deleted.
    """
    with _claimed(store, keys) as (_, _, mine):
        if mine and exists(store, keys.plan_removed) and _committed_plan(store, keys) is None:
            _clear(store, keys, progress)
        return mine


def _clear(store: Store, keys: DatasetKeys, progress: Progress) -> None:
    """Delete the shards that a removed plan left without a commit: new ones have the same names.

    If this process is suspended for longer than its lease, another run may commit such a shard
    before it is deleted here. That run compares its shards with the ledger before it completes the
    dataset; for the case that it is complete by then, the commits are looked for again.

    Raises:
        ConflictError: Another run has committed shards meanwhile.
    """
    if not _has_commits(store, keys):
        progress(Event("plan.clearing", keys.shards))
        prefixes = (keys.shards, keys.quarantined)
        stats = (stat for prefix in prefixes for stat in list_objects(store, prefix))
        delete(store, [stat.key for stat in stats if keys.is_shard(stat.key)])
        if _has_commits(store, keys):
            raise errors.ConflictError(
                f"{store.url_of(keys.dataset)}: another run committed shards while this one "
                "deleted those of a plan that was replaced, and some of them may be gone. Run "
                "`millrace run FILE --repair` with the settings of that run: it makes them again."
            )
    delete(store, [keys.plan_removed])


def _has_commits(store: Store, keys: DatasetKeys) -> bool:
    return next(list_objects(store, keys.commits), None) is not None or exists(store, keys.manifest)


def _check_same(
    store: Store, there: DatasetPlan, ours: DatasetPlan, listings: Mapping[str, bytes]
) -> None:
    differing = [
        f"{name} ({_short(a)}, now {_short(b)})"
        for name, a, b in _fields(there, ours)
        if name not in {"source", "layout", "splits"}
    ]
    differing += [
        f"layout.{n} ({_short(a)}, now {_short(b)})"
        for n, a, b in _fields(there.layout, ours.layout)
    ]
    differing += [
        f"source.{n} ({_short(a)}, now {_short(b)})"
        for n, a, b in _fields(there.source, ours.source)
        if n in {"kind", "settings"}
    ]
    if differing:
        raise errors.ConflictError(
            f"The dataset {ours.dataset} was planned with other settings: {', '.join(differing)}. "
            "Run it with those, or give this one another name."
        )
    if there.source.sha256 != ours.source.sha256:
        then = {ref.path: ref for body in _listed(there, _Stored(store)) for ref in body}
        now = (ref for body in _listed(ours, listings) for ref in body)
        raise errors.ChangedError(
            f"The source {ours.source.url} has changed since {ours.dataset} was planned: "
            f"{_changes(then, now)} ({format_count(there.source.files, 'file')} of "
            f"{there.source.size} bytes then, {format_count(ours.source.files, 'file')} of "
            f"{ours.source.size} now). Put it back, or shard it under another dataset name."
        )
    if there.splits != ours.splits:
        raise errors.ConflictError(
            f"The dataset {ours.dataset} was cut by a Millrace that cuts otherwise: finish it with "
            "that version, or give this one another name."
        )


class _Stored:
    """The listings that a committed plan refers to, as far as they are there."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, key: str) -> bytes:
        return read(self._store, key, largest=LISTING_BYTES)


def _listed(plan: DatasetPlan, bodies: "Mapping[str, bytes] | _Stored") -> Iterator[list[FileRef]]:
    """Yield the files of each split of a plan."""
    for split in plan.splits:
        if isinstance(split.piece, FileGroup):
            with contextlib.suppress(errors.NotFoundError):
                groups = decode_listing(bodies[split.piece.listing])
                yield [file for group in groups for file in group.files]
        else:
            yield [split.piece.file]


def _changes(then: dict[str, FileRef], now: Iterable[FileRef]) -> str:
    """Name the first files that changed, each with what is different."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for file in now:
        seen.add(file.path)
        if file.path not in then:
            found[file.path] = "is new"
        elif file != then[file.path]:
            found[file.path] = difference_of(then[file.path], file.size)
    found |= {path: "is gone" for path in then if path not in seen}
    named = [f"{path} {what}" for path, what in sorted(found.items())[:_NAMED]]
    more = [f"{format_count(len(found) - _NAMED, 'more file')}"] if len(found) > _NAMED else []
    return ", ".join(named + more) or "empty files came or went"


def _fields(there: Any, ours: Any) -> list[tuple[str, Any, Any]]:
    return [(n, getattr(there, n), getattr(ours, n)) for n in list_differences(there, ours)]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
