"""Plan the deletion of whole datasets, and of objects that a complete dataset does not name."""

from collections.abc import Iterator
from dataclasses import dataclass

from millrace import errors
from millrace.cleanup.plans import PlanEntry, PlanTally
from millrace.cleanup.protection import ProtectionPolicy
from millrace.cleanup.rule_matching import RuleMatcher
from millrace.cleanup.rules import CleanupKind
from millrace.dataset_ledger import find_referenced_keys
from millrace.keys.datasets import DatasetKeys
from millrace.keys.kinds import classify_key
from millrace.keys.leases import make_lease_prefix
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan, Manifest
from millrace.storage import Stat, Store, exists, list_objects


@dataclass(frozen=True, slots=True)
class DatasetPlanner:
    """Planner of the deletion of datasets, one at a time.

    Attributes:
        store: Store to clean.
        matcher: Rules.
        protection: Policy that overrides the rules.
    """

    store: Store
    matcher: RuleMatcher
    protection: ProtectionPolicy

    def iterate_entries(self, dataset: str, tally: PlanTally) -> Iterator[PlanEntry]:
        """Yield the objects of a dataset to delete, phase by phase, or its orphans."""
        keys = DatasetKeys(dataset)
        rule_index = self.matcher.find_dataset_rule(
            dataset, lambda: (stat for _, stat in self._iterate_phases(keys))
        )
        has_orphan_rule = self.matcher.has_rule(CleanupKind.DATASET_ORPHANS)
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
            elif self.protection.has_pins_below(f"{dataset}/"):
                tally.kept["it is pinned"] += 1
            else:
                for phase, stat in self._iterate_phases(keys):
                    yield PlanEntry(stat, rule_index, phase)
                return
        if has_orphan_rule:
            yield from self._iterate_orphans(keys, plan, tally)

    def explain_change(self, dataset: str) -> str:
        """Return why a dataset of a plan stays now: a run has continued it; empty if none has."""
        new = any(
            self.matcher.is_new(stat) for _, stat in self._iterate_phases(DatasetKeys(dataset))
        )
        return "a run has continued it since the plan was made" if new else ""

    def list_referenced_keys(self, dataset: str) -> set[str]:
        """Return the keys that the records of a dataset name now."""
        keys = DatasetKeys(dataset)
        try:
            return find_referenced_keys(self.store, keys, fetch(self.store, keys.plan, DatasetPlan))
        except errors.NotFoundError:
            return set()  # without a plan, no record names a key

    def _iterate_phases(self, keys: DatasetKeys) -> Iterator[tuple[int, Stat]]:
        """Yield the objects of a dataset with their phases.

        In each phase, no remaining record names a deleted object. Without the record of a card, a
        ``README.md`` is a user's, as is each object in a folder of the dataset without one of its
        names.
        """
        readme = [keys.readme] if exists(self.store, keys.card) else []
        for phase, prefixes in enumerate(
            (
                # Without them, the dataset is not complete.
                (keys.manifest, keys.index, keys.block_digests, *readme),
                (keys.commits,),  # without them, a run makes each shard again
                (
                    keys.shards,
                    keys.quarantined,
                    keys.partition_notes,
                    keys.transforms,
                    make_lease_prefix(keys.dataset),
                ),
                (keys.plan, keys.plan_removed, keys.card),
            ),
            start=1,
        ):
            for prefix in prefixes:
                for stat in list_objects(self.store, prefix):
                    if (prefix.endswith("/") or stat.key == prefix) and keys.is_own(stat.key):
                        yield phase, stat

    def _iterate_orphans(
        self, keys: DatasetKeys, plan: DatasetPlan, tally: PlanTally
    ) -> Iterator[PlanEntry]:
        """Yield the objects that the ledger of a complete dataset does not name.

        An incomplete dataset has none: its run may continue. An object without a name of the
        dataset is a user's.
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
        for prefix in (keys.shards, keys.quarantined, keys.partition_notes, keys.transforms):
            for stat in list_objects(self.store, prefix, exact=True):
                if not keys.is_own(stat.key):
                    continue
                rule_index = self.matcher.find_orphan_rule(
                    CleanupKind.DATASET_ORPHANS, stat, keys.dataset
                )
                if stat.key in names or rule_index is None or keys.is_index(stat.key):
                    continue
                reason = self.protection.explain_protection(stat.key, classify_key(stat.key))
                if reason:
                    tally.kept[reason] += 1
                else:
                    yield PlanEntry(stat, rule_index)
