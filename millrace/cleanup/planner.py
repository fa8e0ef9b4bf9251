"""Make a cleanup plan: the objects that rules choose, except protected ones."""

import secrets
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from millrace.checkpoints import VerifyDepth
from millrace.cleanup.checkpoint_planner import CheckpointPlanner
from millrace.cleanup.dataset_planner import DatasetPlanner
from millrace.cleanup.plans import CleanupPlan, PlanEntry, PlanHeader, PlanTally, write_plan
from millrace.cleanup.progress_events import ObjectsListed
from millrace.cleanup.protection import (
    BucketSurvey,
    ProtectionPolicy,
    find_path,
    find_unmatched_pins,
    read_store_clock,
)
from millrace.cleanup.rule_matching import RuleMatcher
from millrace.cleanup.rules import CleanupKind, CleanupSettings, Rule
from millrace.errors import ConfigurationError
from millrace.keys.gradients import ChainKeys
from millrace.keys.kinds import ClassifiedKey, ObjectKind, classify_key, classify_nested_key
from millrace.keys.names import find_common_prefix
from millrace.progress import Progress, ignore_event
from millrace.settings_values import write_duration
from millrace.storage import Backend, LinkFinder, Stat, Store, list_objects, open_store

_TOLD_EVERY = 10_000
_ROOT = Path("/")


def make_plan(settings: CleanupSettings, *, progress: Progress = ignore_event) -> CleanupPlan:
    """Write a plan of the objects that the rules choose. Deletes nothing.

    Args:
        settings: The store and the rules.
        progress: Receives `ObjectsListed`.

    Returns:
        The plan, which is written to the store.

    Raises:
        ConfigurationError: The store is the root of the file system.
        DeniedError, UnavailableError: A listing, lease or record cannot be read: no plan is made.
    """
    store = open_store(settings.store, make_folder=False)
    refuse_root(store)
    related_stores = [open_store(spec, make_folder=False) for spec in settings.related_stores]
    clock = read_store_clock(store)
    now = clock.now()
    protection = ProtectionPolicy([store, *related_stores], settings.pins, settings.check, clock)
    planner = Planner(store, settings.expanded_rules, protection, now, settings.check)
    planner.survey_stores(related_stores)
    tally = PlanTally(unmatched_pins=find_unmatched_pins(store, settings.pins))
    header = PlanHeader(
        store=store.url, created_at=now, related_stores=tuple(one.url for one in related_stores),
        rules=settings.expanded_rules, pins=settings.pins, check=settings.check,
    )  # fmt: skip
    return write_plan(
        store, make_plan_name(now), header, planner.iterate_entries(tally, progress), tally
    )


def refuse_root(store: Store) -> None:
    """Check that a store is not the root of the file system, also not through a link.

    Raises:
        ConfigurationError: The store is the root.
    """
    if store.location.backend is Backend.FILE and Path(store.location.bucket).resolve() == _ROOT:
        raise ConfigurationError(
            f"{store.url} is the root of the file system, of which nothing is deleted. Name a "
            "folder."
        )


def make_plan_name(now: datetime) -> str:
    """Return a name for a plan. The names of one store sort by time."""
    return f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def list_with_progress(store: Store, prefix: str, progress: Progress) -> Iterator[Stat]:
    """Yield objects with their exact keys, and send the count as an event every 10,000.

    What a folder reaches through a link to another folder is no object of its.

    Args:
        store: Store to list.
        prefix: Text that the keys begin with.
        progress: Receives `ObjectsListed`.
    """
    links = LinkFinder(store)
    for count, stat in enumerate(list_objects(store, prefix, exact=True), start=1):
        if count % _TOLD_EVERY == 0:
            progress(ObjectsListed(store=store.url, objects=count))
        if not links.is_linked(stat.key):
            yield stat


class Planner:
    """Decides which objects of a store are deleted.

    Args:
        store: Store to clean.
        rules: Rules in order.
        protection: Policy that overrides the rules.
        now: Time by the store's clock.
        check: Check of checkpoints.

    Attributes:
        protection: Policy that overrides the rules.
        checkpoints: Planner of the deletion of checkpoints.
        datasets: Planner of the deletion of datasets.
    """

    def __init__(
        self,
        store: Store,
        rules: tuple[Rule, ...],
        protection: ProtectionPolicy,
        now: datetime,
        check: VerifyDepth,
    ) -> None:
        self._store, self.protection = store, protection
        self._path = find_path(store)
        self._survey = BucketSurvey()  # facts about all objects, for rules that need them
        self._matcher = RuleMatcher(rules, now, self._survey)
        self.checkpoints = CheckpointPlanner(store, self._matcher, protection, check)
        self.datasets = DatasetPlanner(store, self._matcher, protection)
        self._planners = {
            ObjectKind.CHECKPOINT: self.checkpoints,
            ObjectKind.DATASET: self.datasets,
        }

    def survey_stores(self, related_stores: list[Store]) -> None:
        """Collect the facts about all objects that the rules need."""
        keep = max((rule.keep_last for rule in self._matcher.rules), default=0)
        kinds = {kind for rule in self._matcher.rules for kind in rule.kinds}
        if CleanupKind.CHECKPOINTS in kinds:
            keep = max(keep, 1)  # the newest checkpoint of a Templar run is kept
        if keep or kinds & {CleanupKind.CHECKPOINTS, CleanupKind.JUNK}:
            self._survey.survey_store(self._store, keep)
        if kinds & {CleanupKind.CHECKPOINTS, CleanupKind.JUNK}:
            for store in related_stores:
                self._survey.survey_related_store(store)
            self._survey.resolve_unreadable_starts(self.protection)

    def iterate_entries(
        self, tally: PlanTally, progress: Progress = ignore_event
    ) -> Iterator[PlanEntry]:
        """Yield the objects to delete, in order. Those that are kept are counted."""
        planned: set[tuple[ObjectKind, str]] = set()
        prefix = find_common_prefix(rule.prefix for rule in self._matcher.rules)
        for stat in list_with_progress(self._store, prefix, progress):
            classified = classify_key(stat.key, self._survey.workers)
            if classified is not None and classified.kind in self._planners:
                unit = classified.kind, classified.scope
                if unit not in planned:
                    planned.add(unit)
                    yield from self._planners[classified.kind].iterate_entries(
                        classified.scope, tally
                    )
                continue
            rule_index = self._matcher.find_object_rule(stat, classified)
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
                reason = self.explain_object_protection(stat.key, classified)
            if reason:
                tally.kept[reason] += 1
            else:
                yield PlanEntry(stat, rule_index, junk=junk)

    def explain_object_protection(self, key: str, classified: ClassifiedKey | None) -> str:
        """Return why an object stays that is deleted by itself; empty if nothing protects it.

        Objects of a store below or above this one are Millrace's, so no rule for other objects
        takes them. Their own store knows their leases, and the rented machines that they belong to.

        Args:
            key: Key of the object.
            classified: Kind of the object in this store.
        """
        if classified is None and classify_nested_key(key) is not None:
            return "it belongs to a store of Millrace below this one: clean that store by its URL"
        if self._is_of_store_above(key, classified):
            return "it belongs to a store of Millrace above this one: clean that store by its URL"
        return self.protection.explain_protection(key, classified)

    def _is_of_store_above(self, key: str, classified: ClassifiedKey | None) -> bool:
        """Tell whether an object has a name of Millrace's with the path of this URL in front of it.

        So have all objects below the folder of a job, a dataset, a run, a campaign or a rental. An
        early update of a run looks like an object of Templar's there.
        """
        if not self._path or not (classified is None or classified.is_of_templar):
            return False
        found = classify_nested_key(f"{self._path}{key}")
        return found is not None and not found.is_of_templar

    def explain_junk_protection(self, key: str, junk: ClassifiedKey) -> str:
        """Return why a worker's junk stays: a pin, or a lease of its run or job; empty if none.

        A run's aggregators hold a lease for each version. `survey_stores` finds them.
        """
        if self.protection.is_pinned(key):
            return "it is pinned"
        versions = sorted(self._survey.versions.get(junk.scope, ()))
        scopes = (junk.scope, *(ChainKeys(junk.scope, version).job for version in versions))
        return next(
            (why for scope in scopes if (why := self.protection.describe_holder(scope))), ""
        )


def describe_rule(rule: Rule) -> str:
    """Return a rule in a few words: ``gradients, older than 2d, of version !=0.2.11``."""
    age = f"older than {write_duration(rule.older_than)}" if rule.older_than else "of any age"
    words = [" and ".join(rule.kinds), age]
    for text, value in (
        ("of version {}", rule.version),
        ("of {}", rule.name),
        ("beginning with {}", rule.prefix),
        ("ending with {}", rule.suffix),
        ("that match {}", rule.match),
        ("but for the last {}", rule.keep_last),
        ("but for every {}th", rule.keep_every),
    ):
        if value:
            words.append(text.format(value))
    return ", ".join(words)
