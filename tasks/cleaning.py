"""Buckets cleaned: planned, executed, reported."""

from collections.abc import Iterable, Mapping, Sequence

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from blocks import Bucket
from millrace import cleanup
from millrace.cleanup import (
    Aborted,
    Cleaned,
    CleaningPlan,
    CleanSettings,
    Contents,
    Rule,
    WorkerJunk,
    abort_uploads,
    describe,
    execute,
    first_keys,
    make_plan,
    plan_wiping,
    read_plan,
    saved_a_month,
)
from millrace.errors import MillraceError
from millrace.storage import DeleteFailure, Right, StoreSpec, VersionCount, open_store
from tasks.places import known, named_bucket, skipped, spec_of
from tasks.progress import CleaningProgress
from tasks.reports import Markdown, bold, code, document, join, publish, table, write
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, duration, format_count, size

_SHOWN = 50  # keys and errors in a report


def clean_by(
    bucket: Bucket | str,
    rules: Iterable[Rule],
    *,
    beside: Iterable[Bucket | str] = (),
    pinned: Iterable[str] = (),
    dry_run: bool,
    plan: str = "",
    check: cleanup.VerifyDepth = cleanup.VerifyDepth.DIGESTS,
) -> Cleaned | CleaningPlan | None:
    """Clean by rules, as every cleaning flow does.

    Args:
        bucket: What is cleaned: a block, its name, or the URL of a folder.
        rules: By which.
        beside: Where else leases of the same runs stand.
        pinned: What never goes.
        dry_run: Only make the plan.
        plan: One that was made before is executed, by its name.
        check: How a checkpoint is verified.

    Returns:
        The plan of a dry run, else what became of it; None if there is no such block yet.

    Raises:
        MillraceError: Some objects could not be deleted: the report names them.
    """
    places = [known(place) for place in (bucket, *beside)]
    named = zip((bucket, *beside), places, strict=True)
    if missing := [named_bucket(name) for name, place in named if place is None]:
        return skipped(  # pyright: ignore[reportReturnType] - Prefect's way
            missing, "nothing was looked at, and nothing deleted"
        )
    store, *others = [
        spec_of(place, Right.READ if number else Right.WRITE)
        for number, place in enumerate(places)
        if place is not None
    ]
    settings = CleanSettings(
        store=store, beside=tuple(others), rules=tuple(rules), pinned=tuple(pinned), check=check
    )
    made = find_plan(store, plan) if plan else plan_cleaning(settings)
    if dry_run:
        report_plan(made, first_keys(open_store(store), made.name, _SHOWN))
        return made
    done = execute_plan(settings, made)
    report_cleaning(made, done)
    refuse_failures(store.url, done.failures)
    return done


def refuse_failures(where: str, failures: tuple[DeleteFailure, ...]) -> None:
    """Have a run fail that could not delete all that it should.

    Raises:
        MillraceError: It could not.
    """
    if failures:
        first = "; ".join(f"{one.key}: {one.reason}" for one in failures[:3])
        raise MillraceError(
            f"{format_count(len(failures), 'object')} of {where} could not be deleted ({first}). "
            "The others are gone: correct what the report says, and run it again."
        )


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def plan_cleaning(settings: CleanSettings) -> CleaningPlan:
    """Find what the rules take. Deletes nothing."""
    with CleaningProgress(artifact_key("progress", "cleaning", "plan")) as progress:
        made = make_plan(settings, progress=progress)
    _say(made)
    return made


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def find_plan(place: StoreSpec, name: str) -> CleaningPlan:
    """Return a plan that was made before."""
    return read_plan(open_store(place, make_folder=False), name)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def execute_plan(settings: CleanSettings, plan: CleaningPlan) -> Cleaned:
    """Delete what a plan says. Killed or tried again, it goes on."""
    with CleaningProgress(artifact_key("progress", "cleaning"), plan.objects) as progress:
        return execute(settings, plan.name, progress=progress)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def count_all(place: StoreSpec) -> CleaningPlan:
    """Write down all that a store holds. Deletes nothing."""
    with CleaningProgress(artifact_key("progress", "wiping", "plan")) as progress:
        made = plan_wiping(place, progress=progress)
    _say(made)
    return made


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def survey_bucket(place: StoreSpec) -> Contents:
    """Count what a wipe would delete. Writes nothing."""
    with CleaningProgress(artifact_key("progress", "wiping", "survey")) as progress:
        return cleanup.survey_wiping(place, progress=progress)


@task(cache_policy=NO_CACHE)
def wipe_all(place: StoreSpec, plan: CleaningPlan, confirm: str, *, versions: bool) -> Cleaned:
    """Delete all that was written down, if the name is right."""
    with CleaningProgress(artifact_key("progress", "wiping"), plan.objects) as progress:
        return cleanup.wipe(place, plan.name, confirm=confirm, versions=versions, progress=progress)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def abort_stale(place: StoreSpec, older_than: cleanup.Age, *, dry_run: bool) -> Aborted:
    """Find unfinished uploads, and abort them unless it is a dry run."""
    return abort_uploads(place, older_than=older_than, dry_run=dry_run)


@task(cache_policy=NO_CACHE)
def report_plan(plan: CleaningPlan, keys: list[tuple[str, int]]) -> None:
    """Leave the plan of a dry run as a report."""
    text = describe_plan(plan, keys)
    publish(text, key="cleaning", description="Objects that would be deleted")


@task(cache_policy=NO_CACHE)
def report_contents(found: Contents) -> None:
    """Publish what a wipe would delete."""
    text = document(
        write(
            "**Nothing was deleted.** {} holds {}, {}{}.",
            code(found.url), format_count(found.objects, "object"), size(found.size),
            describe_versions(found.versions),
        ),
        write("Older versions and delete markers stay, and are billed, unless `versions` is on.")
        if found.versions
        else Markdown(),
    )  # fmt: skip
    publish(text, key="cleaning", description="Objects that would be deleted")


def describe_versions(found: VersionCount | None) -> str:
    """Describe what a versioned bucket keeps beside its objects; empty if it keeps nothing."""
    if found is None:
        return " (these credentials may not list older versions)"
    if not found:
        return ""
    older, markers = (
        format_count(found.versions, "older version"),
        format_count(found.markers, "delete marker"),
    )
    return f", and beside them {older} ({size(found.size)}) and {markers}"


@task(cache_policy=NO_CACHE)
def report_cleaning(plan: CleaningPlan, done: Cleaned) -> None:
    """Leave a report that a person wants to read."""
    text = describe_cleaning(plan, done)
    publish(text, key="cleaning", description="Deleted objects")


@task(cache_policy=NO_CACHE)
def report_uploads(found: Mapping[str, Aborted]) -> None:
    """Leave a report that a person wants to read."""
    text = describe_uploads(found)
    publish(text, key="unfinished-uploads", description="Unfinished uploads")


def describe_plan(plan: CleaningPlan, keys: list[tuple[str, int]]) -> Markdown:
    """Return the report of a plan that nobody has executed."""
    rows: list[Sequence[object]] = [(code(key), size(bytes_of)) for key, bytes_of in keys]
    if rows and plan.objects > len(rows):
        rows.append((write("and {:,} more, in {}", plan.objects - len(rows), code(plan.key)), ""))
    return document(
        write(
            "**Nothing was deleted.** Plan {} of {} would delete {}, {}, which saves ${:,.2f} a "
            "month at R2's prices.",
            code(plan.name), code(plan.header.store), format_count(plan.objects, "object"),
            size(plan.size), saved_a_month(plan.size),
        ),
        _table(plan.header.rules, plan.totals.objects, plan.totals.size),
        _junk(plan.totals.junk),
        _kept(plan.totals.kept),
        table(("object", ">bytes"), rows) if rows else Markdown(),
        write("Execute this very plan with `plan` = {} and `dry_run` off.", code(plan.name)),
    )  # fmt: skip


def describe_cleaning(plan: CleaningPlan, done: Cleaned) -> Markdown:
    """Return the report of what became of a plan."""
    errors = bold(format_count(len(done.failures), "error")) if done.failures else "no errors"
    said = [
        write(
            "{}: {} deleted, {}, in {}, {}. That saves ${:,.2f} a month at R2's prices. Plan {}.",
            code(plan.header.store), format_count(done.deleted, "object"), size(done.freed),
            duration(done.seconds), errors, saved_a_month(done.freed), code(done.plan),
        )
    ]  # fmt: skip
    if done.versions:
        left = describe_versions(done.versions).removeprefix(", and beside them ")
        said.append(write("{} are left, and billed: the option `versions` deletes them.", left))
    gone = write("{} of the plan were gone already.", format_count(done.gone, "object"))
    given_up = write("So many could not be deleted that the rest was not tried.")
    return document(
        join(said, " "),
        _table(plan.header.rules, done.objects, done.size),
        _junk(done.junk),
        _kept({**plan.totals.kept, **done.skipped}),
        gone if done.gone else Markdown(),
        _failures(done.failures),
        given_up if done.given_up else Markdown(),
    )


def describe_uploads(found: Mapping[str, Aborted]) -> Markdown:
    """Return the report of unfinished uploads."""
    aborted = any(one.aborted for one in found.values())
    whole = sum(one.size for one in found.values())
    done = sum(len(one.uploads) - len(one.failures) for one in found.values())
    rows = [
        (code(place), len(one.uploads), size(one.size), one.young, len(one.failures))
        for place, one in found.items()
    ]
    return document(
        write(
            "{} {}: {}, which cost ${:,.2f} a month at R2's prices.",
            format_count(done, "unfinished upload"),
            "aborted" if aborted else write("found; **nothing was aborted**"),
            size(whole),
            saved_a_month(whole),
        ),
        table(("place", ">uploads", ">bytes", ">younger", ">errors"), rows),
        _failures(tuple(failure for one in found.values() for failure in one.failures)),
    )


def _say(plan: CleaningPlan) -> None:
    get_run_logger().info(
        "Plan %s of %s: %s, %s",
        plan.name, plan.header.store, format_count(plan.objects, "object"), size(plan.size),
    )  # fmt: skip


def _table(rules: tuple[Rule, ...], keys: Mapping[int, int], sizes: Mapping[int, int]) -> Markdown:
    if not rules:
        return Markdown()
    rows = [
        (
            describe(rule), f"{keys.get(place, 0):,}", size(sizes.get(place, 0)),
            f"${saved_a_month(sizes.get(place, 0)):,.2f}",
        )
        for place, rule in enumerate(rules)
    ]  # fmt: skip
    return table(("rule", ">objects", ">bytes", ">saves a month"), rows)


def _kept(kept: Mapping[str, int]) -> Markdown:
    rows = [(why, f"{number:,}") for why, number in sorted(kept.items())]
    columns = ("what stays, though a rule would take it", ">objects")
    return table(columns, rows, _SHOWN) if rows else Markdown()


def _junk(junk: Sequence[WorkerJunk]) -> Markdown:
    rows = [(code(one.worker), code(one.scope), f"{one.objects:,}", size(one.size)) for one in junk]
    columns = ("worker whose junk goes", "run or job", ">objects", ">bytes")
    return table(columns, rows, _SHOWN) if rows else Markdown()


def _failures(failures: tuple[DeleteFailure, ...]) -> Markdown:
    rows = [(code(one.key), one.reason) for one in failures]
    return table(("object", "error"), rows, _SHOWN) if rows else Markdown()
