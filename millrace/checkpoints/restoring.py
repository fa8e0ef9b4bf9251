"""Restoring of files that a checkpoint has lost around its commit."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from millrace.checkpoints.block_digests import put_block_list
from millrace.checkpoints.contents import Content
from millrace.checkpoints.find import VerifyDepth, find_bad_parts
from millrace.checkpoints.progress_events import PartStored
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Progress, ignore_event
from millrace.schemas.checkpoint import Part
from millrace.storage import Store, put


def restore_parts(
    store: Store,
    job: str,
    parts: Collection[Part],
    content: Content,
    *,
    uploads: int = 4,
    check: VerifyDepth = VerifyDepth.DIGESTS,
    progress: Progress = ignore_event,
) -> None:
    """Upload those files of a checkpoint again that are missing or damaged.

    Call this function before and after the commit of the metadata. Until then no checkpoint names
    the files, so retention may delete them. Metadata that an earlier save has committed may refer
    to files of other steps. These are verified, since the upload has verified only its own.

    Args:
        store: Store of the checkpoint.
        job: Name of the job.
        parts: Files of the checkpoint.
        content: Content of the checkpoint, whose own files are uploaded and verified.
        uploads: Number of files that are uploaded at once.
        check: Depth of the verification of files of other steps.
        progress: Receives `PartStored` for each file that is uploaded again.

    Raises:
        CorruptError: The content has other bytes than were saved.
    """
    keys = CheckpointKeys(job)
    numbers = {part.digest: number for number, part in enumerate(content.parts)}

    def restore(part: Part) -> None:
        found = content.read(numbers[part.digest])
        put_block_list(store, keys, part, found.blocks)
        put(store, keys.make_part_key(part.step, part.digest), found.body)

    bad = find_bad_parts(store, job, parts, frozenset(content.parts), check=check)
    with ThreadPoolExecutor(uploads, thread_name_prefix="restore") as pool:
        for part, _ in zip(bad, pool.map(restore, bad), strict=True):
            progress(PartStored(digest=part.digest, size=part.size, sent=part.size))
