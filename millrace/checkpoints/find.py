"""Listing and verification of checkpoints, and quarantine of damaged ones.

No object points to the newest checkpoint. A listing finds it, and cannot be out of date.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from typing import NoReturn

from millrace import errors
from millrace.checkpoints.block_digests import read_block_list
from millrace.checkpoints.progress_events import CheckpointDamaged
from millrace.digest import compute_digest, dump_canonical_json
from millrace.keys.checkpoints import CHECKPOINTS, EPOCH_FOLDERS, CheckpointKeys
from millrace.keys.names import MAX_DEPTH
from millrace.progress import Progress, ignore_event
from millrace.records import Commit, commit_once, decode_record, fetch, list_differences
from millrace.schemas.checkpoint import Checkpoint, Part, Quarantine, RankShare, TensorRecord
from millrace.storage import (
    Store,
    copy,
    create,
    delete,
    describe_difference,
    exists,
    list_folders,
    list_objects,
    read,
)
from millrace.threads import choose_thread_count

_LEAST_THREADS, _MOST_THREADS = 4, 16  # of which each verifies a file


class VerifyDepth(StrEnum):
    """Depth of the verification of a checkpoint."""

    SIZES = "sizes"
    DIGESTS = "digests"


def find_jobs(store: Store, prefix: str = "", *, deepest: int = MAX_DEPTH) -> Iterator[str]:
    """Yield the names of jobs with a folder of checkpoints. One listing per folder.

    The folders of a job with the ends of its epochs are not searched.

    Args:
        store: Store to search.
        prefix: Folder to search; it ends in ``/``, or is empty.
        deepest: Largest number of folders in a job's name below the prefix; by default all that a
            name can have.
    """
    yield from _iterate_jobs(store, prefix, list_folders(store, prefix), deepest)


def _iterate_jobs(store: Store, prefix: str, names: Iterable[str], deepest: int) -> Iterator[str]:
    for name in names:
        try:
            keys = CheckpointKeys(prefix + name)
        except errors.ConfigurationError:
            continue  # no job can have this name
        inner = set(list_folders(store, f"{keys.job}/"))
        if CHECKPOINTS in inner:
            yield keys.job
            inner -= EPOCH_FOLDERS
        if deepest > 1:
            yield from _iterate_jobs(store, f"{keys.job}/", sorted(inner), deepest - 1)


def list_steps(store: Store, job: str) -> list[int]:
    """Return the steps that have any object, oldest first. Not all of them are complete.

    One listing.
    """
    keys = CheckpointKeys(job)
    found = (keys.parse_folder(name) for name in list_folders(store, keys.prefix))
    return sorted(step for step in found if step is not None)


def read_checkpoint(store: Store, job: str, step: int) -> Checkpoint:
    """Return the metadata of a step's checkpoint. The files are not read.

    Raises:
        NotFoundError: There is no complete checkpoint of this step.
        CorruptError: The metadata is damaged, or belongs to another job or step.
    """
    key = CheckpointKeys(job).make_metadata_key(step)
    return check_metadata(store.make_url(key), fetch(store, key, Checkpoint), job, step)


def find_checkpoint(store: Store, job: str, step: int) -> Checkpoint | None:
    """Return the metadata of a step's checkpoint; None if a save of the step commits its own.

    Metadata that is damaged, or lacks files, counts as none, since a save moves it away, or stores
    the files.

    Raises:
        VersionError: Another version of Millrace wrote the metadata of this step.
    """
    try:
        found = read_checkpoint(store, job, step)
    except errors.VersionError:
        raise
    except (errors.NotFoundError, errors.CorruptError):
        return None
    return None if find_missing_parts(store, job, found.parts) else found


def check_metadata(where: str, found: Checkpoint, job: str, step: int) -> Checkpoint:
    """Return the metadata of a checkpoint, checked against its job, step and digests.

    Raises:
        CorruptError: The metadata was changed, or belongs to another job or step.
    """
    if (found.job, found.step) != (job, step):
        raise errors.CorruptError(
            f"{where} is the metadata of the job {found.job} at step {found.step}. "
            + _explain_other_name(where, found, job, step)
        )
    whole = found.digest == _compute_digest(found)
    if not whole or compute_root(found.parts, found.tensors) != found.root:
        raise errors.CorruptError(
            f"{where} was changed after its commit: it does not match its digests. Load another "
            "step, or save this one again."
        )
    return found


def _explain_other_name(where: str, found: Checkpoint, job: str, step: int) -> str:
    """Return what to do about metadata of another job or step than its key has.

    Args:
        where: URL of the metadata.
        found: Metadata.
        job: Job in the key.
        step: Step in the key.
    """
    above, is_there, _ = where.rpartition(f"/{found.job}/{CHECKPOINTS}/")
    if found.step == step and job.endswith(f"/{found.job}"):
        folder = f"the folder {job.removesuffix(f'/{found.job}')}"
    elif found.step == step and is_there and found.job.endswith(f"/{job}"):
        folder = above
    else:
        return (
            "Another program copied it there. Load it where it was saved, and copy checkpoints "
            "with `millrace checkpoint save`."
        )
    return f"Open the URL of {folder}, and name the job {found.job}."


def add_digest(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint's metadata with the digest of all its other fields."""
    return checkpoint.model_copy(update={"digest": _compute_digest(checkpoint)})


def _compute_digest(checkpoint: Checkpoint) -> str:
    return compute_digest(
        dump_canonical_json(checkpoint.model_dump(mode="json", exclude={"digest"}))
    )


def commit_checkpoint(store: Store, made: Checkpoint) -> Commit[Checkpoint]:
    """Commit a checkpoint's metadata, unless its step already has metadata.

    Damaged metadata of the step is moved away first, and so is that of another content whose files
    are not all there.

    Args:
        store: Store of the job.
        made: Metadata of a checkpoint whose files are all saved.

    Raises:
        VersionError: Another version of Millrace wrote the metadata of this step.
    """
    key = CheckpointKeys(made.job).make_metadata_key(made.step)
    sealed = add_digest(made)
    try:
        try:
            commit = commit_once(store, key, sealed)
        except errors.ExistsError:  # another process has removed that metadata meanwhile
            commit = commit_once(store, key, sealed)
        if not commit.mine:
            there = check_metadata(store.make_url(key), commit.record, made.job, made.step)
            replaceable = is_replaceable(store, there, made.root)
            if replaceable and (damage := verify(store, there, check=VerifyDepth.SIZES)):
                _move_away(store, there, damage)
                return commit_once(store, key, sealed)
    except errors.VersionError:
        raise
    except errors.CorruptError as error:
        there = quarantine_metadata(store, made.job, made.step, str(error))
        return commit_once(store, key, sealed) if there is None else Commit(there, mine=False)
    return commit


def is_replaceable(store: Store, there: Checkpoint, root: str) -> bool:
    """Decide whether committed metadata makes way for another content, since it lacks files.

    Args:
        store: Store of the checkpoint.
        there: Committed checkpoint.
        root: Digest of the content to commit.
    """
    return there.root != root and bool(find_missing_parts(store, there.job, there.parts))


def check_content(where: str, there: Checkpoint, root: str) -> Checkpoint:
    """Return the committed checkpoint of a step, if its content is the expected one.

    Args:
        where: URL of the metadata, for error messages.
        there: Committed checkpoint.
        root: Digest of the expected content.

    Raises:
        ConflictError: The committed checkpoint has another content.
    """
    if there.root != root:
        raise errors.ConflictError(
            f"{where} is a checkpoint of the same step with another content: give this job another "
            "name, or resume from that one."
        )
    return there


def check_description(
    where: str, there: Checkpoint, expected: Checkpoint | RankShare
) -> Checkpoint:
    """Return the committed checkpoint of a step, if its position and notes are the expected ones.

    Args:
        where: URL of the metadata, for error messages.
        there: Committed checkpoint.
        expected: Checkpoint, or share of the first rank, with the expected position and notes.

    Raises:
        ConflictError: The committed checkpoint has another position or other notes.
    """
    wanted = {"position", "notes"}
    found = [name for name in list_differences(expected, there) if name in wanted]
    if found:
        raise errors.ConflictError(
            f"{where} is a checkpoint of the same step with the same tensors, and differs in "
            f"{' and '.join(found)}: save under another step, or give this job another name."
        )
    return there


def survey(store: Store, job: str) -> Iterator[tuple[int, Checkpoint | errors.CorruptError]]:
    """Yield each step of a job with its complete checkpoint, or with the error of its metadata.

    The newest step comes first. The files are not read.
    """
    for step in reversed(list_steps(store, job)):
        try:
            yield step, read_checkpoint(store, job, step)
        except errors.NotFoundError:
            continue  # an incomplete checkpoint
        except errors.CorruptError as error:
            yield step, error


def iterate_checkpoints(store: Store, job: str) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints of a job, newest first. The files are not read."""
    return (found for _, found in survey(store, job) if isinstance(found, Checkpoint))


def find_newest(store: Store, job: str) -> Checkpoint | None:
    """Return the newest complete checkpoint whose metadata can be read, or None.

    The files are not read.
    """
    return next(iterate_checkpoints(store, job), None)


def read_newest(store: Store, job: str) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None. No older one is taken for it.

    Raises:
        CorruptError: The metadata of the newest one cannot be read.
    """
    _, found = next(survey(store, job), (0, None))
    if isinstance(found, errors.CorruptError):
        _raise_unreadable(found)
    return found


def _raise_unreadable(error: errors.CorruptError) -> NoReturn:
    """Raise the error of the newest checkpoint's metadata, and say how to take an older one."""
    raise type(error)(f"{error} To take an older checkpoint, name its step (`--step`).") from error


def verify(
    store: Store, checkpoint: Checkpoint, *, check: VerifyDepth = VerifyDepth.DIGESTS
) -> dict[str, str]:
    """Verify every file of a checkpoint, as `verify_parts` does."""
    return verify_parts(store, checkpoint.job, checkpoint.parts, check=check)


def verify_parts(
    store: Store, job: str, parts: Sequence[Part], *, check: VerifyDepth = VerifyDepth.DIGESTS
) -> dict[str, str]:
    """Verify files of a job's checkpoints.

    A file that seems damaged is read a second time, in case its bytes changed in transit. The
    sentence names the blocks that differ, if their digests are stored.

    Returns:
        Sentence about the damage of each damaged file, by the file's digest.

    Raises:
        UnavailableError: The store failed for longer than its time budget.
    """

    def check_part(part: Part) -> str:
        if not _find_damage(store, job, part, check):
            return ""
        blocks = read_block_list(store, CheckpointKeys(job), part)
        return _find_damage(store, job, part, check, blocks)

    threads = choose_thread_count(_LEAST_THREADS, _MOST_THREADS)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        found = zip(parts, pool.map(check_part, parts), strict=True)
        return {part.digest: damage for part, damage in found if damage}


def is_removed(store: Store, checkpoint: Checkpoint) -> bool:
    """Decide whether retention has removed a checkpoint since its metadata was read.

    One request if its metadata is there. A reader that moves a damaged checkpoint away leaves a
    record.
    """
    keys = CheckpointKeys(checkpoint.job)
    moved = keys.make_quarantine_key(checkpoint.step, checkpoint.root)
    return not any(exists(store, key) for key in (keys.make_metadata_key(checkpoint.step), moved))


def find_missing_parts(store: Store, job: str, parts: Collection[Part]) -> list[Part]:
    """Return the files that the store lacks, or has with another size. One listing per step."""
    keys, sizes = CheckpointKeys(job), _list_sizes(store, job, parts)
    wanted = ((keys.make_part_key(part.step, part.digest), part) for part in parts)
    return [part for key, part in wanted if sizes.get(key) != part.size]


def find_bad_parts(
    store: Store,
    job: str,
    parts: Collection[Part],
    verified: Set[Part],
    *,
    check: VerifyDepth = VerifyDepth.DIGESTS,
) -> list[Part]:
    """Return the files that the store lacks, or has with other bytes.

    Args:
        store: Store of the files.
        job: Name of the job.
        parts: Files to look for.
        verified: Files that the caller has uploaded or verified. Only their sizes are compared, by
            one listing per step.
        check: Depth of the verification of the other files.
    """
    known = [part for part in dict.fromkeys(parts) if part in verified]
    others = [part for part in dict.fromkeys(parts) if part not in verified]
    damage = verify_parts(store, job, others, check=check)
    bad = [part for part in others if part.digest in damage]
    return find_missing_parts(store, job, known) + bad


def _list_sizes(store: Store, job: str, parts: Collection[Part]) -> dict[str, int]:
    """Return the sizes of all files in the folders of some files, by key. One listing per step."""
    keys = CheckpointKeys(job)
    prefixes = {keys.make_parts_prefix(part.step) for part in parts}
    return {stat.key: stat.size for prefix in prefixes for stat in list_objects(store, prefix)}


def find_newest_verified(
    store: Store,
    job: str,
    *,
    check: VerifyDepth = VerifyDepth.DIGESTS,
    progress: Progress = ignore_event,
) -> Checkpoint | None:
    """Return the newest checkpoint that passes verification, or None.

    A checkpoint with a damaged file is moved away (`quarantine`), and an older one is verified.
    A checkpoint that lacks files is skipped, and stays, since it may be a copy that is being made.
    A checkpoint with damaged metadata is skipped, and stays until its step is saved again. If a
    reader moved it, the reader could delete metadata that a saver wrote in the meantime. Metadata
    of another version of Millrace is not damaged: no older checkpoint is taken for it.

    Args:
        store: Store of the job.
        job: Name of the job.
        check: Depth of the verification. Sizes take one request per file, digests all bytes.
        progress: Receives `CheckpointDamaged` for each damaged checkpoint.

    Raises:
        UnavailableError: The store failed for longer than its time budget.
        VersionError: Another version of Millrace wrote the newest checkpoint.
    """
    for step, surveyed in survey(store, job):
        found = surveyed
        if isinstance(found, errors.VersionError):
            _raise_unreadable(found)
        if isinstance(found, errors.CorruptError):
            progress(CheckpointDamaged(job=job, step=step, damage=str(found)))
            try:
                found = read_checkpoint(store, job, step)  # perhaps damaged in transit
            except (errors.NotFoundError, errors.CorruptError):
                continue
        damage = verify(store, found, check=check)
        if not damage:
            return found
        progress(CheckpointDamaged(job=job, step=step, damage="; ".join(damage.values())))
        # Readers without the right to write, or without space, continue.
        with suppress(errors.DeniedError, errors.NoSpaceError):
            if not quarantine(store, found, damage):
                return found  # another process has replaced the damaged files
    return None


def quarantine_metadata(store: Store, job: str, step: int, damage: str) -> Checkpoint | None:
    """Move damaged metadata of a step away, so that the step can be saved again.

    The metadata is read again first, in case its bytes changed in transit. The bytes are kept
    under their digest, beside the record of the quarantine. The files of the step are not moved.

    Args:
        store: Store of the job.
        job: Name of the job.
        step: Step of the checkpoint.
        damage: Sentence about the damage, for the record.

    Returns:
        The checkpoint if the second read is undamaged; None after the move.

    Raises:
        DeniedError: The credentials may not move the metadata.
    """
    keys = CheckpointKeys(job)
    key = keys.make_metadata_key(step)
    where = store.make_url(key)
    try:
        body = read(store, key, max_size=Checkpoint.record_bytes)
    except errors.NotFoundError:
        return None
    try:
        return check_metadata(where, decode_record(where, Checkpoint, body)[0], job, step)
    except errors.VersionError:
        raise
    except errors.CorruptError:
        pass
    digest = compute_digest(body)
    record = Quarantine(checkpoint=None, damage=(damage,))
    commit_once(store, keys.make_quarantine_key(step, digest), record)
    with suppress(errors.ExistsError):
        create(store, keys.make_damaged_key(step, digest), body)
    with suppress(errors.NotFoundError):
        again = read(store, key, max_size=Checkpoint.record_bytes)
        if again != body:  # another process saved the step in the meantime
            return read_checkpoint(store, job, step)
        failures = delete(store, [key])
        if failures:
            raise errors.DeniedError(
                f"{where} is damaged and could not be deleted ({failures[0].reason}). Allow "
                "deletion there, or delete it by hand."
            )
    return None


def quarantine(store: Store, checkpoint: Checkpoint, damage: dict[str, str]) -> dict[str, str]:
    """Move a damaged checkpoint away, so that readers skip it and its step can be saved again.

    The damaged files are read once more first, since another process may have replaced them after
    they were verified. The metadata is recorded, and the damaged bytes are kept beside the record.
    If the step's metadata is no longer that of the checkpoint, nothing is moved. The same holds if
    files are only missing: a copy that is being made may have its metadata first.

    Args:
        store: Store of the checkpoint.
        checkpoint: Damaged checkpoint.
        damage: Damage that `verify` returned.

    Returns:
        Damage that is still there; empty if all files have been replaced, and nothing was moved.

    Raises:
        DeniedError: The credentials may not move objects.
        NoSpaceError: The disk of the folder is full.
    """
    keys = CheckpointKeys(checkpoint.job)
    suspects = [part for part in checkpoint.parts if part.digest in damage]
    still = verify_parts(store, checkpoint.job, suspects)
    damaged = [part for part in suspects if part.digest in still]
    sizes = _list_sizes(store, checkpoint.job, damaged)
    if any(keys.make_part_key(part.step, part.digest) in sizes for part in damaged):
        _move_away(store, checkpoint, still)
    return still


def _move_away(store: Store, checkpoint: Checkpoint, damage: dict[str, str]) -> None:
    """Move the metadata of a checkpoint and its damaged files away, as `quarantine` does."""
    keys = CheckpointKeys(checkpoint.job)
    record = Quarantine(checkpoint=checkpoint, damage=tuple(damage.values()))
    commit_once(store, keys.make_quarantine_key(checkpoint.step, checkpoint.root), record)
    try:
        if read_checkpoint(store, checkpoint.job, checkpoint.step) != checkpoint:
            return
    except (errors.NotFoundError, errors.CorruptError):
        return
    moved: list[str] = []
    for part in checkpoint.parts:
        if part.digest in damage:
            key = keys.make_part_key(part.step, part.digest)
            with suppress(errors.NotFoundError):
                copy(store, key, keys.make_damaged_key(part.step, part.digest))
                moved.append(key)
    # The metadata goes last. If this process is killed before, the damage is found again.
    for key in (*moved, keys.make_metadata_key(checkpoint.step)):
        failures = delete(store, [key])
        if failures:
            raise errors.DeniedError(
                f"{store.make_url(key)} is damaged and could not be deleted "
                f"({failures[0].reason}). Allow deletion there, or delete it by hand."
            )


def compute_root(parts: Iterable[Part], tensors: Mapping[str, TensorRecord]) -> str:
    """Return the digest of a checkpoint's content. It does not depend on the step or the time."""
    content = {
        "parts": [[part.digest, part.size] for part in parts],
        "tensors": {name: record.model_dump(mode="json") for name, record in tensors.items()},
    }
    return compute_digest(dump_canonical_json(content))


def compute_rest(checkpoint: Checkpoint) -> str:
    """Return the digest of a checkpoint's position and run, on which members agree."""
    rest = {"position": checkpoint.position, "run": checkpoint.run}
    return compute_digest(dump_canonical_json(rest))


def _find_damage(
    store: Store, job: str, part: Part, check: VerifyDepth, blocks: bytes = b""
) -> str:
    """Return a sentence about the damage of a file; empty if there is none."""
    key = CheckpointKeys(job).make_part_key(part.step, part.digest)
    digest = part.digest if check is VerifyDepth.DIGESTS else None
    found = describe_difference(store, key, part.size, digest, blocks=blocks)
    return found and f"{store.make_url(key)}: {found}."
