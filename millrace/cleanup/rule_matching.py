"""Find the rule that takes an object: the first that fits its kind, name, age and number."""

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
            if classified.is_of_templar and classified.number < 0 and not rule.version:
                return False  # `start_window` says when a version began, and is old while it runs
            if rule.keep_every and classified.number % rule.keep_every == 0:
                return False
            keep = rule.keep_last
            if classified.kind is ObjectKind.TEMPLAR_CHECKPOINT:
                keep = max(keep, 1)  # as of a job, the newest stays
            return not (keep and self.survey.is_among_newest(classified, keep))

        rule_index = find_rule(self.rules, kind, is_match)
        if kind is not CleanupKind.JUNK and not classified.is_of_templar:
            return rule_index
        # A rule for other objects takes junk too, and what Templar wrote.
        rule_indices = [
            one for one in (rule_index, self._find_foreign_rule(stat)) if one is not None
        ]
        return min(rule_indices, default=None)

    def find_step_rule(self, job: str, rank: int, step: int, stat: Stat) -> int | None:
        """Return the index of the first rule that takes a checkpoint.

        Args:
            job: Job of the checkpoint.
            rank: Index of the checkpoint among those of its job, from the newest.
            step: Step of the checkpoint.
            stat: Object of its metadata.
        """
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

    def _find_foreign_rule(self, stat: Stat) -> int | None:
        """Return the index of the first rule for objects that Millrace did not write."""
        return find_rule(
            self.rules, CleanupKind.OTHER, lambda rule: not rule.name and self._is_match(rule, stat)
        )

    def _is_match(self, rule: Rule, stat: Stat) -> bool:
        return (
            stat.key.startswith(rule.prefix)
            and stat.key.endswith(rule.suffix)
            and (not rule.match or fnmatchcase(stat.key, rule.match))
            and self._is_old(rule, stat)
        )

    def _is_old(self, rule: Rule, stat: Stat) -> bool:
        # The clock has a resolution of a second: an object written just now has no age.
        return not rule.older_than or stat.last_modified < self.now - rule.older_than
