"""The digest of a plan, which ties the commits of a dataset to the plan."""

from collections.abc import Iterable

from millrace import errors
from millrace.digest import compute_stream_digest
from millrace.records import iterate_canonical_json
from millrace.schemas.dataset import DatasetPlan, PartitionEnd, ShardCommit


def compute_plan_digest(plan: DatasetPlan) -> str:
    """Return the digest of a plan. Each commit by the plan contains the digest."""
    return compute_stream_digest(iterate_canonical_json(plan))[0]


def check_plan_digest(records: Iterable[ShardCommit | PartitionEnd], plan_digest: str) -> None:
    """Refuse records that were made by another plan.

    Raises:
        ConflictError: A run with a replaced plan has committed after the replacement.
    """
    for record in records:
        if record.plan_digest != plan_digest:
            raise errors.ConflictError(
                f"{record.partition} has a commit of another plan: a run that began before "
                "the plan was replaced was still working. Shard the source under another name."
            )
