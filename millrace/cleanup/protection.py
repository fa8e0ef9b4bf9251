"""Protection from deletion: objects in use by a run, and objects that the newest weights need."""

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from millrace import errors
from millrace.checkpoints.find import VerifyDepth, survey, verify
from millrace.keys.campaigns import CampaignKeys, parse_campaign
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cleanup import CLEANING
from millrace.keys.gradients import ChainKeys
from millrace.keys.kinds import ClassifiedKey, ObjectKind, WorkerPrefixes, classify_key
from millrace.keys.names import MAX_DEPTH
from millrace.keys.rentals import MACHINES, RENTALS, AttemptSurvey
from millrace.lease import Census, Holder, StoreClock
from millrace.records import fetch, list_numbers
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Backend, Stat, Store, list_objects, read
from millrace.storage.overlap import locate_prefix

_LEASE_CACHE_SECONDS = 5.0  # seconds for which leases are cached while a plan is made
_MAX_SCOPES = 10_000  # scopes whose leases are cached; each folder of other objects is one
_MAX_LEASE_DEPTH = MAX_DEPTH + 4  # folders of a scope, with those of an aggregator's job
_SEARCH_PAUSE_FACTOR = 4  # pause after a search for campaigns, in durations of the search
_MAX_TRAINING_SIZE = 1 << 20  # bytes of a campaign's committed training
_CHAIN_KINDS = {ObjectKind.UPDATE, ObjectKind.LINK, ObjectKind.OPENING, ObjectKind.SCORES}
_WINDOW_KINDS = {ObjectKind.GRADIENT, ObjectKind.START_WINDOW}
_POSITION = "window"  # position in an aggregator's checkpoint: the window after which it was saved


def read_store_clock(store: Store, fallback: StoreClock | None = None) -> StoreClock:
    """Return the store's clock.

    Args:
        store: Store whose clock is read.
        fallback: Clock for a store without write access. The earlier of this one and this machine's
            is taken, as a fast clock would end leases that are held.
    """
    try:
        return StoreClock.read(store, CLEANING, Holder.describe_this_process())
    except errors.DeniedError:
        own = StoreClock.read_machine_clock()
        return min(own, fallback or own, key=StoreClock.now)


def find_path(store: Store) -> str:
    """Return the last folders of the path of a store's URL, each with a slash at its end.

    In front of a key, they show whether the URL is a folder of another store. The path is empty for
    a whole bucket. Links of a folder are resolved.
    """
    path = locate_prefix(store)[1]
    return "/".join(path.split("/")[-MAX_DEPTH - 1 :]).lstrip("/")


@dataclass(frozen=True, slots=True)
class ChainHead:
    """Newest verified checkpoint of a chain. Later objects of the chain are needed.

    Attributes:
        step: Step of the weights.
        window: Window after which they were saved.
    """

    step: int
    window: int


class _ChainStartPart(BaseModel):
    """Part of a chain's start that all versions of the record have."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    job: str
    step: int


class _TrainingPart(BaseModel):
    """Part of a campaign's committed training that names its dataset."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    dataset: str | None = None


class ProtectionPolicy:
    """Explains why an object must stay although a rule takes it.

    Args:
        stores: Store of the objects, then its related stores.
        pins: Keys and folders that stay, with all that is below them.
        check: Check of checkpoints.
        clock: Clock of the first store.
    """

    def __init__(
        self, stores: Sequence[Store], pins: Sequence[str], check: VerifyDepth, clock: StoreClock
    ) -> None:
        self._store = stores[0]
        related_stores = ((store, read_store_clock(store, clock)) for store in stores[1:])
        self._stores = [(stores[0], clock), *related_stores]
        self._pinned_keys = frozenset(pins)
        self._pinned_folders = tuple(key.rstrip("/") + "/" for key in pins)
        self._check = check
        self._open_census = lru_cache(maxsize=_MAX_SCOPES)(self._make_census)
        self._lease_cache: dict[str, tuple[float, str]] = {}
        self._machine_cache: tuple[float, dict[str, str]] = 0.0, {}
        self._heads: dict[tuple[str, str], ChainHead | str] = {}
        self._newest_scores: dict[tuple[str, str], int] = {}
        self._newest_links: dict[tuple[str, str], int] = {}
        self._campaigns: dict[str, set[str]] = {}
        self._next_search_at = 0.0

    def refresh_leases(self) -> None:
        """Forget cached leases and ledgers: they are read again before each batch is deleted."""
        self._lease_cache.clear()
        self._machine_cache = 0.0, {}

    def explain_protection(self, key: str, classified: ClassifiedKey | None) -> str:
        """Return the reason why an object stays; empty if nothing protects it.

        Raises:
            UnavailableError, DeniedError: A lease or a ledger cannot be read, so it may be held.
        """
        if self.is_pinned(key):
            return "it is pinned"
        if key.startswith(f"{MACHINES}/") and (reason := self._describe_open_machine(key)):
            return reason
        if classified is None:
            return self.describe_holder(key.rpartition("/")[0])
        holder = self.describe_holder(classified.lease_scope)
        if holder and classified.kind in _WINDOW_KINDS and self._is_merged(classified):
            holder = self.describe_holder(classified.scope)  # not that of the aggregator
        if holder or classified.kind not in _CHAIN_KINDS:
            return holder
        return self._explain_chain_protection(classified)

    def _describe_open_machine(self, key: str) -> str:
        """Return which machine of the ledger still uses its folder; empty if none does.

        A detached machine has no owner, and reads its files again after a restart.
        """
        now = time.monotonic()
        expires_at, rentals = self._machine_cache
        if expires_at <= now:
            rentals = _find_open_machines(self._store)
            self._machine_cache = now + _LEASE_CACHE_SECONDS, rentals
        folder = next((one for one in _iterate_ancestors(key) if one in rentals), "")
        return f"a machine of {rentals[folder]} that is not released uses it" if folder else ""

    def is_pinned(self, key: str) -> bool:
        """Tell whether a key is pinned."""
        return key in self._pinned_keys or key.startswith(self._pinned_folders)

    def has_pins_below(self, folder: str) -> bool:
        """Tell whether anything in a folder (which ends in ``/``) is pinned, or all of it is."""
        return self.is_pinned(folder) or any(
            key.startswith(folder) for key in (*self._pinned_keys, *self._pinned_folders)
        )

    def describe_holder(self, scope: str) -> str:
        """Return which process holds a lease of a run, job or dataset; empty if none does.

        The leases of each folder above it count too, but none deeper than a name of ours can be.
        The first folder is that of the store's URL, which may be a job's, and has the empty scope.
        """
        parts = scope.split("/")[:_MAX_LEASE_DEPTH]
        ancestors = ("/".join(parts[: depth + 1]) for depth in range(len(parts)) if parts[depth])
        return next(
            (text for one in ("", *ancestors) if (text := self._describe_own_holder(one))), ""
        )

    def _describe_own_holder(self, scope: str) -> str:
        """Return which process holds a lease of a scope itself; empty if none does."""
        now = time.monotonic()
        expires_at, holder = self._lease_cache.pop(scope, (now, ""))
        if expires_at <= now:
            holder = next(self._iterate_holders(scope), "")
            expires_at = now + _LEASE_CACHE_SECONDS
        self._lease_cache[scope] = expires_at, holder  # the last one, as it was used last
        if len(self._lease_cache) > _MAX_SCOPES:
            del self._lease_cache[next(iter(self._lease_cache))]
        return holder

    def describe_training_campaign(self, dataset: str) -> str:
        """Return which campaign with a live process trains on a dataset; empty if none does.

        Campaigns are found by a listing of all objects. The listing is repeated, and takes at most
        a fifth of the time. So a new campaign may be found late; leases are always read in time.
        """
        now = time.monotonic()
        if now >= self._next_search_at:
            self._campaigns = self._find_campaigns()
            ended = time.monotonic()
            self._next_search_at = ended + _SEARCH_PAUSE_FACTOR * (ended - now)
        for campaign in sorted(self._campaigns.get(dataset, ())):
            if holder := self.describe_holder(CampaignKeys(campaign).job):
                return f"the campaign {campaign} trains on it: {holder}"
        return ""

    def _find_campaigns(self) -> dict[str, set[str]]:
        """Return the names of all campaigns, by their dataset."""
        found_keys: list[tuple[Store, str, str]] = []
        workers = WorkerPrefixes()
        for store, _ in self._stores:
            for stat in list_objects(store):
                workers.learn(stat.key)
                if campaign := parse_campaign(stat.key):
                    found_keys.append((store, stat.key, campaign))
        found: dict[str, set[str]] = defaultdict(set)
        for store, key, campaign in found_keys:
            if workers.find(key) is not None:
                continue  # a worker wrote it, below its own prefix
            if dataset := _read_campaign_dataset(store, key):
                found[dataset].add(campaign)
        return dict(found)

    def _make_census(self, number: int, scope: str) -> Census:
        store, clock = self._stores[number]
        return Census(store, scope, "", clock)

    def _iterate_holders(self, scope: str) -> Iterator[str]:
        for number, (store, _) in enumerate(self._stores):
            name = scope or PurePosixPath(find_path(store)).name
            if not name:  # a whole bucket is the folder of no job
                continue
            try:
                holders = self._open_census(number, scope).find_holders()
            except errors.CorruptError as error:  # a member can write what is no lease
                yield f"a lease of {name} may be held, as it cannot be read ({error})"
                continue
            for held in holders.values():
                yield f"{name} is worked on by {held.holder.host} (process {held.holder.pid})"

    def _is_merged(self, classified: ClassifiedKey) -> bool:
        """Decide whether the window of a worker's object has a link. Nobody reads it after that.

        If several stores have a chain, the shortest one decides.
        """
        chain = (classified.scope, classified.version)
        if chain not in self._newest_links:
            keys = ChainKeys(*chain)
            newest = [
                max(list_numbers(store, keys.links, keys.parse_link), default=-1)
                for store, _ in self._stores
            ]
            self._newest_links[chain] = min((one for one in newest if one >= 0), default=-1)
        return classified.number <= self._newest_links[chain]

    def _explain_chain_protection(self, classified: ClassifiedKey) -> str:
        """Return why an object of a chain is needed; empty if it is not."""
        if classified.kind is ObjectKind.LINK and classified.number == 0:
            return f"{classified.scope} begins with it"
        chain = (classified.scope, classified.version)
        if classified.kind is ObjectKind.SCORES:
            if chain not in self._newest_scores:
                keys = ChainKeys(*chain)
                scored = list_numbers(self._store, keys.scores, keys.parse_scores)
                self._newest_scores[chain] = max(scored, default=-1)
            if classified.number == self._newest_scores[chain]:
                return f"the next scores of {classified.scope} follow from it"
        if chain not in self._heads:
            self._heads[chain] = _find_chain_head(self._store, ChainKeys(*chain), self._check)
        head = self._heads[chain]
        if isinstance(head, str):
            return head
        if classified.kind is ObjectKind.UPDATE and classified.number > head.step:
            return f"{classified.scope} goes on from step {head.step}, its newest checkpoint"
        if classified.kind is not ObjectKind.UPDATE and classified.number >= head.window:
            return f"{classified.scope} goes on from window {head.window}, its newest checkpoint"
        return ""


def find_unmatched_pins(store: Store, pins: Sequence[str]) -> tuple[str, ...]:
    """Return the pins that are neither the key of an object nor a folder with objects.

    Such a pin may be mistyped. At most two requests for each pin.
    """
    return tuple(
        pin
        for pin in pins
        if not _begins_any_key(store, f"{pin.rstrip('/')}/") and not _is_key(store, pin)
    )


def _begins_any_key(store: Store, folder: str) -> bool:
    if store.location.backend is Backend.FILE and not Path(store.location.bucket, folder).is_dir():
        return False  # a file cannot be listed
    return next(list_objects(store, folder, exact=True), None) is not None


def _is_key(store: Store, text: str) -> bool:
    if store.location.backend is Backend.FILE:
        return not text.endswith("/") and Path(store.location.bucket, text).is_file()
    first = next(list_objects(store, text, exact=True), None)  # buckets list by key
    return first is not None and first.key == text


def _find_open_machines(store: Store) -> dict[str, str]:
    """Return the name of the rental of each machine that is not released, by its folder."""
    survey = AttemptSurvey()
    for stat in list_objects(store, f"{RENTALS}/"):
        survey.note_key(stat.key)
    return {
        keys.make_machine_prefix(number).rstrip("/"): keys.name
        for prefix, keys, number in survey.find_open()
        if not prefix
    }


def _read_campaign_dataset(store: Store, key: str) -> str | None:
    """Return the dataset that a campaign's committed training names.

    None if it names none or cannot be read: such a campaign cannot continue.
    """
    try:
        record = orjson.loads(read(store, key, max_size=_MAX_TRAINING_SIZE))["record"]
        return _TrainingPart.model_validate(record).dataset
    except (
        errors.NotFoundError, errors.CorruptError, orjson.JSONDecodeError, ValidationError,
        KeyError, TypeError,
    ):  # fmt: skip
        return None


def _find_chain_head(store: Store, keys: ChainKeys, check: VerifyDepth) -> ChainHead | str:
    """Return the newest verified checkpoint of a chain, or a sentence if there is none."""
    for step, found in survey(store, keys.job):
        if not isinstance(found, Checkpoint):
            continue
        window = found.position.get(_POSITION)
        if not isinstance(window, int):
            continue
        try:
            link = fetch(store, keys.make_link_key(window), ChainLink if window else ChainStart)
        except (errors.NotFoundError, errors.CorruptError):
            continue
        if link.step == step and not verify(store, found, check=check):
            return ChainHead(step, window)
    return (
        f"no checkpoint of {keys.job} is verified: the chain can only be rebuilt from its objects"
    )


@dataclass(frozen=True, slots=True)
class _UnreadableStart:
    """Start of a chain that cannot be read.

    Attributes:
        classified: Meaning of its key.
        url: URL of the object.
    """

    classified: ClassifiedKey
    url: str


@dataclass(slots=True)
class BucketSurvey:
    """Facts about all objects that decisions about checkpoints need.

    Attributes:
        blocking_reason: Reason why no checkpoint may be deleted; empty if there is none.
        workers: Prefixes of workers.
        versions: Versions of each run, from the keys of its aggregators' objects.
    """

    blocking_reason: str = ""
    workers: WorkerPrefixes = field(default_factory=WorkerPrefixes)
    versions: defaultdict[str, set[str]] = field(
        default_factory=lambda: defaultdict[str, set[str]](set)
    )
    _starts: dict[str, dict[int, str]] = field(default_factory=dict[str, dict[int, str]])
    _unreadable_starts: list[_UnreadableStart] = field(default_factory=list[_UnreadableStart])
    _kept_runs: dict[str, str] = field(default_factory=dict[str, str])
    _runs: set[str] = field(default_factory=set[str])
    _campaigns: set[str] = field(default_factory=set[str])
    _newest: dict[tuple[ObjectKind, str, str], list[int]] = field(
        default_factory=dict[tuple[ObjectKind, str, str], list[int]]
    )

    def is_among_newest(self, classified: ClassifiedKey, count: int) -> bool:
        """Tell whether an object belongs to the newest ``count`` windows or steps of its run."""
        newest = self._newest.get((classified.kind, classified.scope, classified.version), [])
        return classified.number in newest[:count]

    def explain_step_protection(self, job: str, step: int) -> str:
        """Return why a checkpoint stays as the start of a chain; empty if it is no start."""
        reason = self.blocking_reason or self._starts.get(job, {}).get(step, "")
        return reason or next(
            (self._kept_runs[run] for run in _iterate_ancestors(job) if run in self._kept_runs), ""
        )

    def survey_store(self, store: Store, keep_last: int) -> None:
        """List all objects of the store that is cleaned, and record the facts.

        Args:
            store: Store to clean.
            keep_last: Largest `keep_last` of the rules.
        """
        heaps: dict[tuple[ObjectKind, str, str], tuple[list[int], set[int]]] = {}
        for stat in list_objects(store):
            classified = self._record_object(store, stat)
            if (
                classified is None
                or classified.number < 0
                or classified.kind is ObjectKind.CHECKPOINT
            ):
                continue
            heap, numbers = heaps.setdefault(
                (classified.kind, classified.scope, classified.version), ([], set())
            )
            if (
                not keep_last
                or classified.number in numbers
                or (len(heap) == keep_last and classified.number < heap[0])
            ):
                continue
            numbers.add(classified.number)
            heapq.heappush(heap, classified.number)
            if len(heap) > keep_last:
                numbers.remove(heapq.heappop(heap))
        self._newest = {key: sorted(heap, reverse=True) for key, (heap, _) in heaps.items()}

    def survey_related_store(self, store: Store) -> None:
        """List all objects of a related store, and record the starts of its chains."""
        for stat in list_objects(store):
            self._record_object(store, stat)

    def resolve_unreadable_starts(self, protection: ProtectionPolicy) -> None:
        """Decide which checkpoints stay because the start of a chain cannot be read.

        All checkpoints stay if the run belongs to a campaign, or if a process holds its lease. Any
        other run keeps only the checkpoints below its own name, because any writer of the bucket
        can write such a start. Runs below a campaign or below another run are written by workers,
        and are not trusted.

        Raises:
            UnavailableError, DeniedError: A lease cannot be read.
        """
        for one in self._unreadable_starts:
            scope = one.classified.scope
            reason = f"{one.url} cannot be read, and names a checkpoint"
            self._kept_runs[scope] = reason
            ancestors = list(_iterate_ancestors(scope))[1:]
            campaign = next((name for name in ancestors if name in self._campaigns), "")
            if campaign:
                is_trusted = CampaignKeys(campaign).run == scope
            else:
                is_trusted = self._runs.isdisjoint(ancestors) and bool(
                    protection.describe_holder(one.classified.lease_scope)
                )
            if is_trusted:
                self.blocking_reason = reason

    def _record_object(self, store: Store, stat: Stat) -> ClassifiedKey | None:
        """Record the facts that an object tells, and return the meaning of its key."""
        self.workers.learn(stat.key)
        if campaign := parse_campaign(stat.key):
            self._campaigns.add(campaign)
        classified = classify_key(stat.key)
        if classified is not None and classified.version:
            self._runs.add(classified.scope)
        if classified is not None and classified.kind in _CHAIN_KINDS:
            self.versions[classified.scope].add(classified.version)
        if classified is not None and classified.kind is ObjectKind.LINK and classified.number == 0:
            self._record_chain_start(store, classified)
        return classified

    def _record_chain_start(self, store: Store, classified: ClassifiedKey) -> None:
        key = ChainKeys(classified.scope, classified.version).make_link_key(0)
        try:
            start = _read_chain_start(store, key)
        except errors.CorruptError:
            self._unreadable_starts.append(_UnreadableStart(classified, store.make_url(key)))
            return
        self._starts.setdefault(start.job, {})[start.step] = f"{classified.scope} begins with it"


def _iterate_ancestors(name: str) -> Iterator[str]:
    """Yield a name and the names of all folders above it, the nearest first."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _read_chain_start(store: Store, key: str) -> ChainStart | _ChainStartPart:
    """Return the start of a chain, even if another version of Millrace wrote it.

    Raises:
        CorruptError: The object does not name the checkpoint that the chain begins with.
    """
    try:
        return fetch(store, key, ChainStart)
    except errors.VersionError as error:
        try:
            body = read(store, key, max_size=ChainStart.record_bytes)
            return _ChainStartPart.model_validate(orjson.loads(body)["record"])
        except (orjson.JSONDecodeError, ValidationError, KeyError, TypeError):
            raise error from None


def collect_steps(stats: Iterable[Stat], job: str) -> dict[int, Stat]:
    """Return the metadata of each step that is complete, newest first."""
    keys = CheckpointKeys(job)
    steps: dict[int, Stat] = {}
    for stat in stats:
        classified = classify_key(stat.key)
        if classified is not None and stat.key == keys.make_metadata_key(classified.number):
            steps[classified.number] = stat
    return dict(sorted(steps.items(), reverse=True))
