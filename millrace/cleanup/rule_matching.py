"""Find the rule that takes an object: the first that fits its kind, name and age.

A rule keeps windows and steps (`Rule.keep_last`, `Rule.keep_every`) from all rules after it, too,
and at any age: ten windows to keep are the ten newest ones, of which most are young. The age itself
is a condition like a name. A rule does not fit a younger object, so a later rule may take it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from millrace.cleanup.protection import BucketSurvey
from millrace.cleanup.rules import (
    KINDS_OF_SINGLE_OBJECTS,
    CleanupKind,
    Rule,
    find_rule,
    is_version_in,
)
from millrace.keys.kinds import ClassifiedKey, ObjectKind
from millrace.storage import Stat

_RESOLUTION = timedelta(seconds=2)  # of the store's clock, as we read it


@dataclass(frozen=True, slots=True)
class RuleMatcher:
    """Rules, and the facts that they are compared with. Each method returns an index of a rule.

    Attributes:
        rules: Rules in order.
        now: Time of the plan by the store's clock.
        survey: Facts about all objects, for rules that keep the newest ones.
    """

    rules: tuple[Rule, ...]
    now: datetime
    survey: BucketSurvey

    def has_rule(self, kind: CleanupKind) -> bool:
        """Decide whether any rule is for this kind of object."""
        return any(kind in rule.kinds for rule in self.rules)

    def is_new(self, stat: Stat) -> bool:
        """Decide whether an object was written after the time of the plan."""
        return stat.last_modified > self.now + _RESOLUTION

    def find_object_rule(self, stat: Stat, classified: ClassifiedKey | None) -> int | None:
        """Return the index of the rule that takes an object that is deleted by itself.

        The first rule decides that takes the object, or that keeps its window or step.
        """
        kind = KINDS_OF_SINGLE_OBJECTS.get(classified.kind) if classified else None
        # A rule for other objects takes junk too, and what Templar wrote.
        is_other = classified is None or kind is CleanupKind.JUNK or classified.is_of_templar
        for index, rule in enumerate(self.rules):
            if not self._includes(rule, stat):
                continue
            is_for_other = CleanupKind.OTHER in rule.kinds and not rule.name
            if is_other and is_for_other and self._is_old(rule, stat):
                return index
            if classified is None or kind not in rule.kinds or not _is_named(rule, classified):
                continue
            if self._keeps_object(rule, classified):
                return None
            if self._is_old(rule, stat) and not self._is_newest_of_templar(classified):
                return index
        return None

    def find_step_rule(self, job: str, rank: int, step: int, stat: Stat) -> int | None:
        """Return the index of the rule that takes a checkpoint.

        The first rule decides that takes the checkpoint, or that keeps its step.

        Args:
            job: Job of the checkpoint.
            rank: Index of the checkpoint among those of its job, from the newest.
            step: Step of the checkpoint.
            stat: Object of its metadata.
        """
        for index, rule in enumerate(self.rules):
            if (
                CleanupKind.CHECKPOINTS not in rule.kinds
                or rule.name not in {"", job}
                or not self._includes(rule, stat)
            ):
                continue
            if rank < rule.keep_last or _is_multiple(step, rule.keep_every):
                return None
            if self._is_old(rule, stat):
                return index
        return None

    def find_orphan_rule(self, kind: CleanupKind, stat: Stat, name: str) -> int | None:
        """Return the index of the first rule that takes an object of a job's or a dataset's."""
        return find_rule(
            self.rules, kind, lambda rule: self._is_match(rule, stat) and rule.name in {"", name}
        )

    def find_dataset_rule(
        self, dataset: str, iterate_objects: Callable[[], Iterable[Stat]]
    ) -> int | None:
        """Return the index of the first rule that takes a dataset, by its youngest object.

        Args:
            dataset: Path of the dataset.
            iterate_objects: Function that lists the objects of the dataset. Called for each rule
                that fits its name and its prefix.
        """
        folder = f"{dataset}/"
        return find_rule(
            self.rules,
            CleanupKind.DATASETS,
            lambda rule: (
                rule.name in {"", dataset}
                and folder.startswith(rule.prefix)
                and all(self._is_old(rule, stat) for stat in iterate_objects())
            ),
        )

    def _keeps_object(self, rule: Rule, classified: ClassifiedKey) -> bool:
        """Decide whether a rule keeps the window or step of an object."""
        return _is_multiple(classified.number, rule.keep_every) or bool(
            rule.keep_last and self.survey.is_among_newest(classified, rule.keep_last)
        )

    def _is_newest_of_templar(self, classified: ClassifiedKey) -> bool:
        """Decide whether an object is the newest checkpoint of Templar, which stays as a job's."""
        return classified.kind is ObjectKind.TEMPLAR_CHECKPOINT and self.survey.is_among_newest(
            classified, 1
        )

    def _is_match(self, rule: Rule, stat: Stat) -> bool:
        return self._includes(rule, stat) and self._is_old(rule, stat)

    @staticmethod
    def _includes(rule: Rule, stat: Stat) -> bool:
        """Decide whether a key meets the conditions of a rule for keys."""
        return (
            stat.key.startswith(rule.prefix)
            and stat.key.endswith(rule.suffix)
            and (not rule.match or fnmatchcase(stat.key, rule.match))
        )

    def _is_old(self, rule: Rule, stat: Stat) -> bool:
        # The clock has a resolution of a second: an object written just now has no age.
        return not rule.older_than or stat.last_modified < self.now - rule.older_than


def _is_named(rule: Rule, classified: ClassifiedKey) -> bool:
    """Decide whether an object is of the run, the job and the version of a rule."""
    if rule.version:
        is_of_version = is_version_in(classified.version, rule.version)
    else:
        # `start_window` says when a version began, and is old while the version runs.
        is_of_version = not (classified.is_of_templar and classified.number < 0)
    return is_of_version and rule.name in {"", classified.scope}


def _is_multiple(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0
