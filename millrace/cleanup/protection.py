"""Protection from deletion: what a live run works with, and what the newest weights are made of."""

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from millrace import errors
from millrace.checkpoints.find import VerifyDepth, survey, verify
from millrace.keys import (
    CLEANING,
    CampaignKeys,
    ChainKeys,
    CheckpointKeys,
    ClassifiedKey,
    ObjectKind,
    WorkerPrefixes,
    campaign_of,
    classify_key,
)
from millrace.lease import Census, Holder, StoreClock
from millrace.records import fetch
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Stat, Store, list_objects, read

_HELD_FOR = 5.0  # seconds that what leases say is relied on while a plan is made
_REST = 4  # times as long as the search for campaigns took, until it is done again
_LARGEST = 1 << 20  # bytes of a campaign's plan
_POSITION = "window"  # of a checkpoint of an aggregator's: the window that its weights are after


def clock_of(store: Store, other: StoreClock | None = None) -> StoreClock:
    """Return the store's clock.

    Args:
        store: Which.
        other: Where we may not write, the earlier of this one and this machine's is taken: by one
            that is fast, a lease that is held would seem to have ended.
    """
    try:
        return StoreClock.read(store, CLEANING, Holder.this_process())
    except errors.DeniedError:
        own = StoreClock.of_this_machine()
        return min(own, other or own, key=StoreClock.now)


@dataclass(frozen=True, slots=True)
class Head:
    """The newest checkpoint of a chain that is verified: what comes after it is needed.

    Attributes:
        step: That its weights are at.
        window: That they are after.
    """

    step: int
    window: int


class _Begun(BaseModel):
    """Part of a chain's start that every version of it has."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    job: str
    step: int


class _Trained(BaseModel):
    """The part of a campaign's plan that names what it needs."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    dataset: str | None = None


class Guard:
    """Says of an object why it stays, whatever the rules say.

    Args:
        stores: Where the objects are, and what is beside it.
        pinned: Keys and folders: what is below one stays too.
        check: How a checkpoint is verified.
        clock: Of the first store.
    """

    def __init__(
        self, stores: Sequence[Store], pinned: Sequence[str], check: VerifyDepth, clock: StoreClock
    ) -> None:
        self._store = stores[0]
        beside = ((store, clock_of(store, clock)) for store in stores[1:])
        self._stores = [(stores[0], clock), *beside]
        self._keys = frozenset(pinned)
        self._folders = tuple(key.rstrip("/") + "/" for key in pinned)
        self._check = check
        self._census: dict[tuple[int, str], Census] = {}
        self._live: dict[str, tuple[float, str]] = {}
        self._heads: dict[tuple[str, str], Head | str] = {}
        self._campaigns: dict[str, set[str]] = {}
        self._search_at = 0.0

    def look_again(self) -> None:
        """Forget what leases said: before each batch that is deleted they are read anew."""
        self._live.clear()

    def why(self, key: str, what: ClassifiedKey | None) -> str:
        """Return the reason why an object stays; empty if nothing protects it.

        Raises:
            UnavailableError, DeniedError: A lease cannot be read: then nobody may say that it is
                free.
        """
        if self.pins(key):
            return "it is pinned"
        if what is None:
            return self.live(key.rpartition("/")[0])
        live = self.live(what.lease_scope)
        if live or what.kind not in {ObjectKind.UPDATE, ObjectKind.LINK, ObjectKind.OPENING}:
            return live
        return self._needed(what)

    def pins(self, key: str) -> bool:
        """Tell whether a key is pinned."""
        return key in self._keys or key.startswith(self._folders)

    def pins_below(self, folder: str) -> bool:
        """Tell whether anything in a folder (which ends in ``/``) is pinned, or all of it is."""
        return self.pins(folder) or any(
            key.startswith(folder) for key in (*self._keys, *self._folders)
        )

    def live(self, scope: str) -> str:
        """Return who works on a run, a job or a dataset, in a sentence; empty if nobody does."""
        now = time.monotonic()
        until, said = self._live.get(scope, (now, ""))
        if until <= now:
            parts = scope.split("/")
            above = ("/".join(parts[: depth + 1]) for depth in range(len(parts)) if parts[depth])
            said = next((who for one in above for who in self._holders(one)), "")
            self._live[scope] = now + _HELD_FOR, said
        return said

    def needed_by(self, dataset: str) -> str:
        """Say which campaign trains on a dataset; empty if none does that is led or has workers.

        Campaigns are found by a listing of all objects. It is repeated, but takes a fifth of the
        time at most: a campaign's first plan may be seen that much later. Leases are not.
        """
        now = time.monotonic()
        if now >= self._search_at:
            self._campaigns = self._search()
            ended = time.monotonic()
            self._search_at = ended + _REST * (ended - now)
        for campaign in sorted(self._campaigns.get(dataset, ())):
            if who := self.live(CampaignKeys(campaign).job):
                return f"the campaign {campaign} trains on it: {who}"
        return ""

    def _search(self) -> dict[str, set[str]]:
        """Return the campaigns that have begun, by the dataset that each trains on."""
        found: dict[str, set[str]] = defaultdict(set)
        for store, _ in self._stores:
            for stat in list_objects(store):
                campaign = campaign_of(stat.key)
                dataset = _dataset_of(store, stat.key) if campaign else None
                if campaign and dataset:
                    found[dataset].add(campaign)
        return dict(found)

    def _holders(self, scope: str) -> Iterator[str]:
        for number, (store, clock) in enumerate(self._stores):
            census = self._census.setdefault((number, scope), Census(store, scope, "", clock))
            for held in census.find_holders().values():
                yield f"{scope} is worked on by {held.holder.host} (process {held.holder.pid})"

    def _needed(self, what: ClassifiedKey) -> str:
        """Return the reason why an object of a chain is needed."""
        if what.kind is ObjectKind.LINK and what.number == 0:
            return f"{what.scope} begins with it"
        chain = (what.scope, what.version)
        if chain not in self._heads:
            self._heads[chain] = _head(self._store, ChainKeys(*chain), self._check)
        head = self._heads[chain]
        if isinstance(head, str):
            return head
        if what.kind is ObjectKind.UPDATE and what.number > head.step:
            return f"{what.scope} goes on from step {head.step}, its newest checkpoint"
        if what.kind is not ObjectKind.UPDATE and what.number >= head.window:
            return f"{what.scope} goes on from window {head.window}, its newest checkpoint"
        return ""


def _dataset_of(store: Store, key: str) -> str | None:
    """Return the dataset that a campaign's plan names.

    None if it names none, or is no plan: such a campaign does not go on either.
    """
    try:
        record = orjson.loads(read(store, key, largest=_LARGEST))["record"]
        return _Trained.model_validate(record).dataset
    except (
        errors.NotFoundError, errors.CorruptError, orjson.JSONDecodeError, ValidationError,
        KeyError, TypeError,
    ):  # fmt: skip
        return None


def _head(store: Store, keys: ChainKeys, check: VerifyDepth) -> Head | str:
    """Return the link from which a chain can be continued; a sentence if that is not known."""
    for step, found in survey(store, keys.job):
        if not isinstance(found, Checkpoint):
            continue
        window = found.position.get(_POSITION)
        if not isinstance(window, int):
            continue
        try:
            link = fetch(store, keys.link(window), ChainLink if window else ChainStart)
        except (errors.NotFoundError, errors.CorruptError):
            continue
        if link.step == step and not verify(store, found, check=check):
            return Head(step, window)
    return f"no checkpoint of {keys.job} is verified: what was merged is all that there is"


@dataclass(frozen=True, slots=True)
class _Unread:
    """Start of a chain that cannot be read.

    Attributes:
        what: Meaning of its key.
        url: URL of the object.
    """

    what: ClassifiedKey
    url: str


@dataclass(slots=True)
class Survey:
    """Facts about all objects that are needed before the first checkpoint can be judged.

    Attributes:
        unknown: Reason why no checkpoint may go at all; empty if there is none.
        workers: Prefixes of workers.
        versions: Versions of each run, as its aggregators' objects say.
    """

    unknown: str = ""
    workers: WorkerPrefixes = field(default_factory=WorkerPrefixes)
    versions: defaultdict[str, set[str]] = field(
        default_factory=lambda: defaultdict[str, set[str]](set)
    )
    _starts: dict[str, dict[int, str]] = field(default_factory=dict[str, dict[int, str]])
    _unread: list[_Unread] = field(default_factory=list[_Unread])
    _kept: dict[str, str] = field(default_factory=dict[str, str])
    _runs: set[str] = field(default_factory=set[str])
    _campaigns: set[str] = field(default_factory=set[str])
    _newest: dict[tuple[ObjectKind, str, str], list[int]] = field(
        default_factory=dict[tuple[ObjectKind, str, str], list[int]]
    )

    def is_last(self, what: ClassifiedKey, count: int) -> bool:
        """Tell whether an object is of the newest so many windows or steps of its run."""
        newest = self._newest.get((what.kind, what.scope, what.version), [])
        return what.number in newest[:count]

    def needs(self, job: str, step: int) -> str:
        """Return why a checkpoint stays as the first of a chain; empty if it is none."""
        said = self.unknown or self._starts.get(job, {}).get(step, "")
        return said or next((self._kept[run] for run in _above(job) if run in self._kept), "")

    def look(self, store: Store, keep: int) -> None:
        """Go through all objects of the store that is cleaned.

        Args:
            store: Which.
            keep: The most that a rule keeps of the newest.
        """
        heaps: dict[tuple[ObjectKind, str, str], tuple[list[int], set[int]]] = {}
        for stat in list_objects(store):
            what = self._note(store, stat)
            if what is None or what.number < 0 or what.kind is ObjectKind.CHECKPOINT:
                continue
            heap, there = heaps.setdefault((what.kind, what.scope, what.version), ([], set()))
            if not keep or what.number in there or (len(heap) == keep and what.number < heap[0]):
                continue
            there.add(what.number)
            heapq.heappush(heap, what.number)
            if len(heap) > keep:
                there.remove(heapq.heappop(heap))
        self._newest = {key: sorted(heap, reverse=True) for key, (heap, _) in heaps.items()}

    def look_beside(self, store: Store) -> None:
        """Go through all objects of a store beside it, for what chains there begin with."""
        for stat in list_objects(store):
            self._note(store, stat)

    def settle(self, guard: Guard) -> None:
        """Decide which checkpoints stay because the start of a chain cannot be read.

        All stay if its run is a campaign's, or if a lease says that the run is worked on. Any
        other run keeps the checkpoints below its own name: whoever may write somewhere in the
        bucket can leave such a start there. What lies below a campaign, or below another run, is
        what their workers have written, and is no run of the owner's.

        Raises:
            UnavailableError, DeniedError: A lease cannot be read.
        """
        for one in self._unread:
            scope = one.what.scope
            said = f"{one.url} cannot be read, and names a checkpoint"
            self._kept[scope] = said
            above = list(_above(scope))[1:]
            campaign = next((name for name in above if name in self._campaigns), "")
            if campaign:
                trusted = CampaignKeys(campaign).run == scope
            else:
                trusted = self._runs.isdisjoint(above) and bool(guard.live(one.what.lease_scope))
            if trusted:
                self.unknown = said

    def _note(self, store: Store, stat: Stat) -> ClassifiedKey | None:
        """Note what an object says of workers and chains; return what its key means."""
        self.workers.learn(stat.key)
        if campaign := campaign_of(stat.key):
            self._campaigns.add(campaign)
        what = classify_key(stat.key)
        if what is not None and what.version:
            self._runs.add(what.scope)
        if what is not None and what.kind in {
            ObjectKind.UPDATE,
            ObjectKind.LINK,
            ObjectKind.OPENING,
        }:
            self.versions[what.scope].add(what.version)
        if what is not None and what.kind is ObjectKind.LINK and what.number == 0:
            self._begins(store, what)
        return what

    def _begins(self, store: Store, what: ClassifiedKey) -> None:
        key = ChainKeys(what.scope, what.version).link(0)
        try:
            start = _start(store, key)
        except errors.CorruptError:
            self._unread.append(_Unread(what, store.url_of(key)))
            return
        self._starts.setdefault(start.job, {})[start.step] = f"{what.scope} begins with it"


def _above(name: str) -> Iterator[str]:
    """Yield a name, and those of all folders above it, the nearest first."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _start(store: Store, key: str) -> ChainStart | _Begun:
    """Return the start of a chain, also one that another version of Millrace wrote.

    Raises:
        CorruptError: The object does not say which checkpoint the chain begins with.
    """
    try:
        return fetch(store, key, ChainStart)
    except errors.VersionError as error:
        try:
            body = read(store, key, largest=ChainStart.record_bytes)
            return _Begun.model_validate(orjson.loads(body)["record"])
        except (orjson.JSONDecodeError, ValidationError, KeyError, TypeError):
            raise error from None


def steps_of(stats: Iterable[Stat], job: str) -> dict[int, Stat]:
    """Return the metadata of each step that is complete, newest first."""
    keys = CheckpointKeys(job)
    steps: dict[int, Stat] = {}
    for stat in stats:
        what = classify_key(stat.key)
        if what is not None and stat.key == keys.metadata(what.number):
            steps[what.number] = stat
    return dict(sorted(steps.items(), reverse=True))


def youngest_of(stats: Iterable[Stat]) -> dict[int, datetime]:
    """Return when the youngest object of each step of a job was written."""
    found: dict[int, datetime] = {}
    for stat in stats:
        what = classify_key(stat.key)
        if what is not None and what.number >= 0:
            found[what.number] = max(stat.last_modified, found.get(what.number, stat.last_modified))
    return found
