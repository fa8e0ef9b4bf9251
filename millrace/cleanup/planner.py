"""Make a plan of cleaning: what the rules take, but for what something stronger protects."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from millrace import errors
from millrace.checkpoints import RetentionPlan, RetentionSettings, VerifyDepth, plan_retention
from millrace.checkpoints.retention import Removal
from millrace.cleanup.plans import CleaningPlan, Entry, PlanHeader, Tally, write_plan
from millrace.cleanup.protection import Guard, Survey, clock_of, steps_of, youngest_of
from millrace.cleanup.rules import OBJECTS, CleanSettings, Rule, What, in_versions, taking
from millrace.keys import (
    ChainKeys,
    CheckpointKeys,
    ClassifiedKey,
    DatasetKeys,
    ObjectKind,
    classify_key,
    find_common_prefix,
    lease_prefix,
)
from millrace.progress import Event, Progress, silent
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan, Manifest
from millrace.schemas.ledger import find_referenced_keys
from millrace.storage import Stat, Store, list_objects, open_store

_TOLD_EVERY = 10_000
_RESOLUTION = timedelta(seconds=2)  # of the store's clock, as we read it
_ANY_AGE = datetime.max.replace(tzinfo=UTC)  # of files that no checkpoint names: the rules judge it


def make_plan(settings: CleanSettings, *, progress: Progress = silent) -> CleaningPlan:
    """Find what the rules take, and write it down. Deletes nothing.

    Args:
        settings: Where, and by which rules.
        progress: Told ``cleaning.seen`` with ``objects``, every 10,000.

    Returns:
        The plan, which is in the store.

    Raises:
        DeniedError, UnavailableError: Something could not be looked at: there is no plan then.
    """
    store = open_store(settings.store, make_folder=False)
    beside = [open_store(spec, make_folder=False) for spec in settings.beside]
    clock = clock_of(store)
    now = clock.now()
    guard = Guard([store, *beside], settings.pinned, settings.check, clock)
    judge = Judge(store, settings.whole, guard, now, settings.check)
    judge.look_around(beside)
    tally = Tally()
    header = PlanHeader(
        store=store.url, made=now, beside=tuple(one.url for one in beside),
        rules=settings.whole, pinned=settings.pinned, check=settings.check,
    )  # fmt: skip
    return write_plan(store, new_name(now), header, judge.entries(tally, progress), tally)


def new_name(now: datetime) -> str:
    """Return a name for a plan: names of one store sort by when they were made."""
    return f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def listed(store: Store, prefix: str, progress: Progress) -> Iterator[Stat]:
    """Objects, while somebody is told how many have been seen."""
    for count, stat in enumerate(list_objects(store, prefix), start=1):
        if count % _TOLD_EVERY == 0:
            progress(Event("cleaning.seen", store.url, {"objects": count}))
        yield stat


@dataclass(slots=True)
class Judge:
    """Says what the rules take of a store.

    Attributes:
        store: Which.
        rules: By their places.
        guard: What is stronger.
        now: By the store's clock.
        check: How checkpoints are verified.
        survey: What has to be known of all objects first.
    """

    store: Store
    rules: tuple[Rule, ...]
    guard: Guard
    now: datetime
    check: VerifyDepth
    survey: Survey = field(default_factory=Survey)

    def look_around(self, beside: list[Store]) -> None:
        """Find out what has to be known of all objects, where a rule asks for it."""
        keep = max((rule.keep_last for rule in self.rules), default=0)
        about = {what for rule in self.rules for what in rule.what}
        if keep or about & {What.CHECKPOINTS, What.JUNK}:
            self.survey.look(self.store, keep)
        if about & {What.CHECKPOINTS, What.JUNK}:
            for store in beside:
                self.survey.look_beside(store)
            self.survey.settle(self.guard)

    def entries(self, tally: Tally, progress: Progress = silent) -> Iterator[Entry]:
        """Yield the objects to delete, in order. Those that are kept are counted."""
        whole: set[tuple[ObjectKind, str]] = set()
        prefix = find_common_prefix(rule.prefix for rule in self.rules)
        for stat in listed(self.store, prefix, progress):
            what = classify_key(stat.key, self.survey.workers)
            if what is not None and what.kind in {ObjectKind.CHECKPOINT, ObjectKind.DATASET}:
                if (what.kind, what.scope) not in whole:
                    whole.add((what.kind, what.scope))
                    of = self._of_job if what.kind is ObjectKind.CHECKPOINT else self._of_dataset
                    yield from of(what.scope, tally)
                continue
            place = self._taking(stat, what)
            if place is None:
                continue
            junk = what if what is not None and what.kind is ObjectKind.JUNK else None
            if why := self.junk_stays(stat.key, junk) if junk else self.guard.why(stat.key, what):
                tally.kept[why] += 1
            else:
                yield Entry(stat, place, junk=junk)

    def removals(self, job: str, tally: Tally) -> list[tuple[Removal, int]]:
        """Return the objects of a job's checkpoints to delete, in order, and the rule's index."""
        keys = CheckpointKeys(job)
        steps, youngest = self._steps(job)
        taken: dict[int, int] = {}
        needed: dict[int, str] = {}
        for rank, (step, stat) in enumerate(steps.items()):
            place = self._taking_step(job, rank, step, stat)
            if place is None:
                needed[step] = "no rule takes it"
            elif why := self._needed(keys, step):
                needed[step] = why
                tally.kept[f"{job}: {why}"] += 1
            else:
                taken[step] = place
        if not taken and not any(What.PARTS in rule.what for rule in self.rules):
            return []
        if live := self.guard.live(job):
            if taken:
                tally.kept[live] += len(taken)
            return []
        plan = self._retention(job, needed, self.check if taken else VerifyDepth.SIZES)
        for step in taken.keys() & plan.kept.keys():
            tally.kept[f"{job}: {plan.kept[step]}"] += 1
        if set(plan.removed) - taken.keys():
            return []  # one has come since they were listed, that no rule was held against
        metadata = {keys.metadata(step): taken[step] for step in plan.removed}
        shared = min(metadata.values(), default=None)  # a file may be of several steps
        found = (
            (
                one,
                self._taking_one(What.PARTS, _as_old_as(one.stat, youngest), job)
                if one.orphan
                else metadata.get(one.key, shared),
            )
            for one in plan.removals
            if not self.guard.pins(one.key)
        )
        return [(one, place) for one, place in found if place is not None]

    def removed(self, job: str) -> set[str]:
        """Return the metadata and the files of a job that are deleted by now."""
        return {one.key for one, _ in self.removals(job, Tally())}

    def keys_of(self, job: str) -> set[str]:
        """All that there is of a job's checkpoints."""
        return {stat.key for stat in list_objects(self.store, CheckpointKeys(job).prefix)}

    def unneeded(self, job: str) -> set[str]:
        """Return the files of a job that no checkpoint names, unless somebody works on it."""
        if self.guard.live(job):
            return set()
        steps, youngest = self._steps(job)
        plan = self._retention(job, dict.fromkeys(steps, "it is there"), VerifyDepth.SIZES)
        found = (one.stat for one in plan.removals if one.orphan and not self.guard.pins(one.key))
        return {stat.key for stat in found if not self.is_new(_as_old_as(stat, youngest))}

    def junk_stays(self, key: str, junk: ClassifiedKey) -> str:
        """Return why a worker's junk stays: a pin, or a lease of its run or job; empty if it goes.

        The run's aggregators hold leases, one for each version; `look_around` has found them.
        """
        if self.guard.pins(key):
            return "it is pinned"
        versions = sorted(self.survey.versions.get(junk.scope, ()))
        scopes = (junk.scope, *(ChainKeys(junk.scope, version).job for version in versions))
        return next((why for scope in scopes if (why := self.guard.live(scope))), "")

    def is_new(self, stat: Stat) -> bool:
        """Tell whether an object was written after `now`: during execution, that of the plan."""
        return stat.last_modified > self.now + _RESOLUTION

    def changed(self, dataset: str) -> str:
        """Return the reason why a dataset of a plan now stays: a run has gone on with it."""
        new = any(self.is_new(stat) for _, stat in self._objects(DatasetKeys(dataset)))
        return "somebody has gone on with it since the plan was made" if new else ""

    def named_in(self, dataset: str) -> set[str]:
        """Return the keys that the records of a dataset name by now."""
        keys = DatasetKeys(dataset)
        try:
            return find_referenced_keys(self.store, keys, fetch(self.store, keys.plan, DatasetPlan))
        except errors.NotFoundError:
            return set()  # nothing is named any more

    def _steps(self, job: str) -> tuple[dict[int, Stat], dict[int, datetime]]:
        """Return the metadata of each complete step, and the time of its youngest object."""
        stats = list(list_objects(self.store, CheckpointKeys(job).prefix))
        return steps_of(stats, job), youngest_of(stats)

    def _retention(self, job: str, needed: Mapping[int, str], check: VerifyDepth) -> RetentionPlan:
        """Plan the retention, if only these steps and the newest verified one are needed."""
        newest = RetentionSettings(last=1, grace=timedelta(0))
        return plan_retention(self.store, job, newest, check=check, also=needed, now=_ANY_AGE)

    def _taking_one(self, what: What, stat: Stat, name: str) -> int | None:
        """Return the index of the first rule that takes an object of a job's or a dataset's."""
        return taking(
            self.rules, what, lambda rule: self._fits(rule, stat) and rule.name in {"", name}
        )

    def _taking(self, stat: Stat, what: ClassifiedKey | None) -> int | None:
        """Return the index of the first rule that takes an object that is deleted by itself."""
        if what is None:
            return self._taking_other(stat)
        kind = OBJECTS.get(what.kind)
        if kind is None:
            return None

        def fits(rule: Rule) -> bool:
            if not self._fits(rule, stat) or rule.name not in {"", what.scope}:
                return False
            if rule.version and not in_versions(what.version, rule.version):
                return False
            if rule.keep_every and what.number % rule.keep_every == 0:
                return False
            return not (rule.keep_last and self.survey.is_last(what, rule.keep_last))

        place = taking(self.rules, kind, fits)
        if kind is not What.JUNK:
            return place
        # A worker's junk is not Millrace's either.
        places = [one for one in (place, self._taking_other(stat)) if one is not None]
        return min(places, default=None)

    def _taking_other(self, stat: Stat) -> int | None:
        """Return the place of the first rule that takes an object as none of Millrace's."""
        return taking(self.rules, What.OTHER, lambda rule: not rule.name and self._fits(rule, stat))

    def _fits(self, rule: Rule, stat: Stat) -> bool:
        return (
            stat.key.startswith(rule.prefix)
            and stat.key.endswith(rule.suffix)
            and self._is_old(rule, stat)
        )

    def _is_old(self, rule: Rule, stat: Stat) -> bool:
        # The clock is good to a second: what was written just now is as old as nothing.
        return not rule.older_than or stat.last_modified < self.now - rule.older_than

    def _taking_step(self, job: str, rank: int, step: int, stat: Stat) -> int | None:
        return taking(
            self.rules,
            What.CHECKPOINTS,
            lambda rule: (
                self._fits(rule, stat)
                and rule.name in {"", job}
                and rank >= rule.keep_last
                and not (rule.keep_every and step % rule.keep_every == 0)
            ),
        )

    def _needed(self, keys: CheckpointKeys, step: int) -> str:
        """Return the reason why a step stays, though a rule would take it.

        `plan_retention` knows more.
        """
        if self.guard.pins_below(keys.folder(step)):
            return "it is pinned"
        return self.survey.needs(keys.job, step)

    def _of_job(self, job: str, tally: Tally) -> Iterator[Entry]:
        keys = CheckpointKeys(job)
        for one, place in self.removals(job, tally):
            what = classify_key(one.key)
            first = what is not None and one.key == keys.metadata(what.number)
            yield Entry(one.stat, place, 0 if first else 1)

    def _of_dataset(self, dataset: str, tally: Tally) -> Iterator[Entry]:
        keys = DatasetKeys(dataset)
        folder = f"{dataset}/"
        whole = taking(
            self.rules,
            What.SHARDS,
            lambda rule: (
                rule.name in {"", dataset}
                and folder.startswith(rule.prefix)
                and self._old(keys, rule)
            ),
        )
        orphans = any(What.ORPHANS in rule.what for rule in self.rules)
        if whole is None and not orphans:
            return
        try:
            plan = fetch(self.store, keys.plan, DatasetPlan)
        except (errors.NotFoundError, errors.CorruptError):
            return  # nobody knows what it is: it only looks like a dataset
        if plan.dataset != dataset:
            return
        if whole is not None:
            if why := self.guard.live(dataset) or self.guard.needed_by(dataset):
                tally.kept[why] += 1
            elif self.guard.pins_below(folder):
                tally.kept["it is pinned"] += 1
            else:
                yield from self._all_of(keys, whole)
                return
        if orphans:
            yield from self._orphans(keys, plan, tally)

    def _old(self, keys: DatasetKeys, rule: Rule) -> bool:
        """Tell whether even the youngest object of a dataset is old enough."""
        return all(self._is_old(rule, stat) for _, stat in self._objects(keys))

    def _all_of(self, keys: DatasetKeys, place: int) -> Iterator[Entry]:
        for phase, stat in self._objects(keys):
            yield Entry(stat, place, phase)

    def _objects(self, keys: DatasetKeys) -> Iterator[tuple[int, Stat]]:
        """All of a dataset, and when it goes: at no time does what is left name what is gone."""
        for phase, prefixes in enumerate(
            (
                (keys.manifest, keys.index),  # then nobody takes it for complete
                (keys.commits,),  # then a run that goes on makes each shard again
                (keys.shards, keys.quarantined, keys.listings, lease_prefix(keys.dataset)),
                (keys.plan,),
            ),
            start=1,
        ):
            for prefix in prefixes:
                for stat in list_objects(self.store, prefix):
                    if prefix.endswith("/") or stat.key == prefix:
                        yield phase, stat

    def _orphans(self, keys: DatasetKeys, plan: DatasetPlan, tally: Tally) -> Iterator[Entry]:
        """Yield the objects that the ledger of a sealed dataset does not name.

        An open one may go on.
        """
        try:
            fetch(self.store, keys.manifest, Manifest)
        except (errors.NotFoundError, errors.CorruptError):
            return
        try:
            names = find_referenced_keys(self.store, keys, plan)
        except errors.CorruptError as error:
            tally.kept[f"{keys.dataset}: {error}"] += 1
            return
        for prefix in (keys.shards, keys.quarantined, keys.listings):
            for stat in list_objects(self.store, prefix, exact=True):
                place = self._taking_one(What.ORPHANS, stat, keys.dataset)
                if stat.key in names or place is None:
                    continue
                if why := self.guard.why(stat.key, classify_key(stat.key)):
                    tally.kept[why] += 1
                else:
                    yield Entry(stat, place)


def _as_old_as(stat: Stat, youngest: Mapping[int, datetime]) -> Stat:
    """Return a file of a step, as old as the youngest of that step, which may be in use."""
    what = classify_key(stat.key)
    when = youngest.get(what.number, stat.last_modified) if what else stat.last_modified
    return replace(stat, last_modified=when)


def describe(rule: Rule) -> str:
    """Return a rule in a few words: ``gradients, older than 48 h, of version !=0.2.11``."""
    hours = rule.older_than / timedelta(hours=1)
    words = [" and ".join(rule.what), f"older than {hours:g} h" if hours else "of any age"]
    for text, value in (
        ("of version {}", rule.version),
        ("of {}", rule.name),
        ("beginning with {}", rule.prefix),
        ("ending with {}", rule.suffix),
        ("but for the last {}", rule.keep_last),
        ("but for every {}th", rule.keep_every),
    ):
        if value:
            words.append(text.format(value))
    return ", ".join(words)
