"""Listings of the workers' buckets, in which the gradients of a window are found.

A bucket is listed once for all of its workers. Each bucket has a thread, since some buckets may
stall. Of a worker with thousands of objects, only the gradient is looked for, so that the listing
ends. So it is of all workers, after the first listing of a window, if that had more pages than
there are workers: a long run has many gradients of earlier windows.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from millrace import errors
from millrace.gradients.codec.gradient_object import explain_failure, is_torch_file
from millrace.gradients.gather_window import GatherWindow, WaitLimit
from millrace.gradients.progress_events import QuotaExceeded
from millrace.progress import Progress
from millrace.schemas.chain import ExcludedWorker
from millrace.schemas.gradient import ExclusionReason
from millrace.schemas.window import GatherSettings
from millrace.storage import Stat, Store, list_fairly, list_objects
from millrace.threads import DaemonThreadPool

_MOST_LISTED = 10_000  # objects of one worker
_MOST_MEASURED = 100_000  # likewise, where the settings say how many bytes a worker should store
_MOST_NAMED = 1000  # objects of one worker whose names begin as its gradient's
_PAGE_SIZE = 1000  # objects that one request lists
_CONCURRENCY = 8  # workers of a bucket whose gradients are looked for at once


@dataclass(frozen=True, slots=True)
class BucketListing:
    """Objects of a bucket's workers.

    Attributes:
        asked: Names of the requested workers.
        found: Gradients of the window, by the workers' names.
        objects: Number of objects below each worker's prefix; empty if the listing failed, or was
            only of gradients.
        size: Bytes of these objects; likewise empty.
        failed: Reason for each requested worker, if the listing failed.
    """

    asked: frozenset[str] = frozenset()
    found: dict[str, Stat] = field(default_factory=dict[str, Stat])
    objects: Counter[str] = field(default_factory=Counter[str])
    size: Counter[str] = field(default_factory=Counter[str])
    failed: dict[str, ExcludedWorker] = field(default_factory=dict[str, ExcludedWorker])


class BucketLister:
    """Lister of the buckets of a window's workers.

    Args:
        gather_window: Window whose gradients are looked for.
        stores: Buckets of all workers and reserves by their names. A shared bucket is one object.
        settings: Settings of the gathering.
        limit: End of the retries.
    """

    def __init__(
        self,
        gather_window: GatherWindow,
        stores: Mapping[str, Store],
        settings: GatherSettings,
        limit: WaitLimit,
    ) -> None:
        self._gather_window, self._stores, self._limit = gather_window, stores, limit
        least = _MOST_LISTED if settings.max_stored is None else _MOST_MEASURED
        self._most_listed = max(least, (settings.max_objects or 0) + 1)  # the quota needs these
        self._pool = DaemonThreadPool(max(1, len(self._group_by_bucket(stores))), "listing")
        self._pending: dict[int, Future[BucketListing]] = {}
        self._pages: dict[int, int] = {}  # of the last listing of each whole bucket

    @property
    def pending(self) -> Collection[Future[Any]]:
        """Listings that were begun and not taken."""
        return self._pending.values()

    def is_listing(self, uid: str) -> bool:
        """Decide whether the listing of a worker's bucket was begun and not taken."""
        return id(self._stores[uid]) in self._pending

    def begin(self, uids: Sequence[str], exclude: Container[int] = frozenset()) -> set[int]:
        """Begin to list the buckets of workers, except for those that are being listed.

        Args:
            uids: Names of the workers whose gradients are looked for.
            exclude: Buckets to leave out, as this method returned them.

        Returns:
            Identities of the buckets whose listing was begun.
        """
        begun = set[int]()
        for group in self._group_by_bucket(uids):
            bucket = id(self._stores[group[0]])
            if bucket not in self._pending and bucket not in exclude:
                self._pending[bucket] = self._pool.submit(self.list_bucket, group)
                begun.add(bucket)
        return begun

    def take_finished(self) -> list[BucketListing]:
        """Return the listings that have ended since the last call."""
        finished = [bucket for bucket, listing in self._pending.items() if listing.done()]
        return [self._pending.pop(bucket).result() for bucket in finished]

    def shutdown(self) -> None:
        """Cancel the listings that have not begun, without waiting for the others."""
        self._pool.shutdown()

    def list_bucket(self, uids: Sequence[str]) -> BucketListing:
        """List one bucket for workers that share it, in the calling thread.

        A listing that fails has a reason for each worker, as the next listing may succeed.
        """
        bucket = self._stores[uids[0]]
        listing = BucketListing(frozenset(uids))
        store = self._limit.limit_retries(bucket)
        try:
            if self._pages.get(id(bucket), 0) <= len(uids):
                self._list_whole(bucket, store, uids, listing)
            else:
                self._list_gradients(store, uids, listing)
        except Exception as error:  # noqa: BLE001 - a listing that causes an error harms only its workers
            sentence = (
                explain_failure(error)
                if isinstance(error, errors.MillraceError)
                else f"Its objects cannot be listed ({type(error).__name__})."
            )
            excluded = ExcludedWorker(reason=ExclusionReason.UNAVAILABLE, sentence=sentence)
            listing.failed.update(dict.fromkeys(uids, excluded))
            listing.objects.clear()
            listing.size.clear()
        return listing

    def _list_whole(
        self, bucket: Store, store: Store, uids: Sequence[str], listing: BucketListing
    ) -> None:
        """List all objects of workers, and measure how much these and others of the bucket store.

        Args:
            bucket: Bucket of the workers.
            store: Bucket with the limit of its retries.
            uids: Names of the workers.
            listing: Receives what is found.
        """
        keys, is_shared = self._gather_window.keys, len(uids) > 1
        prefix = f"{keys.run}/" if is_shared else keys.make_worker_prefix(uids[0])
        counted = {uid for uid, store in self._stores.items() if store is bucket}
        most, number = self._most_listed, 0
        for stat in (
            list_fairly(store, prefix, depth=1, limit=most)
            if is_shared
            else islice(list_objects(store, prefix), most)
        ):
            number += 1
            owner = stat.key.removeprefix(f"{keys.run}/").partition("/")[0]
            if owner in counted:
                listing.objects[owner] += 1
                listing.size[owner] += stat.size
            self._note_gradient(listing, stat)
        self._pages[id(bucket)] = number // _PAGE_SIZE + 1
        unknown = [uid for uid in uids if listing.objects[uid] >= most]
        self._list_gradients(store, unknown, listing)

    def _list_gradients(self, store: Store, uids: Sequence[str], listing: BucketListing) -> None:
        """List the gradients of workers in the window, each with a request of its own."""
        keys, window = self._gather_window.keys, self._gather_window.number

        def find(uid: str) -> list[Stat]:
            name = f"{keys.make_worker_prefix(uid)}gradient-{window:09d}-"
            return list(islice(list_objects(store, name), _MOST_NAMED))

        pool = DaemonThreadPool(_CONCURRENCY, "listing of gradients")
        try:
            for found in [pool.submit(find, uid) for uid in uids]:
                for stat in found.result():
                    self._note_gradient(listing, stat)
        finally:
            pool.shutdown()

    def _group_by_bucket(self, uids: Iterable[str]) -> list[list[str]]:
        """Group workers by bucket, so that a shared bucket is listed once."""
        groups: dict[int, list[str]] = {}
        for uid in uids:
            groups.setdefault(id(self._stores[uid]), []).append(uid)
        return list(groups.values())

    def _note_gradient(self, listing: BucketListing, stat: Stat) -> None:
        """Note an object if it is the gradient of this window of a worker that is asked."""
        found = listing.found
        uid, window = self._gather_window.keys.parse(stat.key) or ("", -1)
        if (
            window == self._gather_window.number
            and uid in listing.asked
            and (uid not in found or is_torch_file(found[uid].key))  # of two, the other counts
        ):
            found[uid] = stat


class QuotaMonitor:
    """Monitor of the workers' storage, which reports a worker once.

    Args:
        settings: Settings of the gathering, with the quotas.
        progress: Receives `QuotaExceeded`.
    """

    def __init__(self, settings: GatherSettings, progress: Progress) -> None:
        self._most, self._most_objects = settings.max_stored, settings.max_objects
        self._progress = progress
        self._reported = set[str]()

    def check(self, listing: BucketListing, uids: Iterable[str]) -> None:
        """Report each worker of a listing that exceeds a quota.

        Args:
            listing: Listing of a bucket.
            uids: Names of the workers, in the order of the reports.
        """
        for uid in uids:
            objects, size = listing.objects[uid], listing.size[uid]
            over = (self._most is not None and size > self._most) or (
                self._most_objects is not None and objects > self._most_objects
            )
            if over and uid not in self._reported:
                self._reported.add(uid)
                self._progress(QuotaExceeded(uid=uid, objects=objects, size=size))
