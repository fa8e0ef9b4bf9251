"""Make a cleanup plan: the objects that rules choose, except protected ones."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from millrace import errors
from millrace.checkpoints import RetentionPlan, RetentionSettings, VerifyDepth, plan_retention
from millrace.checkpoints.retention import Removal
from millrace.cleanup.plans import CleanupPlan, PlanEntry, PlanHeader, PlanTally, write_plan
from millrace.cleanup.progress_events import ObjectsListed
from millrace.cleanup.protection import (
    BucketSurvey,
    ProtectionPolicy,
    collect_steps,
    find_youngest_times,
    read_store_clock,
)
from millrace.cleanup.rules import (
    KINDS_OF_SINGLE_OBJECTS,
    CleanupKind,
    CleanupSettings,
    Rule,
    find_rule,
    is_version_in,
)
from millrace.dataset_ledger import find_referenced_keys
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.datasets import DatasetKeys
from millrace.keys.gradients import ChainKeys
from millrace.keys.kinds import ClassifiedKey, ObjectKind, classify_key
from millrace.keys.leases import make_lease_prefix
from millrace.keys.names import find_common_prefix
from millrace.progress import Progress, ignore_event
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan, Manifest
from millrace.storage import LinkFinder, Stat, Store, list_objects, open_store

_TOLD_EVERY = 10_000
_RESOLUTION = timedelta(seconds=2)  # of the store's clock, as we read it
_ANY_AGE = datetime.max.replace(
    tzinfo=UTC
)  # for files that no checkpoint names: rules decide by age


def make_plan(settings: CleanupSettings, *, progress: Progress = ignore_event) -> CleanupPlan:
    """Write a plan of the objects that the rules choose. Deletes nothing.

    Args:
        settings: The store and the rules.
        progress: Receives `ObjectsListed` after each 10,000 objects.

    Returns:
        The plan, which is written to the store.

    Raises:
        DeniedError, UnavailableError: A listing, lease or record cannot be read: no plan is made.
    """
    store = open_store(settings.store, make_folder=False)
    related_stores = [open_store(spec, make_folder=False) for spec in settings.related_stores]
    clock = read_store_clock(store)
    now = clock.now()
    protection = ProtectionPolicy([store, *related_stores], settings.pins, settings.check, clock)
    planner = Planner(store, settings.expanded_rules, protection, now, settings.check)
    planner.survey_stores(related_stores)
    tally = PlanTally()
    header = PlanHeader(
        store=store.url, created_at=now, related_stores=tuple(one.url for one in related_stores),
        rules=settings.expanded_rules, pins=settings.pins, check=settings.check,
    )  # fmt: skip
    return write_plan(
        store, make_plan_name(now), header, planner.iterate_entries(tally, progress), tally
    )


def make_plan_name(now: datetime) -> str:
    """Return a name for a plan. The names of one store sort by time."""
    return f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def list_with_progress(store: Store, prefix: str, progress: Progress) -> Iterator[Stat]:
    """Yield objects, and send the count as an event every 10,000.

    What a folder reaches through a link to another folder is no object of its.
    """
    links = LinkFinder(store)
    for count, stat in enumerate(list_objects(store, prefix), start=1):
        if count % _TOLD_EVERY == 0:
            progress(ObjectsListed(store=store.url, objects=count))
        if not links.is_linked(stat.key):
            yield stat


@dataclass(slots=True)
class Planner:
    """Decides which objects of a store are deleted.

    Attributes:
        store: Store to clean.
        rules: Rules in order.
        protection: Policy that overrides the rules.
        now: Time by the store's clock.
        check: Check of checkpoints.
        survey: Facts about all objects, where rules need them.
    """

    store: Store
    rules: tuple[Rule, ...]
    protection: ProtectionPolicy
    now: datetime
    check: VerifyDepth
    survey: BucketSurvey = field(default_factory=BucketSurvey)

    def survey_stores(self, related_stores: list[Store]) -> None:
        """Collect the facts about all objects that the rules need."""
        keep = max((rule.keep_last for rule in self.rules), default=0)
        kinds = {kind for rule in self.rules for kind in rule.kinds}
        if keep or kinds & {CleanupKind.CHECKPOINTS, CleanupKind.JUNK}:
            self.survey.survey_store(self.store, keep)
        if kinds & {CleanupKind.CHECKPOINTS, CleanupKind.JUNK}:
            for store in related_stores:
                self.survey.survey_related_store(store)
            self.survey.resolve_unreadable_starts(self.protection)

    def iterate_entries(
        self, tally: PlanTally, progress: Progress = ignore_event
    ) -> Iterator[PlanEntry]:
        """Yield the objects to delete, in order. Those that are kept are counted."""
        whole: set[tuple[ObjectKind, str]] = set()
        prefix = find_common_prefix(rule.prefix for rule in self.rules)
        for stat in list_with_progress(self.store, prefix, progress):
            classified = classify_key(stat.key, self.survey.workers)
            if classified is not None and classified.kind in {
                ObjectKind.CHECKPOINT,
                ObjectKind.DATASET,
            }:
                if (classified.kind, classified.scope) not in whole:
                    whole.add((classified.kind, classified.scope))
                    iterate_unit = (
                        self._iterate_job_entries
                        if classified.kind is ObjectKind.CHECKPOINT
                        else self._iterate_dataset_entries
                    )
                    yield from iterate_unit(classified.scope, tally)
                continue
            rule_index = self._find_object_rule(stat, classified)
            if rule_index is None:
                continue
            junk = (
                classified
                if classified is not None and classified.kind is ObjectKind.JUNK
                else None
            )
            if junk:
                reason = self.explain_junk_protection(stat.key, junk)
            else:
                reason = self.protection.explain_protection(stat.key, classified)
            if reason:
                tally.kept[reason] += 1
            else:
                yield PlanEntry(stat, rule_index, junk=junk)

    def plan_removals(self, job: str, tally: PlanTally) -> list[tuple[Removal, int]]:
        """Return the objects of a job's checkpoints to delete, in order, and the rule's index."""
        keys = CheckpointKeys(job)
        steps, youngest = self._list_steps(job)
        taken: dict[int, int] = {}
        needed: dict[int, str] = {}
        for rank, (step, stat) in enumerate(steps.items()):
            rule_index = self._find_step_rule(job, rank, step, stat)
            if rule_index is None:
                needed[step] = "no rule takes it"
            elif reason := self._explain_step_protection(keys, step):
                needed[step] = reason
                tally.kept[f"{job}: {reason}"] += 1
            else:
                taken[step] = rule_index
        if not taken and not any(
            CleanupKind.CHECKPOINT_ORPHANS in rule.kinds for rule in self.rules
        ):
            return []
        if holder := self.protection.describe_holder(job):
            if taken:
                tally.kept[holder] += len(taken)
            return []
        plan = self._plan_retention(job, needed, self.check if taken else VerifyDepth.SIZES)
        for step in taken.keys() & plan.kept.keys():
            tally.kept[f"{job}: {plan.kept[step]}"] += 1
        if set(plan.removed) - taken.keys():
            return []  # a step is new since the listing, and no rule has been applied to it
        metadata = {keys.metadata(step): taken[step] for step in plan.removed}
        shared = min(metadata.values(), default=None)  # a file may belong to several steps
        found = (
            (
                one,
                self._find_orphan_rule(
                    CleanupKind.CHECKPOINT_ORPHANS, _apply_youngest_time(one.stat, youngest), job
                )
                if one.orphan
                else metadata.get(one.key, shared),
            )
            for one in plan.removals
            if not self.protection.is_pinned(one.key)
        )
        return [(one, index) for one, index in found if index is not None]

    def list_deletable_keys(self, job: str) -> set[str]:
        """Return the keys of metadata and files of a job that the rules choose now."""
        return {one.key for one, _ in self.plan_removals(job, PlanTally())}

    def list_keys(self, job: str) -> set[str]:
        """Return the keys of all objects of a job's checkpoints."""
        return {stat.key for stat in list_objects(self.store, CheckpointKeys(job).prefix)}

    def find_unreferenced_keys(self, job: str) -> set[str]:
        """Return the files of a job that no checkpoint names; none while a lease is held."""
        if self.protection.describe_holder(job):
            return set()
        steps, youngest = self._list_steps(job)
        plan = self._plan_retention(job, dict.fromkeys(steps, "it is there"), VerifyDepth.SIZES)
        found = (
            one.stat
            for one in plan.removals
            if one.orphan and not self.protection.is_pinned(one.key)
        )
        return {stat.key for stat in found if not self.is_new(_apply_youngest_time(stat, youngest))}

    def explain_junk_protection(self, key: str, junk: ClassifiedKey) -> str:
        """Return why a worker's junk stays: a pin, or a lease of its run or job; empty if none.

        A run's aggregators hold a lease for each version. `survey_stores` finds them.
        """
        if self.protection.is_pinned(key):
            return "it is pinned"
        versions = sorted(self.survey.versions.get(junk.scope, ()))
        scopes = (junk.scope, *(ChainKeys(junk.scope, version).job for version in versions))
        return next(
            (why for scope in scopes if (why := self.protection.describe_holder(scope))), ""
        )

    def is_new(self, stat: Stat) -> bool:
        """Tell whether an object was written after `now`, which is the time of the plan."""
        return stat.last_modified > self.now + _RESOLUTION

    def explain_change(self, dataset: str) -> str:
        """Return why a dataset of a plan stays now: a run has continued it; empty if none has."""
        new = any(self.is_new(stat) for _, stat in self._iterate_phases(DatasetKeys(dataset)))
        return "a run has continued it since the plan was made" if new else ""

    def list_referenced_keys(self, dataset: str) -> set[str]:
        """Return the keys that the records of a dataset name now."""
        keys = DatasetKeys(dataset)
        try:
            return find_referenced_keys(self.store, keys, fetch(self.store, keys.plan, DatasetPlan))
        except errors.NotFoundError:
            return set()  # without a plan, no record names a key

    def _list_steps(self, job: str) -> tuple[dict[int, Stat], dict[int, datetime]]:
        """Return the metadata of each complete step, and the time of its youngest object."""
        stats = list(list_objects(self.store, CheckpointKeys(job).prefix))
        return collect_steps(stats, job), find_youngest_times(stats)

    def _plan_retention(
        self, job: str, needed: Mapping[int, str], check: VerifyDepth
    ) -> RetentionPlan:
        """Plan the retention of the needed steps and the newest verified one."""
        newest = RetentionSettings(last=1, grace=timedelta(0))
        return plan_retention(self.store, job, newest, check=check, also=needed, now=_ANY_AGE)

    def _find_orphan_rule(self, kind: CleanupKind, stat: Stat, name: str) -> int | None:
        """Return the index of the first rule that takes an object of a job's or a dataset's."""
        return find_rule(
            self.rules, kind, lambda rule: self._is_match(rule, stat) and rule.name in {"", name}
        )

    def _find_object_rule(self, stat: Stat, classified: ClassifiedKey | None) -> int | None:
        """Return the index of the first rule that takes an object that is deleted by itself."""
        if classified is None:
            return self._find_foreign_rule(stat)
        kind = KINDS_OF_SINGLE_OBJECTS.get(classified.kind)
        if kind is None:
            return None

        def is_match(rule: Rule) -> bool:
            if not self._is_match(rule, stat) or rule.name not in {"", classified.scope}:
                return False
            if rule.version and not is_version_in(classified.version, rule.version):
                return False
            if rule.keep_every and classified.number % rule.keep_every == 0:
                return False
            return not (rule.keep_last and self.survey.is_among_newest(classified, rule.keep_last))

        rule_index = find_rule(self.rules, kind, is_match)
        if kind is not CleanupKind.JUNK:
            return rule_index
        # A rule for other objects takes junk too.
        rule_indices = [
            one for one in (rule_index, self._find_foreign_rule(stat)) if one is not None
        ]
        return min(rule_indices, default=None)

    def _find_foreign_rule(self, stat: Stat) -> int | None:
        """Return the index of the first rule for objects that Millrace did not write."""
        return find_rule(
            self.rules, CleanupKind.OTHER, lambda rule: not rule.name and self._is_match(rule, stat)
        )

    def _is_match(self, rule: Rule, stat: Stat) -> bool:
        return (
            stat.key.startswith(rule.prefix)
            and stat.key.endswith(rule.suffix)
            and self._is_old(rule, stat)
        )

    def _is_old(self, rule: Rule, stat: Stat) -> bool:
        # The clock has a resolution of a second: an object written just now has no age.
        return not rule.older_than or stat.last_modified < self.now - rule.older_than

    def _find_step_rule(self, job: str, rank: int, step: int, stat: Stat) -> int | None:
        return find_rule(
            self.rules,
            CleanupKind.CHECKPOINTS,
            lambda rule: (
                self._is_match(rule, stat)
                and rule.name in {"", job}
                and rank >= rule.keep_last
                and not (rule.keep_every and step % rule.keep_every == 0)
            ),
        )

    def _explain_step_protection(self, keys: CheckpointKeys, step: int) -> str:
        """Return why a step stays although a rule takes it; empty if nothing protects it.

        `plan_retention` protects further steps.
        """
        if self.protection.has_pins_below(keys.folder(step)):
            return "it is pinned"
        return self.survey.explain_step_protection(keys.job, step)

    def _iterate_job_entries(self, job: str, tally: PlanTally) -> Iterator[PlanEntry]:
        keys = CheckpointKeys(job)
        for one, rule_index in self.plan_removals(job, tally):
            classified = classify_key(one.key)
            is_metadata = classified is not None and one.key == keys.metadata(classified.number)
            yield PlanEntry(one.stat, rule_index, 0 if is_metadata else 1)

    def _iterate_dataset_entries(self, dataset: str, tally: PlanTally) -> Iterator[PlanEntry]:
        keys = DatasetKeys(dataset)
        folder = f"{dataset}/"
        rule_index = find_rule(
            self.rules,
            CleanupKind.DATASETS,
            lambda rule: (
                rule.name in {"", dataset}
                and folder.startswith(rule.prefix)
                and self._is_dataset_old(keys, rule)
            ),
        )
        has_orphan_rule = any(CleanupKind.DATASET_ORPHANS in rule.kinds for rule in self.rules)
        if rule_index is None and not has_orphan_rule:
            return
        try:
            plan = fetch(self.store, keys.plan, DatasetPlan)
        except (errors.NotFoundError, errors.CorruptError):
            return  # without a readable plan, it may be no dataset
        if plan.dataset != dataset:
            return
        if rule_index is not None:
            reason = self.protection.describe_holder(dataset)
            if reason := reason or self.protection.describe_training_campaign(dataset):
                tally.kept[reason] += 1
            elif self.protection.has_pins_below(folder):
                tally.kept["it is pinned"] += 1
            else:
                yield from self._iterate_whole_dataset(keys, rule_index)
                return
        if has_orphan_rule:
            yield from self._iterate_orphans(keys, plan, tally)

    def _is_dataset_old(self, keys: DatasetKeys, rule: Rule) -> bool:
        """Tell whether even the youngest object of a dataset is old enough."""
        return all(self._is_old(rule, stat) for _, stat in self._iterate_phases(keys))

    def _iterate_whole_dataset(self, keys: DatasetKeys, rule_index: int) -> Iterator[PlanEntry]:
        for phase, stat in self._iterate_phases(keys):
            yield PlanEntry(stat, rule_index, phase)

    def _iterate_phases(self, keys: DatasetKeys) -> Iterator[tuple[int, Stat]]:
        """Yield the objects of a dataset with their phases.

        In each phase, no remaining record names a deleted object.
        """
        for phase, prefixes in enumerate(
            (
                (keys.manifest, keys.index),  # without them, the dataset is not complete
                (keys.commits,),  # without them, a run makes each shard again
                (keys.shards, keys.quarantined, keys.sample_lists, make_lease_prefix(keys.dataset)),
                (keys.plan,),
            ),
            start=1,
        ):
            for prefix in prefixes:
                for stat in list_objects(self.store, prefix):
                    if prefix.endswith("/") or stat.key == prefix:
                        yield phase, stat

    def _iterate_orphans(
        self, keys: DatasetKeys, plan: DatasetPlan, tally: PlanTally
    ) -> Iterator[PlanEntry]:
        """Yield the objects that the ledger of a complete dataset does not name.

        An incomplete dataset has none: its run may continue.
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
        for prefix in (keys.shards, keys.quarantined, keys.sample_lists):
            for stat in list_objects(self.store, prefix, exact=True):
                rule_index = self._find_orphan_rule(CleanupKind.DATASET_ORPHANS, stat, keys.dataset)
                if stat.key in names or rule_index is None:
                    continue
                reason = self.protection.explain_protection(stat.key, classify_key(stat.key))
                if reason:
                    tally.kept[reason] += 1
                else:
                    yield PlanEntry(stat, rule_index)


def _apply_youngest_time(stat: Stat, youngest: Mapping[int, datetime]) -> Stat:
    """Return a file with the time of the youngest object of its step, which may be in use."""
    classified = classify_key(stat.key)
    when = youngest.get(classified.number, stat.last_modified) if classified else stat.last_modified
    return replace(stat, last_modified=when)


def describe_rule(rule: Rule) -> str:
    """Return a rule in a few words: ``gradients, older than 48 h, of version !=0.2.11``."""
    hours = rule.older_than / timedelta(hours=1)
    words = [" and ".join(rule.kinds), f"older than {hours:g} h" if hours else "of any age"]
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
