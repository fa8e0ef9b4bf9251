"""Credentials, tried and reported."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace.audit import AccessVerdict, AuditReport, AuditSettings, Finding, Operation, audit
from tasks.reports import Markdown, bold, bullets, document, publish, table, write
from tasks.words import format_count


@task(cache_policy=NO_CACHE)
def audit_buckets(settings: AuditSettings) -> AuditReport:
    """Try every operation with every credential."""
    found = audit(settings)
    for one in found.wrong:
        get_run_logger().warning(
            "%s, to %s: %s is %s: %s",
            one.role, one.right, one.operation, one.verdict, one.sentence,
        )  # fmt: skip
    return found


@task(cache_policy=NO_CACHE)
def report_audit(found: AuditReport) -> None:
    """Leave a report that a person wants to read."""
    publish(describe(found), key="audited-access", description="Rights of each credential")


def describe(found: AuditReport) -> Markdown:
    """Return the report."""
    wrong = found.wrong
    good = write("all as they should be")
    verdict = write("**{} not as they should be**", len(wrong)) if wrong else good
    seen = {(one.role, one.right, one.operation): one for one in found.findings}
    pairs = dict.fromkeys((one.role, one.right) for one in found.findings)
    operations = [each for each in Operation if any(each is one.operation for one in seen.values())]
    rows = [
        (f"{role}, to {right}", *(_cell(seen.get((role, right, each))) for each in operations))
        for role, right in pairs
    ]
    refused = [
        (f"{one.role}, to {one.right}", one.operation, one.verdict, one.sentence) for one in wrong
    ]
    columns = ("credentials", "operation", "", "what the store said")
    return document(
        write("{} tried, {}.", format_count(len(found.findings), "operation"), verdict),
        table(("", *operations), rows),
        table(columns, refused) if refused else Markdown(),
        bullets(found.notes),
    )


def _cell(one: Finding | None) -> object:
    if one is None:
        return ""
    return str(one.seen) if one.verdict is AccessVerdict.RIGHT else bold(str(one.seen))
