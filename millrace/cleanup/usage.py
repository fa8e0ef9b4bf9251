"""Usage of a store: its objects and bytes by kind, by folder and by age. Only the store is listed.

The kinds are those of the keys alone. An object below a worker's prefix that Millrace does not name
counts as `other` here, since its prefix would have to be proven first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase

from millrace.cleanup.planner import list_with_progress
from millrace.cleanup.progress_events import ObjectsListed
from millrace.errors import ConfigurationError
from millrace.keys.kinds import classify_key, classify_nested_key
from millrace.progress import Progress, ignore_event
from millrace.storage import Stat, Store
from millrace.storage.folders import UnlistedEntry, UnlistedReason, list_unlisted

OTHER = "other"
_AGES = (
    (timedelta(days=1), "under 1 day"),
    (timedelta(days=7), "1 to 7 days"),
    (timedelta(days=30), "7 to 30 days"),
    (timedelta(days=90), "30 to 90 days"),
)
_OLDEST = "over 90 days"
_MAX_FOLDERS = 50_000  # about 15 MB; what is in further folders is counted together
_FURTHER = "(further folders)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFilter:
    """Conditions for objects. An object has to meet all of them.

    Attributes:
        prefix: Text that the key begins with.
        suffix: Text that the key ends with.
        pattern: Pattern of the whole key, with ``*``, ``?`` and ``[...]``; ``*`` also matches
            slashes.
        exclude: Patterns of keys that do not meet the conditions.
        older_than: Least time since the last write.
        newer_than: Largest time since the last write.

    Raises:
        ConfigurationError: A pattern is empty.
    """

    prefix: str = ""
    suffix: str = ""
    pattern: str = "*"
    exclude: tuple[str, ...] = ()
    older_than: timedelta | None = None
    newer_than: timedelta | None = None

    def __post_init__(self) -> None:
        """Refuse an empty pattern, which some would take for all keys, and others for none."""
        if "" in (self.pattern, *self.exclude):
            raise ConfigurationError("A pattern of keys is empty: write '*' for all keys.")

    def iterate_objects(
        self,
        store: Store,
        now: datetime,
        *,
        progress: Progress = ignore_event,
    ) -> Iterator[Stat]:
        """List the objects of a store that meet the conditions.

        Args:
            store: Store to list.
            now: Time from which ages are counted.
            progress: Receives `ObjectsListed`.
        """
        for stat in list_with_progress(store, self.prefix, progress):
            age = now - stat.last_modified
            if (
                self._includes(stat.key)
                and (self.older_than is None or age >= self.older_than)
                and (self.newer_than is None or age <= self.newer_than)
            ):
                yield stat

    def list_unlisted(self, store: Store) -> list[UnlistedEntry]:
        """Return the entries of a folder that are no objects, if their keys meet the conditions.

        A partial file of an object that Millrace names is known as such.
        """
        found = [one for one in list_unlisted(store, self.prefix) if self._includes(one.key)]
        for number, entry in enumerate(found):
            whole = entry.key.rpartition("#")[0]
            if entry.reason is UnlistedReason.NAME and classify_key(whole) is not None:
                found[number] = replace(entry, reason=UnlistedReason.UNFINISHED)
        return sorted(found, key=lambda one: one.key)

    def _includes(self, key: str) -> bool:
        return (
            key.endswith(self.suffix)
            and fnmatchcase(key, self.pattern)
            and not any(fnmatchcase(key, one) for one in self.exclude)
        )


@dataclass(frozen=True, slots=True)
class UsageGroup:
    """Objects of a store that are counted together.

    Attributes:
        name: Name of the group.
        objects: Number of objects.
        size: Bytes of the objects.
        newest: Time of the last write of any of them; None without objects.
    """

    name: str
    objects: int = 0
    size: int = 0
    newest: datetime | None = None

    def add(self, stat: Stat) -> "UsageGroup":
        """Return the group with another object."""
        newest = max(self.newest or stat.last_modified, stat.last_modified)
        return UsageGroup(self.name, self.objects + 1, self.size + stat.size, newest)


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Usage of a store.

    Attributes:
        url: URL of the store.
        total: All objects.
        kinds: Objects by kind, the largest first. `other` has those that Millrace did not write.
        folders: Objects by folder, the largest first.
        ages: Objects by the time since their last write, the youngest first.
    """

    url: str
    total: UsageGroup
    kinds: tuple[UsageGroup, ...]
    folders: tuple[UsageGroup, ...]
    ages: tuple[UsageGroup, ...]


def measure_usage(
    store: Store,
    objects: ObjectFilter | None = None,
    *,
    depth: int = 1,
    now: datetime | None = None,
    progress: Progress = ignore_event,
) -> StoreUsage:
    """Count the objects and bytes of a store. One listing; writes nothing.

    Memory: that of a page of the listing, and of 50,000 folders.

    Args:
        store: Store to list.
        objects: Conditions for the objects that are counted; by default all are.
        depth: Number of a key's first folders that make a group.
        now: Time from which ages are counted; by default that of this machine.
        progress: Receives `ObjectsListed`.

    Raises:
        DeniedError: The credentials may not list.
        UnavailableError: The store failed for longer than its time budget.
    """
    now = now or datetime.now(UTC)
    total = UsageGroup("all")
    kinds, folders = dict[str, UsageGroup](), dict[str, UsageGroup]()
    ages = {name: UsageGroup(name) for name in (*(name for _, name in _AGES), _OLDEST)}
    for stat in (objects or ObjectFilter()).iterate_objects(store, now, progress=progress):
        total = total.add(stat)
        classified = classify_nested_key(stat.key)
        folder = _find_folder(stat.key, depth)
        if folder not in folders and len(folders) >= _MAX_FOLDERS:
            folder = _FURTHER
        for groups, name in (
            (kinds, OTHER if classified is None else str(classified.kind)),
            (folders, folder),
            (ages, _find_age(now - stat.last_modified)),
        ):
            groups[name] = groups.get(name, UsageGroup(name)).add(stat)
    progress(ObjectsListed(store=store.url, objects=total.objects))
    return StoreUsage(store.url, total, _sort(kinds), _sort(folders), tuple(ages.values()))


def limit_groups(groups: tuple[UsageGroup, ...], count: int) -> tuple[UsageGroup, ...]:
    """Return the first groups, and one group with all objects of the others."""
    if len(groups) <= count:
        return groups
    rest = groups[count:]
    newest = max(one.newest for one in rest if one.newest is not None)
    name = f"{len(rest):,} more"
    size = sum(one.size for one in rest)
    return (*groups[:count], UsageGroup(name, sum(one.objects for one in rest), size, newest))


def _sort(groups: dict[str, UsageGroup]) -> tuple[UsageGroup, ...]:
    return tuple(sorted(groups.values(), key=lambda one: (-one.size, -one.objects, one.name)))


def _find_folder(key: str, depth: int) -> str:
    """Return the first folders of a key, with a slash; a dot for a key without a folder."""
    folders = key.split("/", depth)[:-1]
    return "/".join(folders) + "/" if folders else "."


def _find_age(age: timedelta) -> str:
    return next((name for limit, name in _AGES if age < limit), _OLDEST)
