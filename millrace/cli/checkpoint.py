"""``millrace checkpoint``: list, verify, copy, import, retain and pin a job's checkpoints."""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millrace import errors
from millrace.cli.common import (
    DURATION,
    SIZE,
    CommandResult,
    NounGroup,
    add_yes_option,
    confirm,
    print_result,
    show_deletion,
    take_settings_file,
)
from millrace.formatting import format_count, format_size
from millrace.terminal import echo, make_console, make_table

if TYPE_CHECKING:
    from millrace.storage import Store


@click.group(cls=NounGroup)
def checkpoint() -> None:
    r"""List, verify, copy, import, retain and pin a job's checkpoints.

    \b
    Example:
      millrace checkpoint list r2://ACCOUNT/BUCKET my-job
      millrace checkpoint save file:///scratch my-job r2://ACCOUNT/BUCKET
    """


@checkpoint.command("list")
@click.argument("url")
@click.argument("job", required=False)
@print_result
def list_checkpoints(url: str, job: str | None) -> CommandResult:
    r"""List a job's checkpoints, newest first; without JOB, the jobs below the URL.

    For each job, the newest complete checkpoint is shown, and the number of steps, also of those
    whose save is not complete. Exit code 1 if a file is missing, or metadata cannot be read.

    \b
    Example: millrace checkpoint list r2://ACCOUNT/BUCKET
             millrace checkpoint list r2://ACCOUNT/BUCKET my-job
    """
    return _list_jobs(url) if job is None else _survey(url, job, with_digests=False)


@checkpoint.command()
@click.argument("url")
@click.argument("job")
@print_result
def verify(url: str, job: str) -> CommandResult:
    r"""Read every byte of a job's checkpoints. Exit code 1 if a checkpoint is damaged.

    \b
    Example: millrace checkpoint verify r2://ACCOUNT/BUCKET my-job
    """
    return _survey(url, job, with_digests=True)


def _list_jobs(url: str) -> CommandResult:
    from millrace.checkpoints import find_jobs, list_steps, survey
    from millrace.storage import open_store

    store = open_store(url, make_folder=False)
    table = make_table("job", "newest step", "saved", "bytes", "steps")
    faults: list[str] = []
    rows: list[dict[str, object]] = []
    for job in sorted(find_jobs(store)):
        steps = len(list_steps(store, job))
        if not steps:
            continue
        step, found = next(survey(store, job), (None, None))
        saved, size = "", ""
        row: dict[str, object] = {
            "job": job, "newest_step": step, "saved": None, "bytes": None, "steps": steps,
        }  # fmt: skip
        if isinstance(found, errors.CorruptError):
            faults.append(str(found))
            saved = "unreadable"
            row["error"] = str(found)
        elif found is not None:
            saved, size = f"{found.saved:%Y-%m-%d %H:%M}", format_size(found.size)
            row |= {"saved": found.saved, "bytes": found.size}
        rows.append(row)
        table.add_row(job, "none" if step is None else str(step), saved, size, str(steps))
    if not rows:
        raise errors.NotFoundError(_explain_no_job(store))
    make_console().print(table)
    for fault in faults:
        echo(fault)
    return CommandResult(rows, 1 if faults else 0)


def _explain_no_job(store: "Store") -> str:
    """Return a sentence about a URL without jobs, such as that of a job itself."""
    from millrace.keys.checkpoints import CHECKPOINTS
    from millrace.storage import list_folders

    above, _, name = store.url.rpartition("/")
    has_folder_above = store.location.prefix or not store.is_remote
    if has_folder_above and CHECKPOINTS in list_folders(store):
        return f"{store.url} is the folder of a job: write millrace checkpoint list {above} {name}."
    return f"There is no checkpoint below {store.url}."


def _survey(url: str, job: str, *, with_digests: bool) -> CommandResult:
    from millrace.checkpoints import VerifyDepth, list_steps, read_pins, survey
    from millrace.checkpoints import verify as verify_checkpoint
    from millrace.checkpoints.find import is_removed
    from millrace.storage import open_store

    store = open_store(url, make_folder=False)
    pins = read_pins(store, job, list_steps(store, job))
    table = make_table("step", "files", "bytes", "saved", "run", "state", *["pin"] * bool(pins))
    faults: list[str] = []
    rows: list[dict[str, object]] = []
    depth = VerifyDepth.DIGESTS if with_digests else VerifyDepth.SIZES
    for step, found in survey(store, job):
        note = [pins.get(step, "")] if pins else []
        if isinstance(found, errors.CorruptError):
            faults.append(str(found))
            rows.append(
                {
                    "step": step, "state": "unreadable", "pin": pins.get(step),
                    "faults": [str(found)],
                }
            )  # fmt: skip
            table.add_row(str(step), "", "", "", "", "unreadable", *note)
            continue
        damage = verify_checkpoint(store, found, check=depth)
        if damage and is_removed(store, found):
            continue
        faults += damage.values()
        state = "damaged" if damage else "verified" if with_digests else "all files there"
        files, saved = len(found.parts), f"{found.saved:%Y-%m-%d %H:%M}"
        size = format_size(found.size)
        table.add_row(str(step), str(files), size, saved, found.run, state, *note)
        rows.append(
            {
                "step": step, "files": files, "bytes": found.size, "saved": found.saved,
                "run": found.run, "state": state, "pin": pins.get(step),
                "faults": list(damage.values()),
            }
        )  # fmt: skip
    if not rows:
        raise _make_missing_error(store, job)
    make_console().print(table)
    for fault in faults:
        echo(fault)
    return CommandResult(rows, 1 if faults else 0)


def _make_missing_error(store: "Store", job: str) -> errors.NotFoundError:
    return errors.NotFoundError(
        f"{store.make_url(job)} has no checkpoint. `millrace checkpoint list {store.url}` shows "
        "the jobs that have some."
    )


@checkpoint.command()
@click.argument("source")
@click.argument("job")
@click.argument("destination")
@click.option("--step", type=click.IntRange(0), help="Step to copy.  [default: the newest]")
@click.option("--as", "new_job", metavar="JOB", help="Name of the job at the destination.")
@print_result
def save(
    source: str, job: str, destination: str, *, step: int | None, new_job: str | None
) -> CommandResult:
    r"""Copy a checkpoint from a folder or a bucket into a bucket or the Hugging Face Hub.

    Every file is verified on both sides. The checkpoint is committed once. After a stop, the same
    command sends only the missing files.

    \b
    Example: millrace checkpoint save file:///scratch my-job r2://ACCOUNT/BUCKET
             millrace checkpoint save r2://ACCOUNT/BUCKET my-job hf://you/model
    """
    from millrace.audit import check_checkpoint_destination
    from millrace.checkpoints import SavedSource, StoreDestination, open_destination
    from millrace.checkpoints.destinations import copy_and_measure

    origin, wanted = SavedSource(url=source, job=job, step=step).open()
    target, name = open_destination(destination), new_job or job
    check_checkpoint_destination(target, name)
    done = copy_and_measure(StoreDestination(origin), wanted, target, name)
    saved = done.checkpoint
    echo(
        f"Step {saved.step} of {name} is in {done.url}: {format_size(saved.size)} in "
        f"{format_count(len(saved.parts), 'file')}, every byte verified. This run sent "
        f"{format_size(done.sent_bytes)} in {done.seconds:.1f} s."
    )
    data = {
        "url": done.url, "job": name, "step": saved.step, "bytes": saved.size,
        "files": len(saved.parts), "sent_bytes": done.sent_bytes, "seconds": done.seconds,
    }  # fmt: skip
    return CommandResult(data)


@checkpoint.command("import")
@click.argument("source")
@click.argument("job")
@click.argument("destination")
@click.option(
    "--step",
    type=click.IntRange(0),
    help="Step of the checkpoint, and of the folder to import if there are several.  [default: "
    "the files of the folder itself, or the newest folder, and the step that its name says, or 0]",
)
@click.option(
    "--only", default="", metavar="NAME", help="Dict to import from a file of torch.save."
)
@print_result
def import_foreign(
    source: str, job: str, destination: str, *, step: int | None, only: str
) -> CommandResult:
    r"""Save weights of another tool as a checkpoint of a job.

    SOURCE is a folder or a file, a path, a URL, or a model of the Hugging Face Hub. A folder has
    model.safetensors, pytorch_model.bin or another file of torch.save, an index with its files, or
    folders such as step_1000 with these. No code of a file is executed. A file of torch.save is
    refused if it has other values than tensors, numbers, text, lists and dicts; with --only, only
    those of one dict, such as "model", are looked at.

    \b
    Example: millrace checkpoint import hf://owner/model my-job r2://ACCOUNT/BUCKET
             millrace checkpoint import runs/step_1000/model.bin my-job r2://ACCOUNT/BUCKET
    """
    from millrace.audit import check_checkpoint_destination
    from millrace.checkpoints import StoreDestination, import_checkpoint
    from millrace.storage import open_store

    store = open_store(destination)
    check_checkpoint_destination(StoreDestination(store), job)
    done = import_checkpoint(source, store, job, step=step, only=only)
    saved = done.checkpoint
    echo(
        f"Step {saved.step} of {job} is in {store.url}: {format_count(done.tensors, 'tensor')}, "
        f"{format_size(saved.size)} in {format_count(len(saved.parts), 'file')}, from "
        f"{format_count(len(done.files), 'file')} of {done.source} ({done.files[0]}"
        f"{', ...' if done.files[1:] else ''})."
    )
    data = {
        "url": store.url, "job": job, "step": saved.step, "bytes": saved.size,
        "files": len(saved.parts), "tensors": done.tensors, "source": done.source,
        "imported": done.files,
    }  # fmt: skip
    return CommandResult(data)


@checkpoint.command()
@click.argument("url")
@click.argument("job")
@click.option(
    "--last",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Number of newest checkpoints to keep.",
)
@click.option(
    "--every",
    type=click.IntRange(1),
    help="Also keep checkpoints whose step is a multiple of this number.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted; delete nothing.")
@add_yes_option
@print_result
def retain(
    url: str, job: str, *, last: int, every: int | None, dry_run: bool, yes: bool
) -> CommandResult:
    r"""Delete the checkpoints that no rule keeps. The newest verified checkpoint always stays.

    The command shows which checkpoints stay and which go, and asks before it deletes.

    \b
    Example: millrace checkpoint retain r2://ACCOUNT/BUCKET my-job --last 3 --every 1000
    """
    from millrace.checkpoints import RetentionSettings, apply_retention, plan_retention
    from millrace.storage import open_store

    store = open_store(url, make_folder=False)
    plan = plan_retention(store, job, RetentionSettings(last=last, every=every))
    if not plan.kept and not plan.removals:
        raise _make_missing_error(store, job)
    for step, reason in sorted(plan.kept.items(), reverse=True):
        echo(f"step {step} stays: {reason}")
    for step in reversed(plan.removed):
        echo(f"step {step} goes")
    count = f"{format_count(len(plan.removals), 'object')}, {format_size(plan.size)}"
    data: dict[str, object] = {
        "kept": plan.kept, "removed": plan.removed, "objects": len(plan.removals),
        "bytes": plan.size,
    }  # fmt: skip
    if dry_run or not plan.removals:
        echo(f"Would delete {count}.")
        return CommandResult(data)
    if not confirm(f"Delete {count}?", yes=yes):
        return CommandResult(data, 1)
    done = apply_retention(store, plan)
    code = show_deletion(done)
    return CommandResult(data | done.to_dict(), code)


@checkpoint.command()
@click.argument("url")
@click.argument("job")
@click.argument("step", type=click.IntRange(0))
@click.option("--reason", default="by hand", show_default=True, help="Reason, for later readers.")
@print_result
def pin(url: str, job: str, step: int, *, reason: str) -> CommandResult:
    r"""Protect a checkpoint from all rules of retention and cleanup, until `unpin`.

    \b
    Example: millrace checkpoint pin r2://ACCOUNT/BUCKET my-job 1000 --reason "the paper's model"
    """
    from millrace.checkpoints import pin as pin_checkpoint
    from millrace.storage import open_store

    pinned = pin_checkpoint(open_store(url, make_folder=False), job, step, reason)
    echo(f"Step {step} of {job} is pinned: {pinned.reason}")
    return CommandResult({"job": job, "step": step, "reason": pinned.reason})


@checkpoint.command()
@click.argument("url")
@click.argument("job")
@click.argument("step", type=click.IntRange(0))
@print_result
def unpin(url: str, job: str, step: int) -> CommandResult:
    r"""Remove the pin of a checkpoint, so that the rules decide again. Nothing else is deleted.

    \b
    Example: millrace checkpoint unpin r2://ACCOUNT/BUCKET my-job 1000
    """
    from millrace.checkpoints import unpin as unpin_checkpoint
    from millrace.keys.checkpoints import CheckpointKeys
    from millrace.storage import exists, open_store

    store, keys = open_store(url, make_folder=False), CheckpointKeys(job)
    if not any(
        exists(store, key) for key in (keys.make_pin_key(step), keys.make_metadata_key(step))
    ):
        raise errors.NotFoundError(
            f"{store.make_url(keys.make_folder_prefix(step))} has neither a pin nor a checkpoint: "
            "correct the job or the step."
        )
    unpin_checkpoint(store, job, step)
    echo(f"Step {step} of {job} has no pin.")
    return CommandResult({"job": job, "step": step})


@checkpoint.command()
@click.argument("url")
@click.argument("job")
@click.option("--size", type=SIZE, default="0", help="Size of a checkpoint, such as 80GB.")
@click.option("--within", type=DURATION, help="Longest time that a save may take, such as 20m.")
@print_result
def probe(url: str, job: str, *, size: int, within: timedelta | None) -> CommandResult:
    r"""Check whether a job can save its checkpoints at a URL.

    Exit code 0: ready. Otherwise: 11 read only, 12 denied, 13 not found, 14 throttled, 15
    unreachable, 16 wrong bytes, 17 no space, 18 too slow, 19 unknown.

    \b
    Example: millrace checkpoint probe r2://ACCOUNT/BUCKET my-job --size 80GB --within 20m
    """
    from millrace.audit import probe as probe_destination
    from millrace.checkpoints import open_destination

    found = probe_destination(open_destination(url), job, size=size, within=within)
    echo(f"{found.verdict}: {found.reason}")
    if found.rate:
        echo(f"One upload: {found.rate / 1e6:.1f} MB/s.")
    if found.body_check:
        echo(found.body_check)
    return CommandResult(found, found.verdict.exit_code)


@checkpoint.command()
@take_settings_file("cooldown.yaml")
@click.option("--member", required=True, help="Unique name of this member.")
@print_result
def cooldown(settings: Path, *, member: str) -> CommandResult:
    r"""End an epoch together with the other members, with the checkpoint on this machine's disk.

    Exit code 0 if a member has saved the checkpoint of the epoch; otherwise 1.

    \b
    Example: millrace checkpoint cooldown cooldown.yaml --member node-3
    """
    from millrace.checkpoints import MemberSettings, end_epoch
    from millrace.settings import load_settings

    ended = end_epoch(load_settings(settings, MemberSettings), member)
    echo(
        f"{member}: {ended.outcome}{ended.reason and f' ({ended.reason})'}; sent "
        f"{format_size(ended.sent)}, verified {format_size(ended.checked)} of others, in "
        f"{ended.seconds:.1f} s"
    )
    data = {
        "member": member, "outcome": ended.outcome, "reason": ended.reason,
        "sent_bytes": ended.sent, "verified_bytes": ended.checked, "seconds": ended.seconds,
    }  # fmt: skip
    return CommandResult(data, 0 if ended.is_durable else 1)


@checkpoint.command("clear-votes")
@click.argument("url")
@click.argument("job")
@click.argument("epoch", type=click.IntRange(0))
@add_yes_option
@print_result
def clear_votes(url: str, job: str, *, epoch: int, yes: bool) -> CommandResult:
    r"""Delete the votes of an epoch that has not ended, so that its members can vote again.

    For an epoch whose members were killed after their votes, and came back with another content or
    under other names. Stop all members first. No checkpoint is deleted. The command asks before it
    deletes.

    \b
    Example: millrace checkpoint clear-votes r2://ACCOUNT/BUCKET my-job 5
    """
    from millrace.checkpoints import clear_votes
    from millrace.storage import open_store

    store = open_store(url, make_folder=False)
    if not confirm(f"Delete the votes of epoch {epoch} of {store.make_url(job)}?", yes=yes):
        return CommandResult({"job": job, "epoch": epoch, "members": []}, 1)
    members = clear_votes(store, job, epoch)
    echo(
        f"Epoch {epoch} of {job} has no votes any more. Deleted the records of "
        f"{format_count(len(members), 'member')}. Start the members again."
    )
    return CommandResult({"job": job, "epoch": epoch, "members": members})
