"""Buckets that stay clean, and credentials that are proven."""

from millrace.housekeeping.access import (
    Audit,
    AuditSettings,
    Finding,
    Operation,
    Role,
    Verdict,
    audit,
)

__all__ = ["Audit", "AuditSettings", "Finding", "Operation", "Role", "Verdict", "audit"]
