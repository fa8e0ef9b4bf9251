"""Loading of checkpoints. Every file is verified before its tensors are used."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from millrace import errors
from millrace.checkpoints.contents import ReadTarget, read_part
from millrace.checkpoints.find import VerifyDepth, find_newest_verified, read_checkpoint
from millrace.checkpoints.parts import parse_dtype
from millrace.checkpoints.pinned_memory import map_pinned
from millrace.checkpoints.tensor_shards import find_local_shard, is_on_several_ranks
from millrace.checkpoints.tree import (
    SKELETON,
    find_array_names,
    flatten_state,
    is_skeleton,
    parse_own_name,
    unflatten_state,
)
from millrace.formatting import format_count
from millrace.memory import map_anonymous, use_huge_pages
from millrace.progress import Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint, Chunk, TensorRecord
from millrace.storage import Store
from millrace.threads import choose_thread_count

_LEAST_THREADS, _MOST_THREADS = 4, 16  # of which each reads a file
_MOST_THREADS_TO_GPU = 8  # of which each needs pinned memory
_LEAST_DIRECT_SIZE = 16 << 10  # bytes of a tensor: smaller ones are copied from the file's buffer

RowRanges = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Checkpoint in memory.

    Attributes:
        checkpoint: Metadata: step, position, notes.
        state: Saved state, or its selected tensors.
        own: State that only the selected rank had; empty if it had none.
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
    """Load a checkpoint. Only files with selected tensors are read.

    Memory is that of the tensors and of a file for each thread: one thread for each processor, at
    least 4 and at most 16. Tensors that several ranks saved are whole.

    Args:
        store: Store of the job.
        job: Name of the job.
        step: Step to load. By default the newest whose files all exist with their sizes. If its
            bytes are damaged, an older one is loaded.
        only: Function that selects tensors by their paths (``model.layers.0.weight``).
        rows: First row, and the row after the last one, of tensors that are loaded in part.
        rank: Rank whose own state is loaded too.
        device: Device of the tensors.
        dtype: Floating-point type to which floating-point tensors are converted. Numpy arrays and
            the state of one rank keep their types.
        progress: Receives `CheckpointDamaged` for skipped checkpoints.

    Raises:
        NotFoundError: There is no checkpoint that can be loaded.
        CorruptError: A file of the given step has other bytes than were saved.
        ConfigurationError: A tensor of ``rows`` is not there or has fewer rows, or ``dtype`` is not
            a floating-point type.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise errors.ConfigurationError(
            f"Tensors cannot be converted to {dtype}: choose a floating-point type, or none."
        )
    some = dict(rows or {})

    def select_tensors(checkpoint: Checkpoint) -> dict[str, _TensorRequest]:
        if unknown := some.keys() - checkpoint.tensors:
            known = sorted(name for name in checkpoint.tensors if not is_skeleton(name))
            raise errors.ConfigurationError(
                f"`rows` has {min(unknown)!r}, and step {checkpoint.step} of {job} has no such "
                f"tensor. Give paths of its {format_count(len(known), 'tensor')}, such as "
                f"{', '.join(map(repr, known[:3]))}."
            )
        # The skeleton shows which tensors are numpy arrays. These keep their types.
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

    A DTensor reads only the files with its rank's shard. The number of ranks may have changed.
    After an error some tensors may be filled: do not use them.

    Args:
        state: State with the same structure as the saved one. Missing tensors are not read.
        store: Store of the job.
        job: Name of the job.
        step: Step to load, as for `load`. All ranks of a group load the same step, so the step must
            be given if a tensor is distributed over several ranks.
        rank: Rank whose own state is loaded too.
        progress: Receives `CheckpointDamaged` for skipped checkpoints.

    Returns:
        Loaded checkpoint. Its state has the given tensors, filled, and the other saved values.

    Raises:
        NotFoundError: There is no checkpoint that can be loaded.
        CorruptError: A file of the given step has other bytes than were saved.
        ConfigurationError: A tensor is not in the checkpoint, has another shape or type there, or
            has the path of another one. Or a tensor is on several ranks, and no step is given.
    """
    given = {name: tensor for name, tensor in flatten_state(state).items() if name != SKELETON}
    for name, tensor in given.items():
        if step is None and is_on_several_ranks(tensor):
            raise errors.ConfigurationError(
                f"{name!r} is distributed over several ranks, and each rank could find another "
                "newest checkpoint: give `step` on all ranks, such as that of "
                "`find_newest_verified` on the first one."
            )

    def select_tensors(checkpoint: Checkpoint) -> dict[str, _TensorRequest]:
        _require_clear_names(given, checkpoint)
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
    except errors.CorruptError:  # a second try finds it if only the transfer was at fault
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
    """Read the files that have the requested tensors, and fill the tensors."""
    planned = [
        _plan_read(tensor, chunk, checkpoint.parts[chunk.part].size)
        for tensor in wanted
        for chunk in tensor.iterate_chunks()
    ]
    by_part: dict[int, list[_BoxRead]] = {}
    for read in _avoid_aliases(planned):
        by_part.setdefault(read.chunk.part, []).append(read)
    largest = max((checkpoint.parts[number].size for number in by_part), default=0)
    to_gpu = any(read.tensor.is_cuda for reads in by_part.values() for read in reads)
    allocate = map_pinned if to_gpu else map_anonymous
    threads = choose_thread_count(_LEAST_THREADS, _MOST_THREADS_TO_GPU if to_gpu else _MOST_THREADS)
    free = [memoryview(allocate(largest)) for _ in range(min(threads, len(by_part)))]

    def fill_from_part(number: int) -> None:
        # A copy from a reused buffer is faster than new memory that the tensors could keep.
        buffer = free.pop()
        reads = _sort_by_offset(by_part[number])
        targets = [read.target for read in reads if read.target is not None]
        needed = [read.needed for read in reads]
        part = checkpoint.parts[number]
        content = read_part(store, checkpoint.job, part, buffer, targets, needed)
        for read in reads:
            if read.target is None:
                read.copy_from(content.body)
        free.append(buffer)

    with ThreadPoolExecutor(threads, thread_name_prefix="part") as pool:
        list(pool.map(fill_from_part, sorted(by_part)))


@dataclass(frozen=True, slots=True)
class _BoxRead:
    """Read of a saved box that overlaps with a requested one.

    Attributes:
        chunk: Saved box.
        dtype: Type of its elements.
        there: Overlap as slices of the saved box.
        tensor: Overlap as a part of the requested tensor.
        needed: Range of the file's bytes from the overlap's first byte to its last.
        target: Memory of ``tensor``, if the file has the same bytes in the same order.
    """

    chunk: Chunk
    dtype: torch.dtype
    there: tuple[slice, ...]
    tensor: torch.Tensor
    needed: range
    target: ReadTarget | None = None

    @property
    def end(self) -> int:
        """Offset after the last byte of the saved box in the file."""
        return self.chunk.offset + prod(self.chunk.shape) * self.dtype.itemsize

    def copy_from(self, body: memoryview) -> None:
        """Copy the overlap from the bytes of the file."""
        count, offset = prod(self.chunk.shape), self.chunk.offset
        found = torch.frombuffer(body, dtype=self.dtype, count=count, offset=offset)
        self.tensor.copy_(found.view(self.chunk.shape)[self.there])


def _plan_read(request: "_TensorRequest", chunk: Chunk, part_size: int) -> _BoxRead:
    """Plan the read of a saved box, directly into the tensor's memory if that is possible.

    Raises:
        CorruptError: The box is not in its file.
    """
    dtype = parse_dtype(request.record.dtype)
    if not 0 <= chunk.offset <= part_size - prod(chunk.shape) * dtype.itemsize:
        raise errors.CorruptError(f"{request.name} is not in the file that should hold it.")
    here, there = request.find_overlap(chunk)
    tensor = request.box[here].detach()
    saved = torch.empty(chunk.shape, dtype=dtype, device="meta")[there]
    axes = zip(saved.shape, saved.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in axes) if saved.numel() else -1
    offset = chunk.offset + int(saved.storage_offset()) * dtype.itemsize
    needed = range(offset, offset + (last + 1) * dtype.itemsize)
    read = _BoxRead(chunk, dtype, there, tensor, needed)
    same = tensor.dtype == dtype and tensor.is_contiguous() and saved.is_contiguous()
    plain = tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    if not (same and plain and tensor.nbytes >= _LEAST_DIRECT_SIZE):
        return read
    memory = tensor.view(-1).view(torch.uint8).numpy().data
    return replace(read, target=ReadTarget(offset, memory))


def _sort_by_offset(reads: list[_BoxRead]) -> list[_BoxRead]:
    """Return the reads of one file in the order of the file.

    Raises:
        CorruptError: Two boxes have bytes in common.
    """
    ordered = sorted(reads, key=lambda read: read.chunk.offset)
    for before, read in pairwise(ordered):
        if before.end > read.chunk.offset:
            raise errors.CorruptError(
                f"The metadata of the checkpoint has {before.chunk.name} and {read.chunk.name} at "
                "the same bytes of a file: load another step."
            )
    return ordered


def _avoid_aliases(reads: list[_BoxRead]) -> list[_BoxRead]:
    """Return the reads without targets in memory that another read writes too.

    Two tensors of a state may be views of the same memory. Its bytes could then change between
    their read and their verification.
    """
    spans: list[tuple[int, int, int]] = []
    for number, read in enumerate(reads):
        tensor = read.tensor
        if tensor.device.type == "cpu":
            axes = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in axes)
            first = tensor.data_ptr()
            spans.append((first, first + (last + 1) * tensor.itemsize, number))
    shared: set[int] = set()
    end, before = 0, -1
    for first, stop, number in sorted(spans):
        if first < end:
            shared |= {before, number}
        if stop > end:
            end, before = stop, number
    return [
        replace(read, target=None) if number in shared else read
        for number, read in enumerate(reads)
    ]


@dataclass(frozen=True, slots=True)
class _TensorRequest:
    """Tensor to load, or a box (a contiguous range of indices in each dimension) of a tensor.

    Attributes:
        name: Name of the tensor.
        record: Description of the tensor in the checkpoint.
        start: First index of the box in each dimension.
        box: Tensor to fill. A new one has no memory pages before it is written.
        content: Tensor that the box belongs to.
    """

    name: str
    record: TensorRecord
    start: tuple[int, ...]
    box: torch.Tensor
    content: torch.Tensor

    def iterate_chunks(self) -> Iterator[Chunk]:
        """Yield the saved boxes that overlap with the requested box."""
        for chunk in self.record.chunks:
            if all(low < high for low, high in self._find_overlap(chunk, chunk.start)):
                yield chunk

    def find_overlap(self, chunk: Chunk) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the overlap with a saved box, as slices of the requested box and of the saved."""
        return (
            _to_slices(self._find_overlap(chunk, self.start)),
            _to_slices(self._find_overlap(chunk, chunk.start)),
        )

    def _find_overlap(self, chunk: Chunk, origin: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the overlap with a saved box in each dimension, relative to an origin."""
        axes = zip(chunk.start, chunk.shape, self.start, self.box.shape, origin, strict=True)
        return [(max(a, b) - at, min(a + n, b + m) - at) for a, n, b, m, at in axes]


def _to_slices(box: list[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(*edges) for edges in box)


def _require_clear_names(given: Iterable[str], checkpoint: Checkpoint) -> None:
    """Check that no two tensors have one path. Their names then depend on the order of the keys.

    Raises:
        ConfigurationError: Two tensors have one path.
    """
    names = {*given, *checkpoint.tensors}
    for name in given:
        if f"{name}#" in names or (name.endswith("#") and name[:-1] in names):
            raise errors.ConfigurationError(
                f"{name} is the path of two tensors, such as of {{'a.b': ...}} and "
                "{'a': {'b': ...}}, which `load_into` cannot tell apart: use `load`, or save the "
                "state with other keys."
            )


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
    saved = parse_dtype(record.dtype)
    kind = dtype if dtype is not None and saved.is_floating_point else saved
    content = torch.empty(shape, dtype=kind, device=device)
    if content.device.type == "cpu":
        use_huge_pages(content.data_ptr(), content.nbytes)
    return _TensorRequest(
        name, record, (first, *(0,) * (len(shape) - 1))[: len(shape)], content, content
    )


def _request_shard(name: str, tensor: torch.Tensor, record: TensorRecord | None) -> _TensorRequest:
    if record is None:
        raise errors.ConfigurationError(f"The checkpoint has no {name}: leave it out of the state.")
    said = parse_dtype(record.dtype), record.shape
    if (tensor.dtype, tuple(tensor.shape)) != said:
        raise errors.ConfigurationError(
            f"{name} is {tensor.dtype} of the shape {list(tensor.shape)}, and in the checkpoint "
            f"{said[0]} of {list(said[1])}: give a tensor like that."
        )
    shard = find_local_shard(name, tensor)
    return _TensorRequest(name, record, shard.start, shard.local, tensor)
