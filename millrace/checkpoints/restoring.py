"""Restoring of files that a checkpoint has lost around its commit."""

from collections.abc import Callable, Collection, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from millrace.checkpoints.block_digests import put_block_list
from millrace.checkpoints.contents import PartContent
from millrace.checkpoints.find import VerifyDepth, find_bad_parts
from millrace.checkpoints.progress_events import PartStored
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Progress, ignore_event
from millrace.schemas.checkpoint import Part
from millrace.storage import Store, put

OpenPart = Callable[[Part], AbstractContextManager[PartContent]]
"""Function that returns a context with the content of a file, whose bytes match its digest."""


def restore_parts(
    store: Store,
    job: str,
    parts: Collection[Part],
    verified: Set[Part],
    open_part: OpenPart,
    *,
    uploads: int = 4,
    check: VerifyDepth = VerifyDepth.DIGESTS,
    progress: Progress = ignore_event,
) -> None:
    """Upload those files of a checkpoint again that are missing or damaged.

    Call this function before and after the commit of the metadata. Until then no checkpoint names
    the files, so retention may delete them, and readers move damaged files of other steps away.
    Metadata that an earlier save has committed may refer to files of other steps. These are
    verified, since the upload has verified only its own. One listing per step, if nothing is bad.

    Args:
        store: Store of the checkpoint.
        job: Name of the job.
        parts: Files of the checkpoint.
        verified: Files that the caller has uploaded or verified. Only their sizes are compared.
        open_part: Function that opens a file to upload it again.
        uploads: Number of files that are uploaded at once.
        check: Depth of the verification of the other files.
        progress: Receives `PartStored` for each file that is uploaded again.
    """
    keys = CheckpointKeys(job)

    def restore(part: Part) -> None:
        with open_part(part) as found:
            put_block_list(store, keys, part, found.blocks)
            put(store, keys.make_part_key(part.step, part.digest), found.body)

    bad = find_bad_parts(store, job, parts, verified, check=check)
    with ThreadPoolExecutor(uploads, thread_name_prefix="restore") as pool:
        for part, _ in zip(bad, pool.map(restore, bad), strict=True):
            progress(PartStored(digest=part.digest, size=part.size, sent=part.size))
