"""Task and report of a copied bucket."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace.cleanup import (
    CopyOutcome,
    CopyResult,
    ObjectFilter,
    compare_objects,
    copy_objects,
    open_copy_target,
)
from millrace.errors import MillraceError
from millrace.storage import StoreSpec, open_store
from tasks.formatting import (
    format_count,
    format_duration,
    format_rate,
    format_size,
    make_artifact_key,
)
from tasks.progress import CopyProgress
from tasks.reports import (
    SHOWN_ROWS,
    Markdown,
    format_code,
    format_markdown,
    format_table,
    join_blocks,
    publish_report,
    tabulate_failures,
)
from tasks.retries import retried_task

_OUTCOMES = {
    CopyOutcome.COPIED: "Copied",
    CopyOutcome.MISSING: "Missing, or would be replaced",
    CopyOutcome.EQUAL: "Were there already",
    CopyOutcome.CONFLICT: "Differ, and stay",
}


@retried_task
def copy_bucket_objects(
    source: StoreSpec,
    destination: StoreSpec,
    objects: ObjectFilter,
    *,
    overwrite: bool,
    dry_run: bool,
) -> CopyResult:
    """Copy the objects of a store, or only compare. A second try continues after the first."""
    with CopyProgress(make_artifact_key("progress", "copy")) as progress:
        here = open_store(source, make_folder=False)
        if dry_run:
            return compare_objects(
                here, destination, objects, overwrite=overwrite, progress=progress
            )
        there = open_copy_target(here, destination, objects)
        return copy_objects(here, there, objects, overwrite=overwrite, progress=progress)


@task(cache_policy=NO_CACHE)
def report_copied_objects(found: CopyResult, *, dry_run: bool) -> None:
    """Publish the report of a copy."""
    publish_report(
        describe_copied_objects(found, dry_run=dry_run),
        key="copied-objects",
        description="Copied objects",
    )


def describe_copied_objects(found: CopyResult, *, dry_run: bool) -> Markdown:
    """Return the report of a copy.

    Args:
        found: Result of the copy.
        dry_run: Whether objects were only compared.
    """
    copied = CopyOutcome.MISSING if dry_run else CopyOutcome.COPIED
    size = found.sizes.get(copied, 0)
    rows = [
        (title, f"{found.objects[outcome]:,}", format_size(found.sizes.get(outcome, 0)))
        for outcome, title in _OUTCOMES.items()
        if found.objects.get(outcome)
    ]
    conflicts = [(format_code(key),) for key in found.conflicts]
    return join_blocks(
        format_markdown(
            "{} of {}, {}, {} {} in {}{}.",
            format_count(found.objects.get(copied, 0), "object"), format_code(found.source),
            format_size(size),
            format_markdown("**would be copied** to") if dry_run else "copied to",
            format_code(found.destination), format_duration(found.seconds),
            f", at {format_rate(size, found.seconds)}" if size and not dry_run else "",
        ),
        format_markdown(
            "The store has copied {} of them by itself.", format_size(found.by_store)
        )
        if found.by_store
        else Markdown(),
        format_table(("Objects", ">Number", ">Size"), rows) if rows else Markdown(),
        format_table(("Object that differs, and stays",), conflicts, SHOWN_ROWS)
        if conflicts
        else Markdown(),
        tabulate_failures(found.failures),
        format_table(
            ("Not copied", "Reason"),
            [(format_code(one.key), one.reason) for one in found.skipped],
            SHOWN_ROWS,
        )
        if found.skipped
        else Markdown(),
    )  # fmt: skip


def raise_copy_failures(found: CopyResult) -> None:
    """Fail a run that could not copy all objects.

    Raises:
        MillraceError: Objects differ, or could not be copied.
    """
    conflicts = found.objects[CopyOutcome.CONFLICT]
    if conflicts or found.failed:
        raise MillraceError(
            f"{format_count(conflicts, 'object')} of {found.destination} differ from the source, "
            f"and {format_count(found.failed, 'object')} could not be copied. All others are "
            "there. The report names them; turn `overwrite` on to replace those that differ."
        )
