"""Content of a checkpoint: its files by their digests, and the tensors in them."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import orjson

from millrace import errors
from millrace.checkpoints.block_digests import read_block_list
from millrace.checkpoints.find import add_digest, compute_root
from millrace.digest import (
    BLOCK_SIZE,
    combine_blocks,
    count_blocks,
    find_differing_blocks,
    group_blocks,
    slice_blocks,
)
from millrace.keys.checkpoints import CheckpointKeys
from millrace.memory import map_anonymous
from millrace.records import check_depth, explain_excess
from millrace.schemas.checkpoint import Checkpoint, Part, TensorRecord
from millrace.storage import Store, open_store, read_and_hash

_log = logging.getLogger(__name__)
_MAX_BLOCKS = 128  # blocks of a request: a file of the default size needs one
_MAX_GAP = 4  # blocks that are read although they are not needed, to save a request
_CONCURRENCY = 4  # requests for one file
MAX_JSON_SIZE = 4 << 20
"""Largest size of a position or of notes as JSON, in bytes."""


@dataclass(frozen=True, slots=True)
class PartContent:
    """Bytes of a file, and the digests of its blocks.

    Attributes:
        body: Bytes of the file.
        blocks: Joined digests of the blocks. Their root is the file's digest.
    """

    body: memoryview = field(repr=False)
    blocks: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a checkpoint that can be saved to a destination.

    Attributes:
        parts: Files of the checkpoint, with the names that they get in the folder of the step.
        tensors: Tensors of the checkpoint, with their positions in the files.
        root: Digest of ``parts`` and ``tensors``.
        read: Function that returns the content of a file, by its index in ``parts``.
        mend: Function that completes a damaged copy of a file, by its index in ``parts``. The
            blocks that differ are read into the memory of the copy. None if only whole files can
            be read.
    """

    parts: tuple[Part, ...]
    tensors: Mapping[str, TensorRecord] = field(repr=False)
    root: str
    read: Callable[[int], PartContent] = field(repr=False)
    mend: Callable[[int, PartContent], PartContent] | None = field(default=None, repr=False)

    def make_metadata(self, checkpoint: Checkpoint, job: str) -> Checkpoint:
        """Return the metadata that commits this content as another job's checkpoint."""
        there = {"job": job, "parts": self.parts, "root": self.root}
        return add_digest(checkpoint.model_copy(update=there))

    def open_part(self, part: Part) -> AbstractContextManager[PartContent]:
        """Return a context with the content of a file, found by its digest.

        Raises:
            CorruptError: The content has other bytes than were saved.
        """
        digests = [own.digest for own in self.parts]
        return nullcontext(self.read(digests.index(part.digest)))

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(part.size for part in self.parts)


def open_content(store: Store, checkpoint: Checkpoint) -> Content:
    """Return the content of a saved checkpoint. Each file is read and verified on demand.

    Args:
        store: Store of the checkpoint.
        checkpoint: Metadata of the checkpoint.
    """

    def read_file(number: int) -> PartContent:
        part = checkpoint.parts[number]
        return read_part(store, checkpoint.job, part, memoryview(map_anonymous(part.size)))

    def mend_file(number: int, copy: PartContent) -> PartContent:
        return mend_part(store, checkpoint.job, checkpoint.parts[number], copy)

    return make_content(checkpoint.step, checkpoint.parts, checkpoint.tensors, read_file, mend_file)


def make_content(
    step: int,
    parts: tuple[Part, ...],
    tensors: Mapping[str, TensorRecord],
    read: Callable[[int], PartContent],
    mend: Callable[[int, PartContent], PartContent] | None = None,
) -> Content:
    """Return content whose files belong to a step."""
    there = tuple(Part(step=step, digest=part.digest, size=part.size) for part in parts)
    return Content(there, tensors, compute_root(there, tensors), read, mend)


def normalise_json(value: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Return a dict as JSON restores it. Scalars of numpy become plain numbers.

    Args:
        value: Dict to normalise; None for an empty dict.
        what: Name of the value in error messages.

    Raises:
        ConfigurationError: JSON cannot represent the value, or readers would refuse it.
    """
    whole = dict(value or {})
    try:
        json.dumps(whole, allow_nan=False, default=_convert_number)  # orjson accepts NaN
        body = orjson.dumps(whole, default=_convert_number)
        normal = orjson.loads(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.ConfigurationError(
            f"The {what} of a checkpoint is not JSON ({errors.format_error(error)}): give dicts "
            "with text as keys, lists, text, and finite numbers of at most 64 bits."
        ) from error
    if excess := explain_excess(body, MAX_JSON_SIZE):
        raise errors.ConfigurationError(
            f"The {what} of a checkpoint has {excess} as JSON: give less, and save the rest in the "
            "state."
        )
    try:
        return check_depth(normal)
    except ValueError as error:
        raise errors.ConfigurationError(
            f"The {what} of a checkpoint cannot be read again, since {error}: make it flatter."
        ) from None


def _convert_number(value: object) -> Any:
    import numpy as np  # noqa: PLC0415  # every command would import it

    if isinstance(value, np.bool_ | np.integer | np.floating):
        return cast("Any", value).item()
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no kind of JSON value")


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """Memory for some bytes of a file.

    Attributes:
        offset: Offset of the first byte in the file.
        memory: Memory for the bytes.
    """

    offset: int
    memory: memoryview = field(repr=False)

    @property
    def end(self) -> int:
        """Offset after the last byte in the file."""
        return self.offset + len(self.memory)


def read_part(
    store: Store,
    job: str,
    part: Part,
    into: memoryview,
    targets: Sequence[ReadTarget] = (),
    needed: Iterable[range] | None = None,
) -> PartContent:
    """Read a file, and verify its bytes. Each byte is hashed once.

    If only some bytes are needed and the digests of the file's blocks are stored, only the blocks
    with these bytes are read.

    Args:
        store: Store of the checkpoint.
        job: Job of the checkpoint.
        part: File to read.
        into: Buffer for the bytes.
        targets: Bytes that are read into other memory than the buffer, in the order of the file.
            After an error, this memory may have wrong bytes.
        needed: Ranges of the needed bytes; None for all bytes. Other bytes may be left unread.

    Returns:
        Part of the buffer for the file, without the bytes of ``targets``, and the digests of all
        blocks of the file.

    Raises:
        CorruptError: The file is missing, or has other bytes than were saved.
    """
    body = into[: part.size]
    count = count_blocks(part.size)
    numbers = range(count) if needed is None else _select_blocks(needed, count)
    known = b"" if len(numbers) == count else read_block_list(store, CheckpointKeys(job), part)
    return _read_blocks(store, job, part, body, targets, numbers, known)


def mend_part(store: Store, job: str, part: Part, copy: PartContent) -> PartContent:
    """Read the blocks of a file that differ in a damaged copy, into the memory of the copy.

    If the digests of the file's blocks are not stored, the whole file is read.

    Args:
        store: Store of the checkpoint.
        job: Job of the checkpoint.
        part: File to read.
        copy: Memory of the file's size with the damaged copy, and the digests of its blocks.

    Raises:
        CorruptError: The file is missing, or has other bytes than were saved.
    """
    known = read_block_list(store, CheckpointKeys(job), part)
    differing = find_differing_blocks(copy.blocks, known)
    return _read_blocks(store, job, part, copy.body, (), differing, known)


def _read_blocks(
    store: Store,
    job: str,
    part: Part,
    body: memoryview,
    targets: Sequence[ReadTarget],
    numbers: Iterable[int],
    known: bytes,
) -> PartContent:
    """Read some blocks of a file, and verify them by known digests; without these, all blocks.

    The file is read in the first warmed folder that has it undamaged, or else in the store.
    """
    key = CheckpointKeys(job).make_part_key(part.step, part.digest)
    for folder in store.warmed:
        if not (folder / key).is_file():
            continue
        try:
            warmed = open_store(folder.absolute().as_uri(), make_folder=False)
            return _read_blocks(warmed, job, part, body, targets, numbers, known)
        except errors.MillraceError as error:
            _log.warning("%s It is read from %s.", error, store.url)

    def read_range(blocks: range) -> bytes:
        start, stop = blocks.start * BLOCK_SIZE, min(blocks.stop * BLOCK_SIZE, part.size)
        views = _list_views(body, targets, start, stop)
        found = read_and_hash(store, key, views, size=part.size, start=start)
        if known and found != slice_blocks(known, blocks):
            return b""
        return found

    ranges = group_blocks(numbers if known else range(count_blocks(part.size)), _MAX_BLOCKS)
    try:
        if len(ranges) == 1:
            found = [read_range(ranges[0])]
        else:
            with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="range") as pool:
                found = list(pool.map(read_range, ranges))
    except errors.NotFoundError:
        raise errors.CorruptError(f"{store.make_url(key)} is missing.") from None
    blocks = known or b"".join(found)
    if not all(found) or not (known or combine_blocks(blocks) == part.digest):
        raise errors.CorruptError(
            f"{store.make_url(key)} is not the bytes that were saved: verify the checkpoint, or "
            "load the one before it."
        )
    return PartContent(body, blocks)


def _select_blocks(needed: Iterable[range], count: int) -> list[int]:
    """Return the numbers of the blocks to read for some ranges of bytes, in ascending order.

    Args:
        needed: Ranges of bytes.
        count: Number of the file's blocks.
    """
    found: set[int] = set()
    for each in needed:
        if each:
            found.update(range(each.start // BLOCK_SIZE, -(-each.stop // BLOCK_SIZE)))
    numbers = sorted(found)
    for before, after in pairwise(numbers):  # a request costs more time than a few blocks
        if after - before <= _MAX_GAP:
            found.update(range(before, after))
    return sorted(found) if len(found) < count else list(range(count))


def _list_views(
    body: memoryview, targets: Sequence[ReadTarget], start: int, stop: int
) -> list[memoryview]:
    """Return the memory for a range of a file: that of targets, and the buffer between them."""
    views: list[memoryview] = []
    at = start
    for target in targets:
        first, last = max(target.offset, at), min(target.end, stop)
        if first < last:
            views += [body[at:first], target.memory[first - target.offset : last - target.offset]]
            at = last
    return [view for view in (*views, body[at:stop]) if view]
