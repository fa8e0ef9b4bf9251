"""Delete what nobody needs from buckets, by rules and after a plan was shown."""

from millrace.checkpoints import VerifyDepth
from millrace.cleanup.copy_result import CopyOutcome, CopyResult
from millrace.cleanup.copying import compare_objects, copy_objects, open_copy_target
from millrace.cleanup.executor import CleanupResult, execute
from millrace.cleanup.planner import describe_rule, make_plan
from millrace.cleanup.plans import (
    CleanupPlan,
    WorkerJunk,
    estimate_monthly_cost,
    read_first_keys,
    read_plan,
)
from millrace.cleanup.rules import (
    Age,
    CleanupBucketPreset,
    CleanupKind,
    CleanupSettings,
    CleanVersionsPreset,
    DeleteGatherPreset,
    Rule,
    S3ManagerPreset,
)
from millrace.cleanup.stale_uploads import abort_uploads, find_stale_uploads
from millrace.cleanup.usage import (
    ObjectFilter,
    StoreUsage,
    UsageGroup,
    limit_groups,
    measure_usage,
)
from millrace.cleanup.wiping import StoreContents, make_confirmation, plan_wipe, survey_wipe, wipe
from millrace.deletion import StaleUpload, StaleUploads

__all__ = [
    "Age",
    "CleanVersionsPreset",
    "CleanupBucketPreset",
    "CleanupKind",
    "CleanupPlan",
    "CleanupResult",
    "CleanupSettings",
    "CopyOutcome",
    "CopyResult",
    "DeleteGatherPreset",
    "ObjectFilter",
    "Rule",
    "S3ManagerPreset",
    "StaleUpload",
    "StaleUploads",
    "StoreContents",
    "StoreUsage",
    "UsageGroup",
    "VerifyDepth",
    "WorkerJunk",
    "abort_uploads",
    "compare_objects",
    "copy_objects",
    "describe_rule",
    "estimate_monthly_cost",
    "execute",
    "find_stale_uploads",
    "limit_groups",
    "make_confirmation",
    "make_plan",
    "measure_usage",
    "open_copy_target",
    "plan_wipe",
    "read_first_keys",
    "read_plan",
    "survey_wipe",
    "wipe",
]
