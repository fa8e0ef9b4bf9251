"""Buckets that stay clean, and credentials that are proven."""

from millrace.checkpoints import VerifyDepth
from millrace.housekeeping.access import (
    AccessVerdict,
    AuditedRole,
    AuditReport,
    AuditSettings,
    Finding,
    Operation,
    audit,
)
from millrace.housekeeping.executing import Cleaned, execute
from millrace.housekeeping.planning import describe, make_plan
from millrace.housekeeping.plans import (
    CleaningPlan,
    WorkerJunk,
    first_keys,
    read_plan,
    saved_a_month,
)
from millrace.housekeeping.rules import (
    Age,
    CleanSettings,
    CleanupBucket,
    CleanVersions,
    DeleteGather,
    Rule,
    S3Manager,
    What,
)
from millrace.housekeeping.uploads import Aborted, abort_uploads
from millrace.housekeeping.wiping import Contents, name_to_type, plan_wiping, survey_wiping, wipe

__all__ = [
    "Aborted",
    "AccessVerdict",
    "Age",
    "AuditReport",
    "AuditSettings",
    "AuditedRole",
    "CleanSettings",
    "CleanVersions",
    "Cleaned",
    "CleaningPlan",
    "CleanupBucket",
    "Contents",
    "DeleteGather",
    "Finding",
    "Operation",
    "Rule",
    "S3Manager",
    "VerifyDepth",
    "What",
    "WorkerJunk",
    "abort_uploads",
    "audit",
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
