"""``millrace bucket``: what a bucket holds, copies, the rights of credentials, unneeded objects."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.common import (
    DURATION,
    AnyFunction,
    CommandResult,
    NounGroup,
    add_yes_option,
    confirm,
    is_store_location,
    print_result,
    raise_interrupt,
    read_store,
    show_deletion,
    show_failures,
    take_location,
    take_settings_file,
)
from millrace.errors import ConfigurationError
from millrace.formatting import clean_text, format_age, format_count, format_size
from millrace.terminal import echo, is_stdout_reserved, make_console, make_table

if TYPE_CHECKING:
    from millrace.audit import Finding
    from millrace.cleanup import (
        CleanupPlan,
        CleanupSettings,
        CopyResult,
        ObjectFilter,
        Rule,
        WorkerJunk,
    )
    from millrace.cleanup.copy_result import SkippedEntry
    from millrace.storage import Store, VersionCount
    from millrace.storage.folders import UnlistedEntry

_BAR_WIDTH = 10  # characters
_SHOWN_CONFLICTS = 20
_SHOWN_UNLISTED = 5


class _PriceOption(click.FloatRange):
    """A number of dollars, which is finite."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no price: write a number of dollars, such as 0.015.", param, ctx)
        return found


_PRICE = _PriceOption(min=0)


@click.group(cls=NounGroup)
def bucket() -> None:
    r"""Show, copy and clean what a bucket holds, and prove the rights of credentials.

    \b
    Example:
      millrace bucket usage r2://ACCOUNT/BUCKET
      millrace bucket audit audit.yaml
      millrace bucket clean clean.yaml --dry-run
    """


def _take_filter(command: AnyFunction) -> AnyFunction:
    """Add the options that select objects, which the command gets as one `ObjectFilter`."""

    @wraps(command)
    def run(
        *args: Any,
        prefix: str,
        suffix: str,
        pattern: str,
        older_than: timedelta | None,
        newer_than: timedelta | None = None,
        exclude: tuple[str, ...] = (),
        **options: Any,
    ) -> Any:
        from millrace.cleanup import ObjectFilter

        try:
            objects = ObjectFilter(
                prefix=prefix,
                suffix=suffix,
                pattern=pattern,
                exclude=exclude,
                older_than=older_than,
                newer_than=newer_than,
            )
        except ConfigurationError as error:
            raise click.UsageError(f"{error}") from None
        return command(*args, objects=objects, **options)

    for option in (
        click.option("--older-than", type=DURATION, help="Only objects that are as old or older."),
        click.option(
            "--match",
            "pattern",
            metavar="GLOB",
            default="*",
            help="Only keys that match, such as 'runs/*.pt'; * matches slashes, too.",
        ),
        click.option("--suffix", default="", help="Only keys that end with this text."),
        click.option("--prefix", default="", help="Only keys that begin with this text."),
    ):
        run = option(run)
    return run


def _take_exclusions(command: AnyFunction) -> AnyFunction:
    """Add the options that leave objects out, which a rule of a plan has not."""
    for option in (
        click.option("--newer-than", type=DURATION, help="Only objects that are younger."),
        click.option(
            "--exclude",
            metavar="GLOB",
            multiple=True,
            help="No keys that match, such as '*.tmp'. Repeat it for more patterns.",
        ),
    ):
        command = option(command)
    return command


@bucket.command()
@click.argument("location", metavar="URL|FILE")
@_take_exclusions
@_take_filter
@click.option(
    "--depth",
    type=click.IntRange(1, 10),
    default=1,
    show_default=True,
    help="Number of folders of a key that are counted together.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of folders to print.",
)
@click.option(
    "--price",
    type=_PRICE,
    default=0.015,
    show_default=True,
    help="Dollars for a GB and a month; by default those of Cloudflare R2.",
)
@print_result
def usage(
    location: str, *, objects: "ObjectFilter", depth: int, top: int, price: float
) -> CommandResult:
    r"""Show the objects, bytes and monthly costs of a bucket by kind, by folder and by age.

    Only the bucket is listed; nothing is written. Old versions are not counted: `millrace bucket
    wipe --dry-run` counts them.

    \b
    Example: millrace bucket usage r2://ACCOUNT/BUCKET --depth 2
             millrace bucket usage s3://bucket --older-than 30d --suffix .pt
    """
    from millrace.cleanup import estimate_monthly_cost, limit_groups, measure_usage
    from millrace.progress_bar import ObjectsBar
    from millrace.storage import open_store

    store = open_store(read_store(location), make_folder=False)
    now = datetime.now(UTC)
    with ObjectsBar() as progress:
        found = measure_usage(store, objects, depth=depth, now=now, progress=progress)
    for title, groups in (
        ("kind", found.kinds),
        ("folder", limit_groups(found.folders, top)),
        ("last write", found.ages),
    ):
        table = make_table(title, "objects", "bytes", "of all", "", "a month", "newest")
        for one in groups:
            share = one.size / found.total.size if found.total.size else 0.0
            table.add_row(
                clean_text(one.name),
                f"{one.objects:,}",
                format_size(one.size),
                f"{share:.0%}",
                "█" * round(share * _BAR_WIDTH),
                f"${estimate_monthly_cost(one.size, price):,.2f}",
                "-" if one.newest is None else f"{format_age(now - one.newest)} ago",
            )
        make_console().print(table)
    cost = estimate_monthly_cost(found.total.size, price)
    echo(
        f"{store.url}: {format_count(found.total.objects, 'object')}, "
        f"{format_size(found.total.size)}, ${cost:,.2f} a month at ${price:g} a GB."
    )
    _show_unlisted(objects.list_unlisted(store))
    return CommandResult(found)


@bucket.command("list")
@click.argument("location", metavar="URL|FILE")
@_take_exclusions
@_take_filter
@click.option(
    "--limit", type=click.IntRange(min=1), help="Largest number of objects; by default all."
)
@print_result
def list_command(location: str, *, objects: "ObjectFilter", limit: int | None) -> CommandResult:
    r"""List the objects of a bucket, each with its size and the time since its last write.

    With `--json`, a list of keys, sizes and times, as one document.

    \b
    Example: millrace bucket list r2://ACCOUNT/BUCKET --prefix runs/ --older-than 2d
             millrace bucket list s3://bucket --match '*.pt' --limit 100
    """
    from millrace.storage import open_store

    store = open_store(read_store(location), make_folder=False)
    now = datetime.now(UTC)
    found = list[dict[str, object]]()
    count = size = 0
    as_json = is_stdout_reserved()
    for stat in islice(objects.iterate_objects(store, now), limit):
        count, size = count + 1, size + stat.size
        if as_json:
            found.append({"key": stat.key, "size": stat.size, "last_write": stat.last_modified})
        else:
            age = format_age(now - stat.last_modified)
            echo(f"{format_size(stat.size):>10}  {age:>6}  {stat.key}")
    echo(f"{format_count(count, 'object')}, {format_size(size)}.", err=True)
    _show_unlisted(objects.list_unlisted(store))
    return CommandResult(found)


@bucket.command()
@click.argument("source", metavar="SOURCE")
@click.argument("destination", metavar="DESTINATION")
@_take_exclusions
@_take_filter
@click.option("--overwrite", is_flag=True, help="Replace objects at the destination that differ.")
@click.option("--dry-run", is_flag=True, help="Compare only, and copy nothing.")
@add_yes_option
@print_result
def copy(
    source: str,
    destination: str,
    *,
    objects: "ObjectFilter",
    overwrite: bool,
    dry_run: bool,
    yes: bool,
) -> CommandResult:
    r"""Copy the objects of a bucket or folder into another one, and prove that each copy is right.

    SOURCE and DESTINATION are URLs, or settings files with a `store` and its credentials. Objects
    that are at the destination with the same bytes are skipped, so the same command continues a
    copy that was stopped, within a large object, too. Objects that differ stay: exit code 1, unless
    `--overwrite` is given.

    Within one account, the store copies by itself if the credentials of DESTINATION may read
    SOURCE. Then no byte comes here.

    \b
    Example: millrace bucket copy r2://ACCOUNT/BUCKET s3://backup/bucket --dry-run
             millrace bucket copy s3://bucket/runs /data/runs --suffix .pt
    """
    from millrace.cleanup import compare_objects, copy_objects, open_copy_target
    from millrace.progress_bar import ObjectsBar
    from millrace.storage import open_store

    here, there = open_store(read_store(source), make_folder=False), read_store(destination)
    if dry_run or (overwrite and not yes):
        with ObjectsBar() as progress:
            found = compare_objects(here, there, objects, overwrite=overwrite, progress=progress)
        code = _show_copy(found)
        if dry_run:
            return CommandResult(found, code)
        if not confirm("Copy the missing objects, and replace those that differ?", yes=False):
            return CommandResult(found, 1)
    target = open_copy_target(here, there, objects)
    with ObjectsBar() as progress:
        progress.start_copying()
        found = copy_objects(here, target, objects, overwrite=overwrite, progress=progress)
    return CommandResult(found, _show_copy(found))


def _show_unlisted(
    entries: "Sequence[UnlistedEntry | SkippedEntry]",
    count: int | None = None,
    verb: str = "left out",
) -> None:
    """Name the first entries that a command leaves out, with the reasons."""
    for one in entries[:_SHOWN_UNLISTED]:
        echo(f"{clean_text(one.key)} is {verb}: {one.reason}.", err=True)
    if (more := (len(entries) if count is None else count) - _SHOWN_UNLISTED) > 0:
        echo(f"and {more:,} more are {verb}", err=True)


def _show_copy(found: "CopyResult") -> int:
    """Show what was copied, and return the exit code."""
    from millrace.cleanup import CopyOutcome

    table = make_table("", "objects", "bytes")
    for outcome, title in (
        (CopyOutcome.COPIED, "copied"),
        (CopyOutcome.MISSING, "are missing, or would be replaced"),
        (CopyOutcome.EQUAL, "were there already"),
        (CopyOutcome.CONFLICT, "differ, and stay"),
    ):
        if found.objects[outcome]:
            size = format_size(found.sizes[outcome])
            table.add_row(title, f"{found.objects[outcome]:,}", size)
    if table.rows:
        make_console().print(table)
    for key in found.conflicts[:_SHOWN_CONFLICTS]:
        echo(f"{clean_text(key)} differs: --overwrite replaces it.", err=True)
    if (more := found.objects[CopyOutcome.CONFLICT] - _SHOWN_CONFLICTS) > 0:
        echo(f"and {more:,} more differ", err=True)
    show_failures(found.failures)
    _show_unlisted(found.skipped, found.skipped_count, "not copied")
    done = CopyOutcome.MISSING if found.objects[CopyOutcome.MISSING] else CopyOutcome.COPIED
    verb = "Would copy" if done is CopyOutcome.MISSING else "Copied"
    by_store = f", {format_size(found.by_store)} of them by the store itself"
    failed = f"; {format_count(found.failed, 'object')} could not be copied" if found.failed else ""
    echo(
        f"{verb} {format_count(found.objects[done], 'object')}, {format_size(found.sizes[done])}"
        f"{by_store if found.by_store else ''}, in {found.seconds:.1f} s{failed}."
    )
    return 1 if found.failed or found.objects[CopyOutcome.CONFLICT] else 0


@bucket.command()
@take_settings_file("audit.yaml")
@print_result
def audit(settings: Path) -> CommandResult:
    r"""Prove that each credential has the rights that its role needs, and no other rights.

    Exit code 0: proven. Otherwise the code of the gravest finding: 20 a forbidden operation is
    allowed, 21 a store returns wrong bytes or confirms an operation that was not done, 22
    credentials are refused for all operations, 23 credentials are refused for a required operation,
    24 there is no such bucket, 25 a store does not answer, 26 a store is throttling, 27 unproven
    for another reason.

    \b
    Example: millrace bucket audit audit.yaml --json > findings.json
    """
    from millrace.audit import AccessVerdict, AuditSettings
    from millrace.audit import audit as audit_roles
    from millrace.settings import load_settings

    found = audit_roles(load_settings(settings, AuditSettings))
    pairs = list(dict.fromkeys((one.role, one.right) for one in found.findings))
    seen = {(one.role, one.right, one.operation): one for one in found.findings}
    operations = dict.fromkeys(one.operation for one in found.findings)
    table = make_table("operation", *(f"{role} {right}" for role, right in pairs))
    for operation in operations:
        cells = [seen.get((*pair, operation)) for pair in pairs]
        table.add_row(operation, *(_format_finding(one) for one in cells))
    make_console().print(table)
    for message, names in _group_by_message(found.failures).items():
        echo(f"{', '.join(names)}: {message}" if len(names) == 1 else message)
    for note in found.notes:
        echo(note)
    kinds = Counter(one.verdict for one in found.failures)
    wrong = "".join(f", {kinds[verdict]} {verdict}" for verdict in AccessVerdict if kinds[verdict])
    right = len(found.findings) - len(found.failures)
    echo(f"{right} of {len(found.findings)} operations are as they should be{wrong}.")
    return CommandResult(found, found.exit_code)


def _format_finding(one: "Finding | None") -> str:
    """Return a cell of the table: the expected outcome, or the verdict in capitals."""
    from millrace.audit import AccessVerdict

    if one is None:
        return "-"
    return f"{one.actual}" if one.verdict is AccessVerdict.CORRECT else one.verdict.upper()


def _group_by_message(failures: "Iterable[Finding]") -> dict[str, list[str]]:
    """Group failures by the store's message, since a dead endpoint has one message for all."""
    found: dict[str, list[str]] = {}
    for one in failures:
        name = f"{one.role}, to {one.right}: {one.operation} is {one.verdict}"
        found.setdefault(one.message, []).append(name)
    return found


@bucket.command()
@take_location("clean.yaml", "[FILE|URL|FOLDER]")
@_take_filter
@click.option("--plan", "name", metavar="NAME", help="Execute this plan instead of a new one.")
@click.option("--keys", "with_keys", is_flag=True, help="Print each object of the plan, too.")
@click.option("--dry-run", is_flag=True, help="Write the plan into the store; delete nothing.")
@add_yes_option
@print_result
def clean(
    location: str,
    *,
    objects: "ObjectFilter",
    name: str | None,
    with_keys: bool,
    dry_run: bool,
    yes: bool,
) -> CommandResult:
    r"""Delete the objects that rules select, except for protected objects.

    The rules are those of a settings file. Of a URL, the objects go that Millrace did not write,
    and that `--older-than`, `--prefix`, `--suffix` and `--match` select.

    The command writes a plan, shows the plan, and asks. Then the command executes the plan. Objects
    that were written again or are protected by now stay. Exit code 1 if an object could not be
    deleted. `--plan NAME` continues a killed run.

    \b
    Example: millrace bucket clean clean.yaml --dry-run
             millrace bucket clean clean.yaml --plan 20261124T031700-1f2e3d
             millrace bucket clean s3://bucket --older-than 48h --suffix .tmp --dry-run
    """
    from millrace.cleanup import execute, make_plan, read_plan
    from millrace.progress_bar import ObjectsBar
    from millrace.storage import open_store

    settings = _read_cleanup_settings(location, objects, name)
    if name is not None:
        plan = read_plan(open_store(settings.store, make_folder=False), name)
    else:
        with ObjectsBar() as progress:
            plan = make_plan(settings, progress=progress)
    if with_keys:
        _show_keys(settings, plan)
    totals = plan.totals
    _show_rules(plan.header.rules, totals.objects, totals.size, totals.kept)
    _show_junk(totals.junk)
    _show_unmatched_pins(totals.unmatched_pins)
    count = f"{format_count(plan.objects, 'object')}, {format_size(plan.size)}"
    echo(f"Plan {plan.name}: {count}.")
    _show_unlisted(objects.list_unlisted(open_store(settings.store, make_folder=False)))
    data: dict[str, object] = {
        "plan": plan.name, "objects": plan.objects, "bytes": plan.size, "kept": totals.kept,
    }  # fmt: skip
    if dry_run:
        quoted = shlex.quote(location)
        echo(f"Execute it with: millrace bucket clean {quoted} --plan {plan.name}")
        return CommandResult(data)
    if plan.objects and not confirm(f"Delete {count}?", yes=yes):
        return CommandResult(data, 1)
    with ObjectsBar() as progress:
        progress.start_deleting(plan.objects)
        done = execute(settings, plan.name, progress=progress)
    code = show_deletion(done, seconds=done.seconds)
    return CommandResult(data | done.to_dict() | {"seconds": done.seconds}, code)


def _read_cleanup_settings(
    location: str, objects: "ObjectFilter", plan: str | None
) -> "CleanupSettings":
    """Return the settings of a file, or those that the options of a URL or a folder make.

    Raises:
        UsageError: A settings file has options of a URL, or a URL has no age.
    """
    from millrace.cleanup import CleanupKind, CleanupSettings, ObjectFilter, Rule
    from millrace.settings import load_settings, validate_settings
    from millrace.storage import StoreSpec

    is_selected = objects != ObjectFilter()
    if not is_store_location(location):
        if is_selected:
            raise click.UsageError(
                "--older-than, --prefix, --suffix and --match select objects of a URL or a folder. "
                "In a settings file, write them as rules."
            )
        return load_settings(Path(location), CleanupSettings)
    if plan and is_selected:
        raise click.UsageError("A plan has its objects: leave the options that select objects out.")
    if objects.older_than is None and not plan:
        raise click.UsageError("Give the least age of the objects, such as --older-than 48h.")
    conditions = {
        "kinds": [CleanupKind.OTHER],
        "older_than": objects.older_than or timedelta(0),
        "prefix": objects.prefix,
        "suffix": objects.suffix,
        "match": objects.pattern,
    }
    rule = validate_settings(Rule, conditions, source="The options")
    return CleanupSettings(store=StoreSpec(url=location), rules=(rule,))


def _show_keys(settings: "CleanupSettings", plan: "CleanupPlan") -> None:
    from millrace.cleanup.plans import open_plan
    from millrace.storage import open_store

    with open_plan(open_store(settings.store), plan.name) as (_, entries):
        for entry in entries:
            size = format_size(entry.size)
            echo(f"{entry.key}  {size}  rule {entry.rule_index + 1}")


@bucket.command()
@click.argument("location", metavar="URL|FILE")
@click.option("--confirm", "typed", metavar="NAME", help="The bucket's name, instead of typing it.")
@click.option("--versions", is_flag=True, help="Delete older versions and delete markers, too.")
@click.option("--dry-run", is_flag=True, help="Show the number of objects; write nothing.")
@print_result
def wipe(location: str, *, typed: str | None, versions: bool, dry_run: bool) -> CommandResult:
    r"""Delete all objects below a URL, or below the `store` of a settings file.

    The command writes a plan, shows the number of objects, and asks for the bucket's name. After
    another name, nothing is deleted, and the exit code is 2.

    \b
    Example: millrace bucket wipe r2://ACCOUNT/BUCKET --dry-run
    """
    from millrace.cleanup import ObjectFilter, StoreContents, plan_wipe, survey_wipe
    from millrace.cleanup import wipe as wipe_store
    from millrace.cleanup.wiping import check_confirmation, count_older_versions
    from millrace.progress_bar import ObjectsBar
    from millrace.storage import open_store

    spec = read_store(location)
    store = open_store(spec, make_folder=False)
    if typed is not None:
        check_confirmation(store.location, typed)
    with ObjectsBar() as progress:
        if dry_run:
            plan, found = None, survey_wipe(spec, progress=progress)
        else:
            older = count_older_versions(store)  # before the plan, whose write may add a version
            plan = plan_wipe(spec, progress=progress)
            unlisted = tuple(ObjectFilter().list_unlisted(store))
            found = StoreContents(store.url, plan.objects, plan.size, older, unlisted)
    echo(f"{store.url} holds {format_count(found.objects, 'object')}, {format_size(found.size)}.")
    _show_unlisted(found.unlisted, verb="left alone")
    stays = "" if versions else " They stay, and are billed, unless --versions is given."
    if found.versions is None:
        echo("The number of older versions is unknown: these credentials may not list versions.")
    elif found.versions:
        echo(f"It keeps {_format_versions(found.versions)} beside them.{stays}")
    data: dict[str, object] = {
        "url": store.url, "objects": found.objects, "bytes": found.size,
        "left_alone": [one.key for one in found.unlisted],
    }  # fmt: skip
    if plan is None:
        return CommandResult(data)
    if typed is None:
        typed = _ask_name(store, plan.name)
    with ObjectsBar() as progress:
        progress.start_deleting(plan.objects)
        done = wipe_store(spec, plan.name, confirm=typed, versions=versions, progress=progress)
    code = show_deletion(done, seconds=done.seconds)
    if done.versions:
        echo(
            f"{_format_versions(done.versions)} are left, and billed"
            + ("." if versions else ": `millrace bucket wipe --versions` deletes them, too.")
        )
    elif done.versions is None:
        echo("The number of remaining versions is unknown: these credentials may not list them.")
    return CommandResult(data | done.to_dict() | {"seconds": done.seconds}, code)


def _ask_name(store: "Store", plan: str) -> str:
    """Ask for the name of a store, and return it. Without it, the plan is deleted.

    Raises:
        ConfigurationError: The answer is another, or there is none.
    """
    from millrace.cleanup.wiping import check_confirmation, delete_plan, make_confirmation

    wanted = make_confirmation(store.location)
    try:
        typed = click.prompt(f"All objects will be deleted. Type {wanted} to continue", err=True)
        check_confirmation(store.location, typed)
    except click.Abort as error:
        delete_plan(store, plan)
        raise_interrupt(error)
        raise ConfigurationError(
            "Nothing was deleted, since the question has no answer. Without a terminal, add "
            f"--confirm {shlex.quote(wanted)}"
        ) from None
    except ConfigurationError:
        delete_plan(store, plan)
        raise
    return typed


@bucket.command("abort-uploads")
@click.argument("location", metavar="URL|FILE")
@click.option(
    "--older-than", type=DURATION, default="24h", show_default=True, help="Least age of an upload."
)
@click.option("--prefix", default="", help="Only uploads of keys that begin with this text.")
@click.option("--dry-run", is_flag=True, help="Show the uploads; abort none.")
@add_yes_option
@print_result
def abort_uploads(
    location: str, *, older_than: timedelta, prefix: str, dry_run: bool, yes: bool
) -> CommandResult:
    r"""Abort unfinished uploads, which no listing shows and the store bills.

    The command shows the uploads, and asks before it aborts them.

    \b
    Example: millrace bucket abort-uploads r2://ACCOUNT/BUCKET --older-than 3d
    """
    from millrace.cleanup import abort_uploads as abort
    from millrace.cleanup import find_stale_uploads

    spec = read_store(location)
    found = find_stale_uploads(spec, older_than=older_than, prefix=prefix)
    for upload in found.uploads:
        echo(f"{upload.key}  {format_size(upload.size)}")
    count = f"{format_count(len(found.uploads), 'upload')}, {format_size(found.size)}"
    if dry_run or not found.uploads:
        echo(f"Would abort {count}; {found.recent} are younger than that.")
        return CommandResult(found)
    if not confirm(f"Abort {count}?", yes=yes):
        return CommandResult(found, 1)
    found = abort(spec, found)
    show_failures(found.failures)
    aborted = format_count(len(found.successes), "upload")
    echo(f"Aborted {aborted}, {format_size(found.size)}; {found.recent} are younger than that.")
    return CommandResult(found, 1 if found.failures else 0)


def _format_versions(found: "VersionCount") -> str:
    return (
        f"{format_count(found.versions, 'older version')} ({format_size(found.size)}) and "
        f"{format_count(found.markers, 'delete marker')}"
    )


def _show_rules(
    rules: "Sequence[Rule]",
    keys: Mapping[int, int],
    size: Mapping[int, int],
    kept: Mapping[str, int],
) -> None:
    from millrace.cleanup import describe_rule, estimate_monthly_cost

    table = make_table("rule", "objects", "bytes", "saves a month")
    for index, rule in enumerate(rules):
        own = size.get(index, 0)
        table.add_row(
            describe_rule(rule),
            f"{keys.get(index, 0)}",
            format_size(own),
            f"${estimate_monthly_cost(own):.2f}",
        )
    make_console().print(table)
    for reason, count in sorted(kept.items()):
        echo(f"{count} stay: {reason}")


def _show_unmatched_pins(pins: "Sequence[str]") -> None:
    for pin in pins:
        echo(f"The pin {clean_text(pin)} protects nothing: there is no object of its name.")


def _show_junk(junk: "Sequence[WorkerJunk]") -> None:
    for one in junk[:20]:
        owner = f"{clean_text(one.worker)} of {clean_text(one.scope)}"
        echo(f"{format_count(one.objects, 'object')}, {format_size(one.size)}, are junk of {owner}")
    if len(junk) > 20:
        echo(f"and junk of {len(junk) - 20} more workers")
