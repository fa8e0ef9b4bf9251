"""Delete what nobody needs from buckets, by rules and after a plan was shown."""

from millrace.checkpoints import VerifyDepth
from millrace.cleanup.executor import Cleaned, execute
from millrace.cleanup.planner import describe, make_plan
from millrace.cleanup.plans import (
    CleaningPlan,
    WorkerJunk,
    first_keys,
    read_plan,
    saved_a_month,
)
from millrace.cleanup.rules import (
    Age,
    CleanSettings,
    CleanupBucket,
    CleanVersions,
    DeleteGather,
    Rule,
    S3Manager,
    What,
)
from millrace.cleanup.stale_uploads import Aborted, abort_uploads
from millrace.cleanup.wiping import Contents, name_to_type, plan_wiping, survey_wiping, wipe

__all__ = [
    "Aborted",
    "Age",
    "CleanSettings",
    "CleanVersions",
    "Cleaned",
    "CleaningPlan",
    "CleanupBucket",
    "Contents",
    "DeleteGather",
    "Rule",
    "S3Manager",
    "VerifyDepth",
    "What",
    "WorkerJunk",
    "abort_uploads",
    "describe",
    "execute",
    "first_keys",
    "make_plan",
    "name_to_type",
    "plan_wiping",
    "read_plan",
    "saved_a_month",
    "survey_wiping",
    "wipe",
]
