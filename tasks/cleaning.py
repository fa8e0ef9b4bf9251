"""Tasks that plan, execute and report the cleaning of buckets."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from blocks import Bucket
from millrace import cleanup
from millrace.cleanup import (
    CleanupPlan,
    CleanupResult,
    CleanupSettings,
    Rule,
    StaleUploads,
    StoreContents,
    WorkerJunk,
    abort_uploads,
    describe_rule,
    estimate_monthly_cost,
    execute,
    find_stale_uploads,
    make_plan,
    plan_wipe,
    read_first_keys,
    read_plan,
)
from millrace.cleanup.wiping import delete_plan
from millrace.errors import ConfigurationError, MillraceError, format_error
from millrace.storage import ObjectFailure, Right, StoreSpec, VersionCount, open_store
from tasks.formatting import format_count, format_duration, format_size, make_artifact_key
from tasks.locations import find_location, make_store_spec, skip_run
from tasks.progress import CleaningProgress
from tasks.reports import (
    SHOWN_ROWS,
    Markdown,
    format_bold,
    format_code,
    format_markdown,
    format_table,
    join,
    join_blocks,
    publish_report,
    tabulate_failures,
)
from tasks.retries import retried_task


def clean_with_rules(
    bucket: Bucket | str,
    rules: Iterable[Rule],
    *,
    related_buckets: Iterable[Bucket | str] = (),
    pins: Iterable[str] = (),
    dry_run: bool,
    plan: str = "",
    verify_depth: cleanup.VerifyDepth = cleanup.VerifyDepth.DIGESTS,
) -> CleanupResult | CleanupPlan | None:
    """Clean a bucket by rules. All flows that clean by rules call this function.

    Args:
        bucket: Bucket to clean: a block, its name, or the URL of a folder.
        rules: Rules that select the objects to delete.
        related_buckets: Other buckets with leases of the same runs.
        pins: Keys and folders that are never deleted.
        dry_run: Only make the plan.
        plan: Name of an earlier plan to execute.
        verify_depth: Depth of the verification of a checkpoint.

    Returns:
        The plan of a dry run, otherwise the result; None if the bucket has no block yet.

    Raises:
        ConfigurationError: A related bucket has no block, or the bucket has none and the run may
            not skip its work (`skip_run`).
        MillraceError: Some objects could not be deleted. The report names the objects.
    """
    names = (bucket, *related_buckets)
    locations = [find_location(name) for name in names]
    missing = [name for name, location in zip(names, locations, strict=True) if location is None]
    if missing and locations[0] is not None:
        raise ConfigurationError(
            f"There is no Millrace Bucket block {missing[0]} (`related_buckets`), whose leases "
            "protect objects here, so nothing was deleted. Make the block with `millrace setup`, "
            "correct the name, or set `related_buckets: []` if no other bucket belongs to these "
            "runs."
        )
    if missing:
        return skip_run(  # pyright: ignore[reportReturnType] - Prefect's way
            missing, "nothing was looked at, and nothing deleted"
        )
    store, *others = [
        make_store_spec(location, Right.READ if number else Right.WRITE)
        for number, location in enumerate(locations)
        if location is not None
    ]
    settings = CleanupSettings(
        store=store,
        related_stores=tuple(others),
        rules=tuple(rules),
        pins=tuple(pins),
        check=verify_depth,
    )
    made = load_plan(store, plan) if plan else plan_cleaning(settings)
    if dry_run:
        report_plan(made, read_first_keys(open_store(store), made.name, SHOWN_ROWS))
        return made
    done = execute_plan(settings, made)
    report_cleaning(made, done)
    raise_failures(store.url, done.failures, has_given_up=done.has_given_up)
    return done


def raise_bucket_errors(faults: Mapping[str, MillraceError]) -> None:
    """Fail a run because of errors of some of its buckets.

    Args:
        faults: Error of each bucket, by its URL or name.

    Raises:
        MillraceError: There is an error. Of several, the message has each.
    """
    if len(faults) == 1:
        raise next(iter(faults.values()))
    if faults:
        sentences = " ".join(f"{name}: {format_error(error)}" for name, error in faults.items())
        raise MillraceError(f"{len(faults)} buckets failed. {sentences}")


def raise_failures(
    url: str, failures: tuple[ObjectFailure, ...], *, has_given_up: bool = False
) -> None:
    """Fail a run that could not delete all objects.

    Args:
        url: URL of the objects.
        failures: Objects that could not be deleted.
        has_given_up: Whether too many failures ended the deletion.

    Raises:
        MillraceError: Objects could not be deleted.
    """
    if failures:
        first = "; ".join(f"{one.key}: {one.reason}" for one in failures[:3])
        others = "were not all tried" if has_given_up else "were deleted"
        raise MillraceError(
            f"{format_count(len(failures), 'object')} of {url} could not be deleted ({first}). "
            f"The other objects {others}. Correct the causes in the report, and run it again."
        )


@retried_task
def plan_cleaning(settings: CleanupSettings) -> CleanupPlan:
    """Find the objects that the rules take. Deletes nothing."""
    with CleaningProgress(make_artifact_key("progress", "cleaning", "plan")) as progress:
        made = make_plan(settings, progress=progress)
    _log_plan(made)
    return made


@retried_task
def load_plan(spec: StoreSpec, name: str) -> CleanupPlan:
    """Return an earlier plan."""
    return read_plan(open_store(spec, make_folder=False), name)


@retried_task
def execute_plan(settings: CleanupSettings, plan: CleanupPlan) -> CleanupResult:
    """Delete the objects of a plan. A second try continues after the first."""
    with CleaningProgress(make_artifact_key("progress", "cleaning"), plan.objects) as progress:
        return execute(settings, plan.name, progress=progress)


@retried_task
def make_wipe_plan(spec: StoreSpec) -> CleanupPlan:
    """Plan the deletion of all objects of a store. Deletes nothing."""
    with CleaningProgress(make_artifact_key("progress", "wiping", "plan")) as progress:
        made = plan_wipe(spec, progress=progress)
    _log_plan(made)
    return made


@retried_task
def survey_bucket(spec: StoreSpec) -> StoreContents:
    """Count the objects that a wipe would delete. Writes nothing."""
    with CleaningProgress(make_artifact_key("progress", "wiping", "survey")) as progress:
        return cleanup.survey_wipe(spec, progress=progress)


@task(cache_policy=NO_CACHE)
def execute_wipe(
    spec: StoreSpec, plan: CleanupPlan, confirm: str, *, versions: bool
) -> CleanupResult:
    """Delete the objects of a wipe's plan if the typed name is that of the bucket."""
    with CleaningProgress(make_artifact_key("progress", "wiping"), plan.objects) as progress:
        return cleanup.wipe(spec, plan.name, confirm=confirm, versions=versions, progress=progress)


@retried_task
def delete_wipe_plan(spec: StoreSpec, plan: CleanupPlan) -> None:
    """Delete the plan of a wipe that nobody has confirmed."""
    delete_plan(open_store(spec, make_folder=False), plan.name)


@retried_task
def abort_stale_uploads(spec: StoreSpec, older_than: cleanup.Age, *, dry_run: bool) -> StaleUploads:
    """Find unfinished uploads, and abort the uploads unless ``dry_run`` is true."""
    found = find_stale_uploads(spec, older_than=older_than)
    return found if dry_run else abort_uploads(spec, found)


@task(cache_policy=NO_CACHE)
def report_plan(plan: CleanupPlan, keys: list[tuple[str, int]]) -> None:
    """Publish the plan of a dry run as a report."""
    text = describe_plan(plan, keys)
    publish_report(text, key="cleaning", description="Objects that would be deleted")


@task(cache_policy=NO_CACHE)
def report_contents(found: StoreContents) -> None:
    """Publish the objects that a wipe would delete."""
    text = join_blocks(
        format_markdown(
            "**Nothing was deleted.** {} holds {}, {}{}.",
            format_code(found.url), format_count(found.objects, "object"), format_size(found.size),
            describe_versions(found.versions),
        ),
        format_markdown(
            "Older versions and delete markers stay, and are billed, unless `delete_versions` is "
            "on."
        )
        if found.versions
        else Markdown(),
        format_table(
            ("No object, and stays", "Reason"),
            [(format_code(one.key), one.reason) for one in found.unlisted],
            SHOWN_ROWS,
        )
        if found.unlisted
        else Markdown(),
    )  # fmt: skip
    publish_report(text, key="cleaning", description="Objects that would be deleted")


def describe_versions(found: VersionCount | None) -> str:
    """Describe the older versions and delete markers of a bucket; empty if there are none."""
    if found is None:
        return " (these credentials may not list older versions)"
    if not found:
        return ""
    older, markers = (
        format_count(found.versions, "older version"),
        format_count(found.markers, "delete marker"),
    )
    return f", and beside them {older} ({format_size(found.size)}) and {markers}"


@task(cache_policy=NO_CACHE)
def report_cleaning(plan: CleanupPlan, done: CleanupResult) -> None:
    """Publish the report of an executed plan."""
    text = describe_cleaning(plan, done)
    publish_report(text, key="cleaning", description="Deleted objects")


@task(cache_policy=NO_CACHE)
def report_uploads(found: Mapping[str, StaleUploads], faults: Mapping[str, str]) -> None:
    """Publish the report of the unfinished uploads.

    Args:
        found: Uploads of each bucket, by its URL.
        faults: Errors of other buckets, by their URLs or names.
    """
    text = describe_uploads(found, faults)
    publish_report(text, key="unfinished-uploads", description="Unfinished uploads")


def describe_plan(plan: CleanupPlan, keys: list[tuple[str, int]]) -> Markdown:
    """Return the report of a plan that was not executed."""
    rows: list[Sequence[object]] = [
        (format_code(key), format_size(bytes_of)) for key, bytes_of in keys
    ]
    if rows and plan.objects > len(rows):
        rows.append(
            (
                format_markdown(
                    "and {:,} more, in {}", plan.objects - len(rows), format_code(plan.key)
                ),
                "",
            )
        )
    return join_blocks(
        format_markdown(
            "**Nothing was deleted.** Plan {} of {} would delete {}, {}, which saves ${:,.2f} a "
            "month at R2's prices.",
            format_code(plan.name), format_code(plan.header.store),
            format_count(plan.objects, "object"), format_size(plan.size),
            estimate_monthly_cost(plan.size),
        ),
        _tabulate_rules(plan.header.rules, plan.totals.objects, plan.totals.size),
        _tabulate_junk(plan.totals.junk),
        _tabulate_kept(plan.totals.kept),
        _list_unmatched_pins(plan.totals.unmatched_pins),
        format_table(("Object", ">Size"), rows) if rows else Markdown(),
        format_markdown(
            "Execute this very plan with `plan` = {} and `dry_run` off.", format_code(plan.name)
        ),
    )  # fmt: skip


def describe_cleaning(plan: CleanupPlan, done: CleanupResult) -> Markdown:
    """Return the report of an executed plan."""
    errors = (
        format_bold(format_count(len(done.failures), "error")) if done.failures else "no errors"
    )
    sentences = [
        format_markdown(
            "{}: {} deleted, {}, in {}, {}. That saves ${:,.2f} a month at R2's prices. Plan {}.",
            format_code(plan.header.store), format_count(done.deleted_objects, "object"),
            format_size(done.deleted_bytes), format_duration(done.seconds), errors,
            estimate_monthly_cost(done.deleted_bytes), format_code(done.plan),
        )
    ]  # fmt: skip
    if done.versions:
        remaining = describe_versions(done.versions).removeprefix(", and beside them ")
        sentences.append(
            format_markdown("{} are left, and billed: `delete_versions` deletes them.", remaining)
        )
    gone = format_markdown(
        "{} of the plan were gone already.", format_count(done.missing, "object")
    )
    given_up = format_markdown(
        "Too many objects could not be deleted, so the others were not tried."
    )
    return join_blocks(
        join(sentences, " "),
        _tabulate_rules(plan.header.rules, done.objects, done.size),
        _tabulate_junk(done.junk),
        _tabulate_kept(Counter(plan.totals.kept) + Counter(done.skipped)),
        _list_unmatched_pins(plan.totals.unmatched_pins),
        gone if done.missing else Markdown(),
        tabulate_failures(done.failures),
        given_up if done.has_given_up else Markdown(),
    )


def describe_uploads(found: Mapping[str, StaleUploads], faults: Mapping[str, str]) -> Markdown:
    """Return the report of unfinished uploads.

    Args:
        found: Uploads of each bucket, by its URL.
        faults: Errors of other buckets, by their URLs or names.
    """
    aborted = any(one.is_aborted for one in found.values())
    whole = sum(one.size for one in found.values())
    done = sum(len(one.successes) for one in found.values())
    rows = [
        (format_code(url), len(one.uploads), format_size(one.size), one.recent, len(one.failures))
        for url, one in found.items()
    ]
    return join_blocks(
        format_markdown(
            "{} {}: {}, which cost ${:,.2f} a month at R2's prices.",
            format_count(done, "unfinished upload"),
            "aborted" if aborted else format_markdown("found; **nothing was aborted**"),
            format_size(whole),
            estimate_monthly_cost(whole),
        ),
        format_table(("Location", ">Uploads", ">Size", ">Younger uploads", ">Errors"), rows)
        if rows
        else Markdown(),
        format_table(
            ("Bucket that failed", "Error"),
            [(format_code(name), error) for name, error in faults.items()],
        )
        if faults
        else Markdown(),
        tabulate_failures(tuple(failure for one in found.values() for failure in one.failures)),
    )


def _log_plan(plan: CleanupPlan) -> None:
    get_run_logger().info(
        "Plan %s of %s: %s, %s",
        plan.name, plan.header.store, format_count(plan.objects, "object"), format_size(plan.size),
    )  # fmt: skip


def _tabulate_rules(
    rules: tuple[Rule, ...], objects: Mapping[int, int], sizes: Mapping[int, int]
) -> Markdown:
    if not rules:
        return Markdown()
    rows = [
        (
            describe_rule(rule), f"{objects.get(number, 0):,}", format_size(sizes.get(number, 0)),
            f"${estimate_monthly_cost(sizes.get(number, 0)):,.2f}",
        )
        for number, rule in enumerate(rules)
    ]  # fmt: skip
    return format_table(("Rule", ">Objects", ">Size", ">Saves a month"), rows)


def _tabulate_kept(kept: Mapping[str, int]) -> Markdown:
    rows = [(why, f"{number:,}") for why, number in sorted(kept.items())]
    columns = ("Objects that stay although a rule selects them, because", ">Objects")
    return format_table(columns, rows, SHOWN_ROWS) if rows else Markdown()


def _list_unmatched_pins(pins: Sequence[str]) -> Markdown:
    rows = [(format_code(pin),) for pin in pins]
    columns = ("Pin that protects nothing, as there is no object of its name",)
    return format_table(columns, rows, SHOWN_ROWS) if rows else Markdown()


def _tabulate_junk(junk: Sequence[WorkerJunk]) -> Markdown:
    rows = [
        (format_code(one.worker), format_code(one.scope), f"{one.objects:,}", format_size(one.size))
        for one in junk
    ]
    columns = ("Worker whose junk is deleted", "Run or job", ">Objects", ">Size")
    return format_table(columns, rows, SHOWN_ROWS) if rows else Markdown()
