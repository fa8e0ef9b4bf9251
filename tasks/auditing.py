"""Tasks that audit credentials and report the result."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace.audit import AccessVerdict, AuditReport, AuditSettings, Finding, Operation, audit
from tasks.formatting import format_count
from tasks.reports import (
    Markdown,
    format_bold,
    format_bullets,
    format_markdown,
    format_table,
    join_blocks,
    publish_report,
)


@task(cache_policy=NO_CACHE)
def audit_buckets(settings: AuditSettings) -> AuditReport:
    """Try every operation with every credential, and log the unexpected outcomes."""
    found = audit(settings)
    for one in found.failures:
        get_run_logger().warning(
            "%s, to %s: %s is %s: %s",
            one.role, one.right, one.operation, one.verdict, one.message,
        )  # fmt: skip
    return found


@task(cache_policy=NO_CACHE)
def report_audit(found: AuditReport) -> None:
    """Publish the report of the audit."""
    publish_report(
        describe_audit(found), key="audited-access", description="Rights of each credential"
    )


def describe_audit(found: AuditReport) -> Markdown:
    """Return the report of the audit."""
    wrong = found.failures
    good = format_markdown("all as they should be")
    verdict = format_markdown("**{} wrong or unproven**", len(wrong)) if wrong else good
    seen = {(one.role, one.right, one.operation): one for one in found.findings}
    pairs = dict.fromkeys((one.role, one.right) for one in found.findings)
    operations = [each for each in Operation if any(each is one.operation for one in seen.values())]
    rows = [
        (
            f"{role}, to {right}",
            *(_format_finding(seen.get((role, right, each))) for each in operations),
        )
        for role, right in pairs
    ]
    refused = [
        (f"{one.role}, to {one.right}", one.operation, one.verdict, one.message) for one in wrong
    ]
    columns = ("Credentials", "Operation", "Verdict", "Answer of the store")
    return join_blocks(
        format_markdown("{} tried, {}.", format_count(len(found.findings), "operation"), verdict),
        format_table(("Credentials", *operations), rows),
        format_table(columns, refused) if refused else Markdown(),
        format_bullets(found.notes),
    )


def _format_finding(one: Finding | None) -> object:
    if one is None:
        return ""
    return str(one.actual) if one.verdict is AccessVerdict.CORRECT else format_bold(str(one.actual))
