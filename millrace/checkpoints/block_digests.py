"""Digests of the blocks of a checkpoint's files, each list as an object of its own.

A list is stored before its file, so a complete file has one. A reader needs no list: without a list
that fits the file's digest, it reads and verifies the whole file.
"""

from collections.abc import Iterable

from millrace.block_lists import read_file_blocks
from millrace.digest import BLOCK_SIZE
from millrace.keys.checkpoints import CheckpointKeys
from millrace.schemas.checkpoint import Checkpoint, Part
from millrace.storage import Store, put


def needs_block_list(part: Part) -> bool:
    """Decide whether a file has more than one block. The digest of one block is the file's."""
    return part.size > BLOCK_SIZE


def put_block_list(store: Store, keys: CheckpointKeys, part: Part, blocks: bytes) -> None:
    """Store the joined digests of a file's blocks, unless the file has one block only.

    Args:
        store: Store of the checkpoint.
        keys: Keys of the job.
        part: Description of the file.
        blocks: Joined digests of its blocks.
    """
    if needs_block_list(part):
        put(store, keys.make_block_list_key(part.step, part.digest), blocks)


def read_block_list(store: Store, keys: CheckpointKeys, part: Part) -> bytes:
    """Return the joined digests of a file's blocks. At most one request.

    Returns:
        Digests that fit the file; empty if there are none, or the file has one block only.

    Raises:
        UnavailableError: The store does not answer.
    """
    if not needs_block_list(part):
        return b""
    key = keys.make_block_list_key(part.step, part.digest)
    return read_file_blocks(store, key, part.digest, part.size)


def list_block_list_keys(keys: CheckpointKeys, checkpoint: Checkpoint) -> Iterable[str]:
    """Return the keys of the lists of a checkpoint's files."""
    return (
        keys.make_block_list_key(part.step, part.digest)
        for part in checkpoint.parts
        if needs_block_list(part)
    )
