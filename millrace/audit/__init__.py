"""Prove what the credentials of a bucket can and cannot do."""

from millrace.audit.access import (
    AccessVerdict,
    AuditedRole,
    AuditReport,
    AuditSettings,
    Finding,
    Operation,
    audit,
)

__all__ = [
    "AccessVerdict",
    "AuditReport",
    "AuditSettings",
    "AuditedRole",
    "Finding",
    "Operation",
    "audit",
]
