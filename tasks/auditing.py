"""Credentials, tried and reported."""

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from millrace.housekeeping import Audit, AuditSettings, Finding, Operation, Verdict, audit
from tasks.words import count


@task(cache_policy=NO_CACHE)
def audit_buckets(settings: AuditSettings) -> Audit:
    """Try every operation with every credential."""
    found = audit(settings)
    for one in found.wrong:
        get_run_logger().warning(
            "%s, to %s: %s is %s: %s",
            one.role, one.right, one.operation, one.verdict, one.sentence,
        )  # fmt: skip
    return found


@task(cache_policy=NO_CACHE)
def report_audit(found: Audit) -> None:
    """Leave a report that a person wants to read."""
    create_markdown_artifact(
        describe(found), key="audited-access", description="What each credential can do"
    )


def describe(found: Audit) -> str:
    """The report, as Markdown."""
    wrong = found.wrong
    tried = count(len(found.findings), "operation")
    verdict = f"**{len(wrong)} not as they should be**" if wrong else "all as they should be"
    seen = {(one.role, one.right, one.operation): one for one in found.findings}
    pairs = dict.fromkeys((one.role, one.right) for one in found.findings)
    operations = [each for each in Operation if any(each is one.operation for one in seen.values())]
    lines = [
        f"{tried} tried, {verdict}.",
        "",
        f"| | {' | '.join(operations)} |",
        f"|---|{'---|' * len(operations)}",
    ]
    for role, right in pairs:
        cells = [_cell(seen.get((role, right, operation))) for operation in operations]
        lines.append(f"| {role}, to {right} | {' | '.join(cells)} |")
    if wrong:
        lines += ["", "| credentials | operation | | what the store said |", "|---|---|---|---|"]
        lines += [
            f"| {one.role}, to {one.right} | {one.operation} | {one.verdict} | "
            f"{one.sentence.replace('|', '&#124;')} |"
            for one in wrong
        ]
    lines += ["", *(f"- {note}" for note in found.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _cell(one: Finding | None) -> str:
    if one is None:
        return ""
    return f"{one.seen}" if one.verdict is Verdict.RIGHT else f"**{one.seen}**"
