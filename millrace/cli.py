"""The command ``millrace``: the engine for people at a terminal.

Other packages add commands through the entry point group ``millrace.commands``.
"""

import errno
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace import errors, formatting
from millrace.terminal import echo, echo_text, make_console, make_table

if TYPE_CHECKING:
    from millrace.audit import Finding
    from millrace.cleanup import CleanupResult, Rule, WorkerJunk
    from millrace.datasets import DatasetStatus, PipelineSettings, ShardReport
    from millrace.schemas.dataset import DatasetPlan
    from millrace.storage import Store, StoreSpec, VersionCount
    from millrace.swarm import PrewarmReport

_EXAMPLE = """\
# A dataset, from its source to its shards. `millrace run THIS_FILE` cuts it, and goes on where
# it was stopped. ${NAME} is filled in from the environment, ${NAME:-value} with a default.

dataset: my-dataset             # a prefix below the store's URL

source:
  url: file:///path/to/a/folder # or s3://bucket/prefix, r2://account/bucket/prefix, gs://
  kind: jsonl                   # a sample a line; `files` makes one of each file
  include: ["*.jsonl"]
  columns: {txt: text}          # field: column; leave it out to keep each row whole, as json
  # credentials:                # left out: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
  #   access_key_id: ${R2_DATASET_READ_ACCESS_KEY_ID}
  #   secret_access_key: ${R2_DATASET_READ_SECRET_ACCESS_KEY}

# Where the shards go. Left out: what STORAGE_BACKEND and its companions say (.env.example):
# LOCAL_STORAGE_PATH, or with STORAGE_BACKEND=s3 CHECKPOINT_BUCKET.
# store:
#   url: r2://${R2_DATASET_ACCOUNT_ID}/${R2_DATASET_BUCKET_NAME}
#   credentials:
#     access_key_id: ${R2_DATASET_WRITE_ACCESS_KEY_ID}
#     secret_access_key: ${R2_DATASET_WRITE_SECRET_ACCESS_KEY}

sharding:                       # pinned by the plan: cannot change under the same name
  shard_bytes: 64MiB
  partition_bytes: 512MiB
  # partition_files: 10000      # of kind files: at most about so many in a partition
  seed: 0                       # of the shuffle; null keeps the source's order
  holdout: 0.0                  # the share held out as the split `val`

execution:                      # never changes the result
  workers: 2                    # memory: shard_bytes * (uploads + 1) * workers
  uploads: 2
  # max_quarantined: 0.01       # share of rows that may make no sample; above it the run fails
  # allow_empty: false          # true completes a dataset that has no samples
"""


_RENTALS = {
    "offers": "show_offers",
    "rent": "rent_machines",
    "rentals": "list_machines",
    "release": "release_machines",
    "reap": "reap_machines",
}  # commands, and their functions in `millrace.cli_rentals`


class _DurationOption(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - not in all versions
    """A duration with its unit, such as 90s or 24h."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        from pydantic import TypeAdapter, ValidationError

        from millrace.settings import Duration, parse_duration

        try:
            return TypeAdapter[timedelta](Duration).validate_python(parse_duration(value))
        except ValidationError:
            self.fail(f"{value!r} is no duration of ISO 8601, such as PT20M.", param, ctx)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


_DURATION = _DurationOption()


class _Commands(click.Group):
    """The engine's commands, and those that installed packages add."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        added = {point.name for point in entry_points(group="millrace.commands")}
        return sorted({*super().list_commands(ctx), *_RENTALS, *added})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name in _RENTALS:
            return getattr(import_module("millrace.cli_rentals"), _RENTALS[cmd_name])
        for point in entry_points(group="millrace.commands", name=cmd_name):
            return point.load()
        return None


def said(command: Callable[..., int | None]) -> Callable[..., None]:
    """Run a command for a terminal: print an error of ours as a sentence, and exit.

    Exit codes: what the command returns; 1 failed, 2 wrong input, 130 Ctrl-C or SIGTERM.
    """

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        _end_on_sigterm()
        try:
            code = command(*args, **options)
            sys.stdout.flush()
        except errors.ConfigurationError as error:
            echo_text(f"millrace: {error}", err=True)
            sys.exit(2)
        except errors.MillraceError as error:
            echo_text(f"millrace: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            echo_text("\nStopped. Run it again: it goes on where it was.", err=True)
            sys.exit(130)
        except OSError as error:
            if error.errno == errno.EPIPE or _can_print():
                raise
            echo(f"millrace: the output could not be written: {error.strerror}.", err=True)
            sys.exit(1)
        sys.exit(code or 0)

    return run


def _end_on_sigterm() -> None:
    """End on SIGTERM as on Ctrl-C, unless the process was told to treat SIGTERM otherwise."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _can_print() -> bool:
    """Print an empty line, and return whether standard output takes it; if not, close it."""
    try:
        print(flush=True)
    except OSError:
        # The interpreter would write the rest at its end, and fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="millrace")
@click.option("-v", "--verbose", is_flag=True, help="Say what the engine logs.")
def main(*, verbose: bool) -> None:
    """Shard datasets into an object store, and look after them there."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s"
    )


_settings_file = click.argument(
    "settings", type=click.Path(path_type=Path), default="millrace.yaml"
)
_prefix = click.option("--prefix", metavar="NAME", help="Another dataset name than the file's.")


@main.command()
@click.argument("path", type=click.Path(path_type=Path), default="millrace.yaml")
@said
def init(path: Path) -> int:
    """Write a settings file to start from."""
    write_template(path, _EXAMPLE)
    echo(f"Wrote {path}. Set its source and store, then: millrace plan {path}")
    return 0


def write_template(path: Path, text: str) -> None:
    """Write a settings file to start from.

    Raises:
        ConfigurationError: A file of this name exists, or none can be written there.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise errors.ConfigurationError(
            f"{path} is already there. Move it away, or name another file."
        ) from None
    except OSError as error:
        raise errors.ConfigurationError(f"{path} cannot be written: {error.strerror}.") from None


@main.command()
@_settings_file
@_prefix
@said
def plan(settings: Path, prefix: str | None) -> int:
    """Show the partitions of a dataset, and its destination. Writes nothing.

    Exit code 1 if `run` would refuse.
    """
    from millrace.datasets import check_destination

    config = _config(settings, prefix)
    made, found = check_destination(config)
    _show_plan(made, config, found.largest_sample)
    echo(f"Goes to {found.url}{found.state and f' ({found.state})'}.")
    for sentence in found.unchecked:
        echo(sentence)
    if config.vast is not None and find_spec("vastai") is None:
        echo("`run --use-vast` needs the extra vast: pip install 'millrace[vast]'.")
    for sentence in found.refusals:
        echo(f"`millrace run` will refuse: {sentence}", err=True)
    return 1 if found.refusals else 0


@main.command()
@_settings_file
@_prefix
@click.option("--use-vast", is_flag=True, help="On rented machines, as the file's `vast` says.")
@click.option("--repair", is_flag=True, help="Then verify, and make missing or damaged shards.")
@said
def run(settings: Path, prefix: str | None, *, use_vast: bool, repair: bool) -> int:
    """Shard a dataset, or go on where a run was stopped."""
    from millrace.datasets import repair_dataset, shard_dataset
    from millrace.progress_bar import PartitionsBar

    config = _config(settings, prefix)
    if use_vast and repair:
        raise errors.ConfigurationError(
            "--repair works on this machine, and --use-vast on rented ones. Shard with --use-vast "
            "first, then run --repair alone."
        )
    if use_vast:
        return import_module("millrace.cli_rentals").shard_on_vast(settings, config)
    with PartitionsBar() as progress:
        report = shard_dataset(config, progress=progress, repair=repair)
    _show_report(report)
    if repair:
        repaired = repair_dataset(config)
        for key in repaired.remade_keys:
            echo(f"Made again: {key}")
        echo(
            f"{formatting.format_count(repaired.shards, 'shard')} verified, {len(repaired.remade_keys)} made "
            f"again."
        )
    return 0


@main.command()
@click.argument("settings_or_url")
@click.argument("dataset", required=False)
@click.option("--quick", is_flag=True, help="Only sizes: reads no shard.")
@said
def verify(settings_or_url: str, dataset: str | None, *, quick: bool) -> int:
    """Hold every shard against the manifest. Exit code 1 if one is missing or differs."""
    from millrace.datasets import verify_dataset as check

    store, name = _place(settings_or_url, dataset)
    result = check(store, name, digests=not quick)
    for fault in result.faults:
        echo(f"{store.make_url(fault.key)}: {fault.reason}")
    what = "sizes and SHA-256" if result.includes_digests else "sizes"
    echo(
        f"{formatting.format_count(result.shards - len(result.faults), 'shard')} of {result.shards} "
        "as the manifest says "
        f"({what}, {_size(result.size)})."
    )
    return 0 if result.is_intact else 1


@main.command()
@click.argument("settings_or_url")
@click.argument("dataset", required=False)
@said
def status(settings_or_url: str, dataset: str | None) -> int:
    """Say how far a dataset is, from the bucket alone. Without DATASET: all below the URL."""
    from millrace.datasets import find_datasets
    from millrace.datasets import read_status as look

    if dataset is None and "://" in settings_or_url:
        from millrace.storage import open_store

        store = open_store(settings_or_url, make_folder=False)
        names = find_datasets(store)
        if not names:
            raise errors.NotFoundError(f"There is no dataset below {store.url}.")
    else:
        store, name = _place(settings_or_url, dataset)
        names = [name]
    for name in names:
        try:
            _show_status(look(store, name))
        except errors.CorruptError as error:
            if len(names) == 1:
                raise
            echo(f"{name} cannot be read: {error}", err=True)  # hides no other one
    return 0


@main.command()
@click.argument("settings_or_url")
@click.argument("dataset", required=False)
@click.option("--delete", is_flag=True, help="Delete it; otherwise it is only shown.")
@click.option("--min-age", type=_DURATION, default="1h", show_default=True, help="At least so old.")
@said
def gc(settings_or_url: str, dataset: str | None, *, delete: bool, min_age: timedelta) -> int:
    """Find what no record of a dataset names: leftovers of runs that were killed."""
    from millrace.datasets import collect_garbage

    store, name = _place(settings_or_url, dataset)
    found = collect_garbage(store, name, dry_run=not delete, min_age=min_age)
    for key in found.keys:
        echo(store.make_url(key))
    for failure in found.failures:
        echo(f"{store.make_url(failure.key)}: {failure.reason}", err=True)
    done = "Deleted" if found.is_deleted else "Would delete (with --delete)"
    echo(f"{done} {formatting.format_count(len(found.keys), 'object')}, {_size(found.size)}.")
    return 1 if found.failures else 0


@main.command()
@click.argument("url")
@click.argument("job")
@click.option("--verify", is_flag=True, help="Read every byte, and compare digests.")
@said
def checkpoints(url: str, job: str, *, verify: bool) -> int:
    """List a job's checkpoints, newest first. Exit code 1 if one is damaged or cannot be read."""
    from millrace.checkpoints import VerifyDepth, survey
    from millrace.checkpoints import verify as look
    from millrace.storage import open_store

    store = open_store(url, make_folder=False)
    table = make_table("step", "files", "bytes", "saved", "run", "state")
    faults: list[str] = []
    check = VerifyDepth.DIGESTS if verify else VerifyDepth.SIZES
    for step, found in survey(store, job):
        if isinstance(found, errors.CorruptError):
            faults.append(str(found))
            table.add_row(str(step), "", "", "", "", "unreadable")
            continue
        damage = look(store, found, check=check)
        faults += damage.values()
        state = "damaged" if damage else "verified" if verify else "all files there"
        saved = f"{found.saved:%Y-%m-%d %H:%M}"
        row = (str(step), str(len(found.parts)), _size(found.size), saved, found.run, state)
        table.add_row(*row)
    if not table.row_count:
        raise errors.NotFoundError(f"{store.make_url(job)} has no checkpoint.")
    make_console().print(table)
    for fault in faults:
        echo(fault)
    return 1 if faults else 0


@main.command()
@click.argument("url")
@click.argument("job")
@click.option("--last", type=click.IntRange(1), default=3, show_default=True, help="Keep so many.")
@click.option("--every", type=click.IntRange(1), help="And each whose step is a multiple of this.")
@click.option("--delete", is_flag=True, help="Delete the others; otherwise they are only shown.")
@said
def retain(url: str, job: str, *, last: int, every: int | None, delete: bool) -> int:
    """Remove the checkpoints that no rule keeps. The newest that is verified always stays."""
    from millrace.checkpoints import RetentionSettings, plan_retention
    from millrace.checkpoints import apply_retention as carry_out
    from millrace.storage import open_store

    store = open_store(url, make_folder=False)
    plan = plan_retention(store, job, RetentionSettings(last=last, every=every))
    for step, why in sorted(plan.kept.items(), reverse=True):
        echo(f"step {step} stays: {why}")
    for step in reversed(plan.removed):
        echo(f"step {step} goes")
    if not delete:
        echo(f"Would delete (with --delete) {len(plan.removals)} objects, {_size(plan.size)}.")
        return 0
    done = carry_out(store, plan)
    for failure in done.failures:
        echo(f"{store.make_url(failure.key)}: {failure.reason}", err=True)
    if done.skipped:
        echo(f"{len(done.skipped)} objects stay: somebody needs them by now.")
    echo(f"Deleted {done.removed} objects, {_size(done.size)}.")
    return 1 if done.failures else 0


@main.command()
@click.argument("url")
@click.argument("job")
@click.option("--size", default="0", help="Of a checkpoint, such as 80GB: is there room and time?")
@click.option("--within", type=_DURATION, help="How long it may take to save one, such as 20m.")
@said
def probe(url: str, job: str, *, size: str, within: timedelta | None) -> int:
    """Find out whether a job could save its checkpoints there.

    Exit code 0: ready. Else: 11 read only, 12 denied, 13 not found, 14 throttled, 15 unreachable,
    16 wrong bytes, 17 no space, 18 too slow, 19 unknown.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from millrace.checkpoints import open_destination

    try:
        whole = TypeAdapter(ByteSize).validate_python(size)
    except ValidationError:
        raise errors.ConfigurationError(f"{size!r} is no size: write 80GB, or 512MiB.") from None
    found = open_destination(url).probe(job, size=int(whole), within=within)
    echo(f"{found.verdict}: {found.reason}")
    if found.rate:
        echo(f"One upload: {found.rate / 1e6:.1f} MB/s.")
    return found.verdict.exit_code


@main.command("audit")
@click.argument("settings", type=click.Path(path_type=Path), default="audit.yaml")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the findings here.")
@said
def audit_access(settings: Path, *, file: Path | None) -> int:
    """Prove that each credential can do what it must, and nothing else.

    Exit code 0: proven. Else the gravest: 20 somebody can do what he must not, 21 a store does not
    do what it says, 22 credentials are refused wholly, 23 in part, 24 no such bucket, 25 it does
    not answer, 26 it asks to come later, 27 unproven for another reason.
    """
    from millrace.audit import AccessVerdict, AuditSettings, audit
    from millrace.settings import load_settings

    found = audit(load_settings(settings, AuditSettings))
    pairs = list(dict.fromkeys((one.role, one.right) for one in found.findings))
    seen = {(one.role, one.right, one.operation): one for one in found.findings}
    operations = dict.fromkeys(one.operation for one in found.findings)
    table = make_table("operation", *(f"{role} {right}" for role, right in pairs))
    for operation in operations:
        cells = [seen.get((*pair, operation)) for pair in pairs]
        table.add_row(operation, *(_audited(one) for one in cells))
    make_console().print(table)
    for sentence, ones in _by_sentence(found.failures).items():
        echo(f"{', '.join(ones)}: {sentence}" if len(ones) == 1 else sentence)
    for note in found.notes:
        echo(note)
    kinds = Counter(one.verdict for one in found.failures)
    wrong = "".join(f", {kinds[verdict]} {verdict}" for verdict in AccessVerdict if kinds[verdict])
    right = len(found.findings) - len(found.failures)
    echo(f"{right} of {len(found.findings)} operations are as they should be{wrong}.")
    if file is not None:
        file.write_text(found.model_dump_json(indent=2))
    return found.exit_code


def _audited(one: "Finding | None") -> str:
    """Return a cell of an audit's table: the store's answer, or in capitals what is wrong."""
    if one is None:
        return "-"
    return f"{one.actual}" if one.verdict == "correct" else one.verdict.upper()


def _by_sentence(wrong: "Iterable[Finding]") -> dict[str, list[str]]:
    """Group what is wrong by what the store said: a dead endpoint says one thing to all."""
    found: dict[str, list[str]] = {}
    for one in wrong:
        named = f"{one.role}, to {one.right}: {one.operation} is {one.verdict}"
        found.setdefault(one.message, []).append(named)
    return found


@main.group()
def clean() -> None:
    """Delete what nobody needs: planned first, and then that very plan is executed."""


_clean_settings = click.argument("settings", type=click.Path(path_type=Path), default="clean.yaml")


@clean.command("plan")
@_clean_settings
@click.option("--keys", is_flag=True, help="Print each object that goes, too.")
@said
def clean_plan(settings: Path, *, keys: bool) -> int:
    """Find what the rules take, and write it down in the store. Deletes nothing."""
    from millrace.cleanup import CleanupSettings, make_plan
    from millrace.cleanup.plans import open_plan
    from millrace.progress_bar import ObjectsBar
    from millrace.settings import load_settings
    from millrace.storage import open_store

    config = load_settings(settings, CleanupSettings)
    with ObjectsBar() as progress:
        made = make_plan(config, progress=progress)
    if keys:
        with open_plan(open_store(config.store), made.name) as (_, entries):
            for entry in entries:
                echo(f"{entry.stat.key}  {_size(entry.stat.size)}  rule {entry.rule_index + 1}")
    _show_cleaning(made.header.rules, made.totals.objects, made.totals.size, made.totals.kept)
    _show_junk(made.totals.junk)
    echo(
        f"Plan {made.name}: {made.objects} objects, {_size(made.size)}. Execute it with: "
        f"millrace clean run {settings} --plan {made.name}"
    )
    return 0


@clean.command("run")
@_clean_settings
@click.option("--plan", "name", help="As `millrace clean plan` called it; otherwise a new one.")
@said
def clean_run(settings: Path, *, name: str | None) -> int:
    """Delete what a plan says, but for what was written since, or is protected by now.

    Exit code 1 if something could not be deleted. Killed, it goes on with the same plan.
    """
    from millrace.cleanup import CleanupSettings, execute, make_plan, read_plan
    from millrace.progress_bar import ObjectsBar
    from millrace.settings import load_settings
    from millrace.storage import open_store

    config = load_settings(settings, CleanupSettings)
    with ObjectsBar() as progress:
        plan = (
            read_plan(open_store(config.store, make_folder=False), name)
            if name
            else make_plan(config, progress=progress)
        )
        echo(f"Plan {plan.name}: {plan.objects} objects, {_size(plan.size)}.")
        progress.start_deleting(plan.objects)
        done = execute(config, plan.name, progress=progress)
    _show_cleaning(plan.header.rules, done.objects, done.size, {})
    _show_junk(done.junk)
    return _show_cleaned(done)


@clean.command("wipe")
@click.argument("place")
@click.option("--confirm", metavar="NAME", help="The bucket's name; otherwise it is asked for.")
@click.option(
    "--versions", is_flag=True, help="And older versions and delete markers, of a versioned bucket."
)
@click.option("--dry-run", is_flag=True, help="Only say what is there. Writes nothing.")
@said
def clean_wipe(place: str, *, confirm: str | None, versions: bool, dry_run: bool) -> int:
    """Delete all that is below a URL (or of a settings file's `store`), after its name was typed.

    Exit code 2, and nothing has happened, if the name is another.
    """
    from millrace.cleanup import make_confirmation, plan_wipe, survey_wipe, wipe
    from millrace.cleanup.wiping import check_confirmation
    from millrace.progress_bar import ObjectsBar
    from millrace.storage import open_store

    spec = _store_of(place)
    store = open_store(spec, make_folder=False)
    if confirm is not None:
        check_confirmation(store.location, confirm)
    with ObjectsBar() as progress:
        found = survey_wipe(spec, progress=progress)
    echo(f"{store.url} holds {found.objects} objects, {_size(found.size)}.")
    stays = "" if versions else " They stay, and are billed, unless --versions is given."
    if found.versions is None:
        echo("Whether it keeps older versions is not known: these keys may not list them.")
    elif found.versions:
        echo(f"It keeps {_versions(found.versions)} beside them.{stays}")
    if dry_run:
        return 0
    if confirm is None:
        confirm = click.prompt(f"All of it goes. Type {make_confirmation(store.location)} to go on")
        check_confirmation(store.location, confirm)
    with ObjectsBar() as progress:
        plan = plan_wipe(spec)
        progress.start_deleting(plan.objects)
        done = wipe(spec, plan.name, confirm=confirm, versions=versions, progress=progress)
    code = _show_cleaned(done)
    if done.versions:
        echo(
            f"{_versions(done.versions)} are left, and billed"
            + ("." if versions else ": `millrace clean wipe --versions` deletes them, too.")
        )
    elif done.versions is None:
        echo("Whether older versions are left is not known: these keys may not list them.")
    return code


def _versions(found: "VersionCount") -> str:
    return (
        f"{found.versions} older versions ({_size(found.size)}) and {found.markers} delete markers"
    )


@clean.command("uploads")
@click.argument("place")
@click.option(
    "--older-than", type=_DURATION, default="24h", show_default=True, help="Such as 90m, 24h, 3d."
)
@click.option("--prefix", default="", help="Only of keys that begin with this.")
@click.option("--abort", is_flag=True, help="Abort them; otherwise they are only shown.")
@said
def clean_uploads(place: str, *, older_than: timedelta, prefix: str, abort: bool) -> int:
    """Abort uploads that were begun and never finished: no listing shows them, and they cost."""
    from millrace.cleanup import abort_uploads

    spec = _store_of(place)
    found = abort_uploads(spec, older_than=older_than, prefix=prefix, dry_run=not abort)
    for key, size in found.uploads:
        echo(f"{key}  {_size(size)}")
    for failure in found.failures:
        echo(f"{failure.key}: {failure.reason}", err=True)
    word = "Aborted" if abort else "Would abort (with --abort)"
    echo(
        f"{word} {len(found.uploads) - len(found.failures)} uploads, {_size(found.size)}; "
        f"{found.recent} are younger than that."
    )
    return 1 if found.failures else 0


@main.command("cool-down")
@click.argument("settings", type=click.Path(path_type=Path), default="cool-down.yaml")
@click.option("--member", required=True, help="This member's name: no other has it.")
@said
def cool_down(settings: Path, *, member: str) -> int:
    """End an epoch together with the other members, with the checkpoint on this machine's disk.

    Exit code 0 if the epoch has a checkpoint by now, whoever saved it; 1 if not.
    """
    from millrace.checkpoints import MemberSettings, end_epoch
    from millrace.settings import load_settings

    cooled = end_epoch(load_settings(settings, MemberSettings), member)
    echo(
        f"{member}: {cooled.outcome}{cooled.reason and f' ({cooled.reason})'}; sent "
        f"{_size(cooled.sent)}, verified {_size(cooled.checked)} of others, in "
        f"{cooled.seconds:.1f} s"
    )
    return 0 if cooled.is_durable else 1


@main.command()
@click.argument("settings", type=click.Path(path_type=Path), default="aggregate.yaml")
@click.option("--windows", type=click.IntRange(min=1), help="Stop after so many.")
@said
def aggregate(settings: Path, *, windows: int | None) -> int:
    """Merge the gradients of a run, window after window, until it is over."""
    from millrace.gradients import AggregatorSettings, aggregate_run
    from millrace.schemas.chain import count_reasons
    from millrace.settings import load_settings

    config = load_settings(settings, AggregatorSettings)
    if windows is not None:
        config = config.model_copy(update={"windows": windows})
    for link in aggregate_run(config):
        out = count_reasons(link.out.values())
        sent = sum(one.size for one in link.taken.values())
        echo(
            f"window {link.window}, step {link.step}: {len(link.taken)} in, {len(link.out)} out"
            f"{out and f' ({out})'}; {_size(sent)} merged into {_size(link.size)}, after "
            f"{link.seconds:.1f} s"
        )
    return 0


@main.command("catch-up")
@click.argument("url")
@click.argument("run")
@click.option("--version", default="1", show_default=True, help="Of what its workers run.")
@click.option("--to", required=True, metavar="URL", help="Where the weights are saved to.")
@said
def catch_up(url: str, run: str, version: str, to: str) -> int:
    """Bring the newest weights of a run to a disk: a checkpoint that the chain proves, replayed.

    They are saved as a checkpoint of the job RUN below the URL, its tensors in `weights` and, of
    an outer step with momentum, in `moments`.
    """
    from millrace.gradients import ChainLink, load_newest_state
    from millrace.gradients import catch_up as replay
    from millrace.gradients.sync.chain import read_link
    from millrace.gradients.weights import save_weights
    from millrace.keys import ChainKeys
    from millrace.storage import open_store

    store, keys = open_store(url, make_folder=False), ChainKeys(run, version)
    state, window = load_newest_state(store, keys)
    last = replay(store, keys, state, after=window) or read_link(store, keys, window)
    now = last.window if isinstance(last, ChainLink) else 0
    saved = save_weights(state, open_store(to), run, step=last.step, window=now)
    echo(
        f"{run} is at step {last.step}, after window {now}: the checkpoint of window {window}, and "
        f"{now - window} replayed. {_size(saved.size)} in {to}, as job {run}."
    )
    return 0


@main.command()
@click.argument("settings", type=click.Path(path_type=Path), default="prewarm.yaml")
@click.option("--dry-run", is_flag=True, help="Show what would go where; start nothing.")
@said
def prewarm(settings: Path, *, dry_run: bool) -> int:
    """Put the same files on every node of a cluster, each byte out of the store once.

    Exit code 1 if a node is not ready at the end, or, of a dry run, if the run would refuse.
    """
    from millrace.progress_bar import BytesBar
    from millrace.settings import load_settings
    from millrace.swarm import PrewarmSettings, preview
    from millrace.swarm import prewarm as warm

    config = load_settings(settings, PrewarmSettings)
    if dry_run:
        seen = preview(config)
        for path, size, origin in seen.files:
            echo(f"{config.root / path}  {_size(size)}  {origin}")
        files, pieces = (
            formatting.format_count(len(seen.files), "file"),
            formatting.format_count(seen.pieces, "piece"),
        )
        echo(f"{files}, {_size(seen.size)}, in {pieces}.")
        for sentence in seen.refusals:
            echo(f"`millrace prewarm` will refuse: {sentence}", err=True)
        return 1 if seen.refusals else 0
    with BytesBar() as progress:
        report = warm(config, progress=progress)
    _show_prewarmed(report)
    return 0 if all(node.ready for node in report.nodes) else 1


@main.command()
@click.option("--root", type=click.Path(path_type=Path), required=True, help="Files go below it.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="The port; 0 takes a free one, and says which.",
)
@said
def node(root: Path, host: str, port: int) -> int:
    """Let this machine be warmed, until it is stopped. The key is MILLRACE_NODE_KEY."""
    from millrace.swarm.agent import serve

    key = os.environ.get("MILLRACE_NODE_KEY", "")
    if len(key) < 16:
        raise errors.ConfigurationError(
            "Set MILLRACE_NODE_KEY to a secret of 16 characters or more, the same on every node "
            "and in the driver's settings: whoever has it may write files here."
        )
    serve(root, key.encode(), host, port, lambda at: echo(f"Listening at {at}"))
    return 0


@main.command()
@click.argument("settings", type=click.Path(path_type=Path))
@click.option("--attached", is_flag=True, help="End with the process that feeds standard input.")
@said
def work(settings: Path, *, attached: bool) -> int:
    """Run a worker of a campaign: its training script, as its settings say."""
    from millrace.campaigns.worker import launch_worker
    from millrace.processes import adopt_orphans

    adopt_orphans()
    if attached:
        _end_with_input()
    logging.getLogger("millrace").setLevel(logging.INFO)
    return launch_worker(settings)


def _end_with_input() -> None:
    """End this process, all that it has started, and all of its group when standard input does."""
    from millrace.processes import kill_group

    def watch() -> None:
        while os.read(0, 4096):  # not by a reader that the end of the interpreter waits for
            pass
        kill_group()

    threading.Thread(target=watch, name="attached", daemon=True).start()


def _config(path: Path, prefix: str | None) -> "PipelineSettings":
    from millrace.datasets import PipelineSettings
    from millrace.settings import load_settings

    config = load_settings(path, PipelineSettings)
    return config.model_copy(update={"dataset": prefix}) if prefix else config


def _place(settings_or_url: str, dataset: str | None) -> "tuple[Store, str]":
    from millrace.storage import open_store

    if Path(settings_or_url).is_dir():
        settings_or_url = Path(settings_or_url).absolute().as_uri()
    if "://" not in settings_or_url:
        config = _config(Path(settings_or_url), dataset)
        return open_store(config.store, make_folder=False), config.dataset
    if not dataset:
        raise errors.ConfigurationError("After a URL, name the dataset: URL DATASET.")
    return open_store(settings_or_url, make_folder=False), dataset


def _store_of(place: str) -> "StoreSpec":
    """Return the store of a URL, a folder, or a settings file."""
    from millrace.cleanup.rules import StoreOnlySettings
    from millrace.settings import load_settings
    from millrace.storage import StoreSpec

    if "://" in place or Path(place).is_dir():
        return StoreSpec(url=place)
    return load_settings(Path(place), StoreOnlySettings).store


def _show_cleaning(
    rules: "Sequence[Rule]",
    keys: Mapping[int, int],
    size: Mapping[int, int],
    kept: Mapping[str, int],
) -> None:
    from millrace.cleanup import describe_rule, estimate_monthly_savings

    table = make_table("rule", "objects", "bytes", "saves a month")
    for place, rule in enumerate(rules):
        its = size.get(place, 0)
        table.add_row(
            describe_rule(rule),
            f"{keys.get(place, 0)}",
            _size(its),
            f"${estimate_monthly_savings(its):.2f}",
        )
    make_console().print(table)
    for why, count in sorted(kept.items()):
        echo(f"{count} stay: {why}")


def _show_junk(junk: "Sequence[WorkerJunk]") -> None:
    for one in junk[:20]:
        whose = f"{formatting.clean_text(one.worker)} of {formatting.clean_text(one.scope)}"
        echo(
            f"{formatting.format_count(one.objects, 'object')}, {_size(one.size)}, are junk of {whose}"
        )
    if len(junk) > 20:
        echo(f"and junk of {len(junk) - 20} more workers")


def _show_cleaned(done: "CleanupResult") -> int:
    for failure in done.failures[:20]:
        echo(f"{failure.key}: {failure.reason}", err=True)
    if len(done.failures) > 20:
        echo(f"and {len(done.failures) - 20} more", err=True)
    if done.has_given_up:
        echo("So many could not be deleted that the rest was not tried.", err=True)
    for why, count in sorted(done.skipped.items()):
        echo(f"{count} stay: {why}")
    gone = f"; {done.missing} were gone already" if done.missing else ""
    echo(
        f"Deleted {done.deleted_objects} objects, {_size(done.deleted_bytes)}, in {done.seconds:.1f} s{gone}; "
        f"{len(done.failures)} could not be deleted."
    )
    return 1 if done.failures else 0


def _show_prewarmed(report: "PrewarmReport") -> None:
    table = make_table("node", "ready", "cached", "store", "peers", "failed", "seconds")
    for seen in report.nodes:
        state = "yes" if seen.ready else "no"
        table.add_row(
            seen.name,
            state if seen.trusted else f"{state} (untrusted)",
            *(_size(size) for size in (seen.cached, seen.from_store, seen.from_peers)),
            str(seen.failures),
            f"{seen.seconds:.1f}",
        )
    make_console().print(table)
    for seen in report.nodes:
        if seen.why:
            echo(f"{seen.name}: {seen.why}")
    echo(
        f"{report.files} files, {_size(report.size)}, on {sum(n.ready for n in report.nodes)} of "
        f"{len(report.nodes)} nodes in {report.seconds:.1f} s; {_size(report.store_bytes)} left "
        f"the store."
    )
    if report.direct:
        echo(f"Nodes also read from the store what others had: {report.direct}.")
    if report.unverified:
        echo(
            f"{formatting.format_count(report.unverified, 'file')} unverified at the source: nothing "
            "says what the digest should be."
        )
    if report.unconfirmed:
        echo(
            f"Of {report.unconfirmed} of them a part was read by one node alone, which nobody has "
            "confirmed. Give their `sha256`, or run it on two nodes."
        )


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _show_plan(made: "DatasetPlan", config: "PipelineSettings", largest: int | None) -> None:
    table = make_table("split", "partitions", "source bytes")
    for split in sorted({partition.split for partition in made.partitions}):
        own = [partition for partition in made.partitions if partition.split == split]
        size = sum(partition.source_range.size for partition in own)
        table.add_row(split, str(len(own)), _size(size))
    echo(
        f"{made.dataset}: {formatting.format_count(made.source.files, 'file')}, "
        f"{_size(made.source.size)} of "
        f"{made.source.kind} at {made.source.url}"
    )
    if made.source.markers:
        echo(
            f"Skipped: {formatting.format_count(made.source.markers, 'empty object')} that only show "
            f"folders."
        )
    make_console().print(table)
    workers = max(1, config.execution.workers)
    memory = made.layout.shard_bytes * (config.execution.uploads + 1) * workers
    echo(
        f"Shards of at most {_size(made.layout.shard_bytes)}; "
        f"at most {_size(memory)} of them in the memory of {formatting.format_count(workers, 'worker')}."
    )
    if largest is None:
        echo("A larger row is a shard of its own: each worker may hold one, five times.")
    elif largest > made.layout.shard_bytes:
        echo(
            f"The largest sample has {_size(largest)}, and is a shard of its own: with one such in "
            f"each worker it is at most {_size(memory + workers * largest)}."
        )


def _show_report(report: "ShardReport") -> None:
    manifest = report.manifest
    rate = report.new_bytes / report.seconds / 1e6
    echo(
        f"{report.url}: {formatting.format_count(report.samples, 'sample')} in "
        f"{formatting.format_count(len(manifest.shards), 'shard')}, {_size(manifest.size)}, from "
        f"{formatting.format_count(report.partitions, 'partition')}."
    )
    echo(
        f"This run made {formatting.format_count(report.new_shards, 'shard')}, "
        f"{_size(report.new_bytes)} in {report.seconds:.1f} s ({rate:.0f} MB/s)."
    )
    if manifest.quarantined:
        echo(
            f"{formatting.format_count(manifest.quarantined, 'row')} made no sample, and every such "
            f"row is kept with its reason below {report.url}/quarantine/."
        )
    echo(f"Finalized by {report.manifest_key}.")


def _show_status(found: "DatasetStatus") -> None:
    partitions = formatting.format_count(len(found.partitions), "partition")
    state = "complete" if found.is_complete else f"{found.ended_partitions} of {partitions} ended"
    echo(f"{found.dataset}: {state}, from {found.source}")
    table = make_table("partition", "state", "shards", "samples", "bytes", "quarantined", "held by")
    for partition in found.partitions:
        table.add_row(
            partition.name,
            partition.state,
            str(partition.shards),
            str(partition.samples),
            _size(partition.size),
            str(partition.quarantined),
            f"{partition.host} until {partition.until:%H:%M:%S}" if partition.until else "",
        )
    make_console().print(table)
    if found.damaged_records:
        echo(
            f"{formatting.format_count(len(found.damaged_records), 'record')} of its ledger cannot be read:"
        )
        for sentence in found.damaged_records[:10]:
            echo(f"  {sentence}")
