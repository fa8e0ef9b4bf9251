"""Find checkpoints by listing what was committed, verify them, and move damaged ones away.

No pointer is kept to the newest one: a pointer can be wrong, and a listing is what is there.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum

from millrace import errors
from millrace.digest import compute_sha256, dump_canonical_json
from millrace.keys.checkpoints import CHECKPOINTS, CheckpointKeys
from millrace.progress import Event, Progress, ignore_event
from millrace.records import Commit, commit_once, decode_record, fetch
from millrace.schemas.checkpoint import Checkpoint, Part, Quarantine, TensorRecord
from millrace.storage import Store, copy, create, delete, describe_difference, list_folders, read

_CONCURRENCY = 4


class VerifyDepth(StrEnum):
    """Depth of the verification of a checkpoint."""

    SIZES = "sizes"
    DIGESTS = "digests"


def find_jobs(store: Store, prefix: str = "", *, deepest: int = 8) -> Iterator[str]:
    """Yield the jobs below a store's URL that may have checkpoints. One listing a folder.

    Args:
        store: Where to look.
        prefix: Below which folder; it ends in ``/``, or is empty.
        deepest: How many folders deep a job's name may be.
    """
    for name in list_folders(store, prefix):
        try:
            keys = CheckpointKeys(prefix + name)
        except errors.ConfigurationError:
            continue  # not a name that a job can have
        if CHECKPOINTS in list_folders(store, f"{keys.job}/"):
            yield keys.job
        elif deepest > 1:
            yield from find_jobs(store, f"{keys.job}/", deepest=deepest - 1)


def list_steps(store: Store, job: str) -> list[int]:
    """Return the steps of which there is anything, oldest first; not all are complete.

    One listing.
    """
    keys = CheckpointKeys(job)
    found = (keys.parse_folder(name) for name in list_folders(store, keys.prefix))
    return sorted(step for step in found if step is not None)


def read_checkpoint(store: Store, job: str, step: int) -> Checkpoint:
    """Return the checkpoint of a step, as it was committed. Its files are not looked at.

    Raises:
        NotFoundError: There is none, or none that is complete.
        CorruptError: What is there is not the checkpoint of this job and step.
    """
    key = CheckpointKeys(job).metadata(step)
    return check_metadata(store.make_url(key), fetch(store, key, Checkpoint), job, step)


def check_metadata(where: str, found: Checkpoint, job: str, step: int) -> Checkpoint:
    """Return a checkpoint's metadata, once it is known to be of this job and step.

    Raises:
        CorruptError: It is another's, or was changed.
    """
    if (found.job, found.step) != (job, step):
        raise errors.CorruptError(
            f"{where} is a checkpoint of {found.job} at step {found.step}: it was copied there, "
            "and its files are not."
        )
    whole = found.digest == _digest_of(found)
    if not whole or root_of(found.parts, found.tensors) != found.root:
        raise errors.CorruptError(f"{where} is not what it was when it was committed.")
    return found


def with_digest(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint's metadata with the digest of all its fields, ready to be committed."""
    return checkpoint.model_copy(update={"digest": _digest_of(checkpoint)})


def _digest_of(checkpoint: Checkpoint) -> str:
    return compute_sha256(
        dump_canonical_json(checkpoint.model_dump(mode="json", exclude={"digest"}))
    )


def commit_checkpoint(store: Store, made: Checkpoint) -> Commit[Checkpoint]:
    """Commit a checkpoint's metadata, unless that of the same step is there.

    Metadata that is there and damaged is moved away first.

    Args:
        store: The store of the job.
        made: The metadata; all files are there.

    Raises:
        VersionError: Another version of Millrace wrote what is there.
    """
    key = CheckpointKeys(made.job).metadata(made.step)
    sealed = with_digest(made)
    try:
        commit = commit_once(store, key, sealed)
        if not commit.mine:
            check_metadata(store.make_url(key), commit.record, made.job, made.step)
    except errors.VersionError:
        raise
    except errors.CorruptError as error:
        there = quarantine_metadata(store, made.job, made.step, str(error))
        return commit_once(store, key, sealed) if there is None else Commit(there, mine=False)
    return commit


def check_content(where: str, there: Checkpoint, root: str) -> Checkpoint:
    """Return the checkpoint that stands where another of the same step was to be committed.

    Raises:
        ConflictError: It has another content.
    """
    if there.root != root:
        raise errors.ConflictError(
            f"{where} is a checkpoint of the same step with another content: give this job another "
            "name, or resume from that one."
        )
    return there


def survey(store: Store, job: str) -> Iterator[tuple[int, Checkpoint | errors.CorruptError]]:
    """Yield the complete checkpoints of a job, newest first, by step, or why one cannot be read.

    Their files are not looked at.
    """
    for step in reversed(list_steps(store, job)):
        try:
            yield step, read_checkpoint(store, job, step)
        except errors.NotFoundError:
            continue  # on its way, or what is left of one
        except errors.CorruptError as error:
            yield step, error


def iterate_checkpoints(store: Store, job: str) -> Iterator[Checkpoint]:
    """Return the complete checkpoints of a job, newest first. Their files are not looked at."""
    return (found for _, found in survey(store, job) if isinstance(found, Checkpoint))


def find_newest(store: Store, job: str) -> Checkpoint | None:
    """Return the newest complete checkpoint, if there is one. Its files are not looked at."""
    return next(iterate_checkpoints(store, job), None)


def verify(
    store: Store, checkpoint: Checkpoint, *, check: VerifyDepth = VerifyDepth.DIGESTS
) -> dict[str, str]:
    """Look at every file of a checkpoint.

    What seems damaged is read a second time: the bytes may have been changed on their way.

    Returns:
        The damage, a sentence by the digest of each file; empty if there is none.

    Raises:
        UnavailableError: The store failed for longer than its time budget: nothing is known.
    """

    def check_part(part: Part) -> str:
        damage = _find_damage(store, checkpoint.job, part, check)
        return damage and _find_damage(store, checkpoint.job, part, check)

    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="verify") as pool:
        found = zip(checkpoint.parts, pool.map(check_part, checkpoint.parts), strict=True)
        return {part.sha256: damage for part, damage in found if damage}


def find_newest_verified(
    store: Store,
    job: str,
    *,
    check: VerifyDepth = VerifyDepth.DIGESTS,
    progress: Progress = ignore_event,
) -> Checkpoint | None:
    """Return the newest checkpoint that is verified; None if there is none.

    One with a damaged file is moved out of the way (`quarantine`), and the one before it is looked
    at. One whose metadata is damaged is passed over and stays, until its step is saved anew: a
    reader that deleted it could delete what a saver has put there meanwhile.

    Args:
        store: Where to look.
        job: Whose.
        check: How thoroughly: sizes take a request a file, digests take all bytes.
        progress: Told ``checkpoint.damaged`` with ``step`` and ``damage``.

    Raises:
        UnavailableError: The store failed for longer than its time budget.
    """
    for step, surveyed in survey(store, job):
        found = surveyed
        if isinstance(found, errors.CorruptError):
            progress(Event("checkpoint.damaged", "", {"step": step, "damage": str(found)}))
            try:
                found = read_checkpoint(store, job, step)  # damaged on its way, perhaps
            except (errors.NotFoundError, errors.CorruptError):
                continue
        damage = verify(store, found, check=check)
        if not damage:
            return found
        told = {"step": step, "damage": "; ".join(damage.values())}
        progress(Event("checkpoint.damaged", CheckpointKeys(job).metadata(step), told))
        with suppress(errors.DeniedError):  # whoever may only read goes on without it
            quarantine(store, found, damage)
    return None


def quarantine_metadata(store: Store, job: str, step: int, damage: str) -> Checkpoint | None:
    """Move damaged metadata of a step out of the way, so that the step can be saved anew.

    The metadata is read again first: the bytes may have been changed on their way. They stay beside
    the record of the quarantine, under their digest. The files of the step stay where they are.

    Args:
        store: The store of the job.
        job: The job.
        step: The step.
        damage: What is wrong with it.

    Returns:
        The checkpoint, if its metadata proves to be right; None once it is away.

    Raises:
        DeniedError: The credentials may not move it.
    """
    keys = CheckpointKeys(job)
    key = keys.metadata(step)
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
    digest = compute_sha256(body)
    record = Quarantine(checkpoint=None, damage=(damage,))
    commit_once(store, keys.quarantine(step, digest), record)
    with suppress(errors.ExistsError):
        create(store, keys.damaged(step, digest), body)
    with suppress(errors.NotFoundError):
        again = read(store, key, max_size=Checkpoint.record_bytes)
        if again != body:  # another process has saved the step meanwhile
            return read_checkpoint(store, job, step)
        failures = delete(store, [key])
        if failures:
            raise errors.DeniedError(
                f"{where} is damaged and could not be moved: {failures[0].reason}"
            )
    return None


def quarantine(store: Store, checkpoint: Checkpoint, damage: dict[str, str]) -> None:
    """Move a damaged checkpoint out of the way: nobody finds it, and its step can be saved anew.

    Nothing is lost: what it was is recorded, and the damaged bytes stay beside the record. If
    another process has done that, and perhaps saved the step anew, nothing is moved.

    Args:
        store: Where it is.
        checkpoint: Which.
        damage: What `verify` has found.

    Raises:
        DeniedError: The credentials may not.
    """
    keys = CheckpointKeys(checkpoint.job)
    record = Quarantine(checkpoint=checkpoint, damage=tuple(damage.values()))
    commit_once(store, keys.quarantine(checkpoint.step, checkpoint.root), record)
    try:
        if read_checkpoint(store, checkpoint.job, checkpoint.step) != checkpoint:
            return
    except (errors.NotFoundError, errors.CorruptError):
        return
    moved: list[str] = []
    for part in checkpoint.parts:
        if part.sha256 in damage:
            key = keys.part(part.step, part.sha256)
            with suppress(errors.NotFoundError):
                copy(store, key, keys.damaged(part.step, part.sha256))
                moved.append(key)
    # The metadata last: until then a run that is killed here leaves a checkpoint to be found again.
    for key in (*moved, keys.metadata(checkpoint.step)):
        failures = delete(store, [key])
        if failures:
            raise errors.DeniedError(
                f"{store.make_url(key)} is damaged and could not be moved: {failures[0].reason}"
            )


def root_of(parts: Iterable[Part], tensors: Mapping[str, TensorRecord]) -> str:
    """Return the digest of a checkpoint's content, which step and time are not part of."""
    content = {
        "parts": [[part.sha256, part.size] for part in parts],
        "tensors": {name: record.model_dump(mode="json") for name, record in tensors.items()},
    }
    return compute_sha256(dump_canonical_json(content))


def _find_damage(store: Store, job: str, part: Part, check: VerifyDepth) -> str:
    """Return the damage of a file, as a sentence; empty if there is none."""
    key = CheckpointKeys(job).part(part.step, part.sha256)
    found = describe_difference(
        store, key, part.size, part.sha256 if check is VerifyDepth.DIGESTS else None
    )
    return found and f"{store.make_url(key)}: {found}."
