"""Prove the rights of credentials before a run depends on them."""

from millrace.audit.access import (
    AccessVerdict,
    AuditedRole,
    AuditReport,
    AuditSettings,
    Finding,
    Operation,
    audit,
)
from millrace.audit.check import check_access
from millrace.audit.outcomes import RequestOutcome
from millrace.audit.probing import ProbeResult, ProbeVerdict, check_checkpoint_destination, probe

__all__ = [
    "AccessVerdict",
    "AuditReport",
    "AuditSettings",
    "AuditedRole",
    "Finding",
    "Operation",
    "ProbeResult",
    "ProbeVerdict",
    "RequestOutcome",
    "audit",
    "check_access",
    "check_checkpoint_destination",
    "probe",
]
