"""Load checkpoints: every file is verified before anything of it is used."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from millrace import errors
from millrace.checkpoints.contents import read_part
from millrace.checkpoints.find import VerifyDepth, find_newest_verified, read_checkpoint
from millrace.checkpoints.parts import dtype_of, read_boxes
from millrace.checkpoints.tensor_shards import local_shard_of
from millrace.checkpoints.tree import (
    SKELETON,
    find_array_names,
    flatten_state,
    is_skeleton,
    parse_own_name,
    unflatten_state,
)
from millrace.memory import map_anonymous
from millrace.progress import Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint, Chunk, TensorRecord
from millrace.storage import Store

_CONCURRENCY = 4

RowRanges = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint in memory.

    Attributes:
        checkpoint: What it is: step, position, notes.
        state: What was saved, or what was asked for of it.
        own: What the rank that was asked for had for itself; empty if it had nothing.
    """

    checkpoint: Checkpoint
    state: dict[str, Any]
    own: dict[str, Any]


def load(
    store: Store,
    job: str,
    *,
    step: int | None = None,
    only: Callable[[str], bool] = lambda _: True,
    rows: RowRanges | None = None,
    rank: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress = ignore_event,
) -> LoadedCheckpoint:
    """Load a checkpoint; only the files that hold what is asked for are read.

    Memory is that of the tensors, and of four files. What several ranks saved comes back whole.

    Args:
        store: Where it is.
        job: Whose.
        step: Which; by default the newest whose files are all there, with their sizes. If its
            bytes prove to be damaged, the one before it is loaded.
        only: Which tensors, by their paths (``model.layers.0.weight``); others are left out.
        rows: Of these tensors only the rows from the first number to the one before the second.
        rank: Load what this rank alone had, too.
        device: Where the tensors are put.
        dtype: A floating type that floating tensors are converted to while they are loaded. Other
            tensors, numpy arrays, and what a rank alone had stay as they were saved.
        progress: Told ``checkpoint.damaged`` of what was passed over.

    Raises:
        NotFoundError: There is none.
        CorruptError: Of the step that was asked for, a file is not the bytes that were saved.
        ConfigurationError: Rows are asked for of a tensor that has fewer, or the type is not
            floating.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise errors.ConfigurationError(f"{dtype} is no floating type: choose one, or none.")
    some = dict(rows or {})

    def select_tensors(checkpoint: Checkpoint) -> dict[str, _TensorRequest]:
        # Of the skeleton it is known which tensors numpy arrays are, which stay as they were.
        fixed = _find_array_names(store, checkpoint) if dtype is not None else set[str]()
        return {
            name: _request_rows(
                name,
                record,
                some.get(name),
                device,
                None if name in fixed or parse_own_name(name) is not None else dtype,
            )
            for name, record in checkpoint.tensors.items()
            if is_skeleton(name) or only(name)
            if parse_own_name(name) is None or _is_own(name, rank)
        }

    return _load(store, job, step, select_tensors, rank, progress)


def load_into(
    state: Mapping[str, Any],
    store: Store,
    job: str,
    *,
    step: int | None = None,
    rank: int | None = None,
    progress: Progress = ignore_event,
) -> LoadedCheckpoint:
    """Load a checkpoint into the tensors of a state, which may be distributed in another way.

    Of a DTensor only this rank's shard is read, wherever its bytes were on how many ranks before.
    If an error is raised, some tensors may have been filled: do not use them.

    Args:
        state: Of the form that was saved; tensors that are left out are not read.
        store: Where it is.
        job: Whose.
        step: Which, as of `load`. Ranks that load together all name the same.
        rank: Load what this rank alone had, too.
        progress: Told ``checkpoint.damaged`` of what was passed over.

    Returns:
        What was loaded: in its state stand the tensors of the one that was given, filled, and
        the other values as they were saved.

    Raises:
        NotFoundError: There is none.
        CorruptError: Of the step that was asked for, a file is not the bytes that were saved.
        ConfigurationError: A tensor is not in the checkpoint, or has another shape or type there.
    """
    given = {name: tensor for name, tensor in flatten_state(state).items() if name != SKELETON}

    def select_tensors(checkpoint: Checkpoint) -> dict[str, _TensorRequest]:
        made = {
            name: _request_shard(name, tensor, checkpoint.tensors.get(name))
            for name, tensor in given.items()
        }
        for name, record in checkpoint.tensors.items():
            if name == SKELETON or _is_own(name, rank):
                made[name] = _request_rows(name, record, None, "cpu")
        return made

    return _load(store, job, step, select_tensors, rank, progress)


def _load(
    store: Store,
    job: str,
    step: int | None,
    wanted: "Callable[[Checkpoint], dict[str, _TensorRequest]]",
    rank: int | None,
    progress: Progress,
) -> LoadedCheckpoint:
    if step is not None:
        found = read_checkpoint(store, job, step)
        return _read_state(store, found, wanted(found), rank)
    found = find_newest_verified(store, job, check=VerifyDepth.SIZES, progress=progress)
    try:
        if found is not None:
            return _read_state(store, found, wanted(found), rank)
    except errors.CorruptError:  # or its bytes were changed on their way, and it is found again
        found = find_newest_verified(store, job, check=VerifyDepth.DIGESTS, progress=progress)
        if found is not None:
            return _read_state(store, found, wanted(found), rank)
    raise errors.NotFoundError(f"{store.make_url(job)} has no checkpoint that can be loaded.")


def _read_state(
    store: Store, checkpoint: Checkpoint, wanted: "dict[str, _TensorRequest]", rank: int | None
) -> LoadedCheckpoint:
    _fill_tensors(store, checkpoint, wanted.values())
    state: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    for name, tensor in wanted.items():
        content = tensor.content.cpu() if is_skeleton(name) else tensor.content
        mine = parse_own_name(name)
        if mine is None:
            state[name] = content
        else:
            own[mine[1]] = content
    return LoadedCheckpoint(checkpoint, unflatten_state(state), unflatten_state(own) if own else {})


def _fill_tensors(store: Store, checkpoint: Checkpoint, wanted: "Iterable[_TensorRequest]") -> None:
    """Read the files that hold some of these tensors, and fill the tensors."""
    by_part: dict[int, list[tuple[_TensorRequest, Chunk]]] = {}
    for tensor in wanted:
        for chunk in tensor.iterate_chunks():
            by_part.setdefault(chunk.part, []).append((tensor, chunk))

    largest = max((checkpoint.parts[number].size for number in by_part), default=0)
    free = [memoryview(map_anonymous(largest)) for _ in range(min(_CONCURRENCY, len(by_part)))]

    def fill_from_part(number: int) -> None:
        part, asked = checkpoint.parts[number], by_part[number]
        # A buffer that goes round, and a copy: quicker than new memory that the tensors could keep.
        buffer = free.pop()
        boxes = read_boxes(read_part(store, checkpoint.job, part, buffer))
        for tensor, chunk in asked:
            tensor.copy_chunk(chunk, boxes.get(chunk.name))
        free.append(buffer)

    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="part") as pool:
        list(pool.map(fill_from_part, sorted(by_part)))


@dataclass(frozen=True, slots=True)
class _TensorRequest:
    """A tensor that is being loaded, or a box of it.

    Attributes:
        name: Its name.
        record: What it is in the checkpoint.
        start: Where the box begins, in each dimension.
        box: What it is filled into; made here, it is memory of which no page exists before it is
            written.
        content: The tensor that the box is of.
    """

    name: str
    record: TensorRecord
    start: tuple[int, ...]
    box: torch.Tensor
    content: torch.Tensor

    def iterate_chunks(self) -> Iterator[Chunk]:
        """Yield the boxes in the checkpoint that some of it lies in."""
        for chunk in self.record.chunks:
            if all(low < high for low, high in self._find_overlap(chunk, chunk.start)):
                yield chunk

    def copy_chunk(self, chunk: Chunk, found: torch.Tensor | None) -> None:
        """Take from a box in the checkpoint what is wanted of it."""
        if (
            found is None
            or tuple(found.shape) != chunk.shape
            or found.dtype != dtype_of(self.record.dtype)
        ):
            raise errors.CorruptError(f"{self.name} is not in the file that should hold it.")
        here, there = self._find_overlap(chunk, self.start), self._find_overlap(chunk, chunk.start)
        self.box[_to_slices(here)].copy_(found[_to_slices(there)])

    def _find_overlap(self, chunk: Chunk, origin: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return where the two boxes are one, in each dimension, counted from a place."""
        axes = zip(chunk.start, chunk.shape, self.start, self.box.shape, origin, strict=True)
        return [(max(a, b) - at, min(a + n, b + m) - at) for a, n, b, m, at in axes]


def _to_slices(box: list[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(*edges) for edges in box)


def _is_own(name: str, rank: int | None) -> bool:
    own = parse_own_name(name)
    return own is not None and own[0] == rank


def _find_array_names(store: Store, checkpoint: Checkpoint) -> set[str]:
    """Return the names of the tensors that are numpy arrays in the state."""
    record = checkpoint.tensors.get(SKELETON)
    if record is None:
        return set()
    skeleton = _request_rows(SKELETON, record, None, "cpu")
    _fill_tensors(store, checkpoint, [skeleton])
    return find_array_names(skeleton.content)


def _request_rows(
    name: str,
    record: TensorRecord,
    rows: tuple[int, int] | None,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> _TensorRequest:
    first, shape = 0, record.shape
    if rows is not None:
        first, stop = rows
        if not shape or not 0 <= first <= stop <= shape[0]:
            raise errors.ConfigurationError(
                f"{name} has the shape {list(shape)}: rows {first} to {stop} are not in it."
            )
        shape = (stop - first, *shape[1:])
    saved = dtype_of(record.dtype)
    kind = dtype if dtype is not None and saved.is_floating_point else saved
    content = torch.empty(shape, dtype=kind, device=device)
    return _TensorRequest(
        name, record, (first, *(0,) * (len(shape) - 1))[: len(shape)], content, content
    )


def _request_shard(name: str, tensor: torch.Tensor, record: TensorRecord | None) -> _TensorRequest:
    if record is None:
        raise errors.ConfigurationError(f"The checkpoint has no {name}: leave it out of the state.")
    said = dtype_of(record.dtype), record.shape
    if (tensor.dtype, tuple(tensor.shape)) != said:
        raise errors.ConfigurationError(
            f"{name} is {tensor.dtype} of the shape {list(tensor.shape)}, and in the checkpoint "
            f"{said[0]} of {list(said[1])}: give a tensor like that."
        )
    piece = local_shard_of(name, tensor)
    return _TensorRequest(name, record, piece.start, piece.local, tensor)
