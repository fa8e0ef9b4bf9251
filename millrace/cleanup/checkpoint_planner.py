"""Plan the deletion of a job's checkpoints, and of files that no checkpoint names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from millrace.checkpoints import RetentionPlan, RetentionSettings, VerifyDepth, plan_retention
from millrace.checkpoints.retention import Removal, apply_youngest_time, find_youngest_times
from millrace.cleanup.plans import PlanEntry, PlanTally
from millrace.cleanup.protection import ProtectionPolicy, collect_steps
from millrace.cleanup.rule_matching import RuleMatcher
from millrace.cleanup.rules import CleanupKind
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.kinds import classify_key
from millrace.storage import Stat, Store, list_objects

_ANY_AGE = datetime.max.replace(
    tzinfo=UTC
)  # for files that no checkpoint names: rules decide by age


@dataclass(frozen=True, slots=True)
class CheckpointPlanner:
    """Planner of the deletion of checkpoints, one job at a time.

    Attributes:
        store: Store to clean.
        matcher: Rules.
        protection: Policy that overrides the rules.
        check: Check of checkpoints.
    """

    store: Store
    matcher: RuleMatcher
    protection: ProtectionPolicy
    check: VerifyDepth

    def iterate_entries(self, job: str, tally: PlanTally) -> Iterator[PlanEntry]:
        """Yield the objects of a job's checkpoints to delete, in order."""
        keys = CheckpointKeys(job)
        for one, rule_index in self.plan_removals(job, tally):
            classified = classify_key(one.key)
            is_metadata = classified is not None and one.key == keys.make_metadata_key(
                classified.number
            )
            yield PlanEntry(one.stat, rule_index, 0 if is_metadata else 1)

    def plan_removals(self, job: str, tally: PlanTally) -> list[tuple[Removal, int]]:
        """Return the objects of a job's checkpoints to delete, in order, and the rule's index."""
        keys = CheckpointKeys(job)
        steps, youngest = self._list_steps(job)
        taken: dict[int, int] = {}
        needed: dict[int, str] = {}
        for rank, (step, stat) in enumerate(steps.items()):
            rule_index = self.matcher.find_step_rule(job, rank, step, stat)
            if rule_index is None:
                needed[step] = "no rule takes it"
            elif reason := self._explain_step_protection(keys, step):
                needed[step] = reason
                tally.kept[f"{job}: {reason}"] += 1
            else:
                taken[step] = rule_index
        if not taken and not self.matcher.has_rule(CleanupKind.CHECKPOINT_ORPHANS):
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
        metadata = {keys.make_metadata_key(step): taken[step] for step in plan.removed}
        shared = min(metadata.values(), default=None)  # a file may belong to several steps
        found = (
            (
                one,
                self.matcher.find_orphan_rule(
                    CleanupKind.CHECKPOINT_ORPHANS, apply_youngest_time(one.stat, youngest), job
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
        return {
            stat.key
            for stat in found
            if not self.matcher.is_new(apply_youngest_time(stat, youngest))
        }

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

    def _explain_step_protection(self, keys: CheckpointKeys, step: int) -> str:
        """Return why a step stays although a rule takes it; empty if nothing protects it.

        `plan_retention` protects further steps.
        """
        if self.protection.has_pins_below(keys.make_folder_prefix(step)):
            return "it is pinned"
        return self.matcher.survey.explain_step_protection(keys.job, step)
