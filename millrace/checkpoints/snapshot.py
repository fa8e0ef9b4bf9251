"""Copies of a state, as the bytes of the files that are saved."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from mmap import mmap
from typing import Any

import torch

from millrace.checkpoints.contents import Content, PartContent, make_content
from millrace.checkpoints.parts import PartLayout, get_dtype_name, iterate_layouts, read_boxes
from millrace.checkpoints.pinned_memory import map_pinned
from millrace.checkpoints.tensor_copies import copy_tensors, find_gpus, wait_for_gpus
from millrace.checkpoints.tensor_shards import TensorShard, find_local_shard, is_distributed
from millrace.checkpoints.tree import flatten_state, is_skeleton, make_own_name
from millrace.digest import combine_blocks, hash_blocks
from millrace.errors import ConfigurationError, CorruptError
from millrace.memory import map_anonymous
from millrace.schemas.checkpoint import Chunk, Part, TensorRecord
from millrace.threads import count_processors, map_slices

_COPY_THREADS = 16  # more are limited by the bandwidth of the memory


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy of a state, as the bytes of its files.

    Attributes:
        layout: Layout of the state.
        buffers: Buffers that begin with the bytes of each file.
    """

    layout: "StateLayout"
    buffers: tuple[mmap, ...] = field(repr=False)

    @property
    def files(self) -> Iterator[memoryview]:
        """Bytes of each file."""
        for layout, buffer in zip(self.layout.files, self.buffers, strict=True):
            yield memoryview(buffer)[: layout.size]

    def make_content(self, step: int) -> Content:
        """Return the content to save at a step. Hashes all files on all processors."""
        files = tuple(self.files)
        blocks = map_slices(
            lambda one: hash_blocks(files[one][0]), len(files), step=1, threads=count_processors()
        )
        contents = tuple(map(PartContent, files, blocks))
        parts = tuple(
            Part(step=step, digest=combine_blocks(each.blocks), size=len(each.body))
            for each in contents
        )
        return make_content(step, parts, self.layout.describe_tensors(), contents.__getitem__)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of a state in files, without its tensors.

    Attributes:
        types: Types and shapes of all tensors by their names, also of those that other ranks save.
        files: Layouts of the files.
    """

    types: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    files: tuple[PartLayout, ...]

    def describe_tensors(self) -> dict[str, TensorRecord]:
        """Describe the tensors with their positions in the files."""
        chunks: dict[str, list[Chunk]] = {name: [] for name in self.types}
        for number, layout in enumerate(self.files):
            for box in layout.boxes:
                chunk = Chunk(
                    part=number, name=box.name, offset=box.offset, start=box.start, shape=box.shape
                )
                chunks[box.tensor].append(chunk)
        return {
            name: TensorRecord(dtype=get_dtype_name(dtype), shape=shape, chunks=tuple(chunks[name]))
            for name, (dtype, shape) in self.types.items()
        }


class StateShards:
    """Shards of a state's tensors that this process saves, which are laid out file by file.

    Args:
        state: Nested dicts, lists and tuples of tensors, numpy arrays and plain values.
        rank: Number of this rank, if several ranks save together. Each rank then saves its shards
            of distributed tensors, and the first rank saves everything else.
        mine: Function that selects by path the other tensors that this rank saves.
        own: State of this rank alone, such as that of its generators.

    Raises:
        ConfigurationError: A value cannot be saved. The message has its path.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        rank: int | None = None,
        mine: Callable[[str], bool] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        held = {
            name: _select_shard(name, tensor, rank, mine)
            for name, tensor in flatten_state(state).items()
        }
        for name, tensor in flatten_state(own).items() if own else ():
            held[make_own_name(rank or 0, name)] = find_local_shard(name, tensor)
        self._types = {name: (shard.local.dtype, shard.shape) for name, shard in held.items()}
        self._shards = {name: shard for name, shard in held.items() if shard.mine}
        self._gpus = find_gpus(self._shards.values())

    def iterate_files(self, part_bytes: int) -> Iterator[PartLayout]:
        """Lay the tensors out in files: see `parts.iterate_layouts`."""
        # A skeleton has a file of its own, since a partial load reads it whole.
        small = {name: shard for name, shard in self._shards.items() if is_skeleton(name)}
        large = {name: shard for name, shard in self._shards.items() if name not in small}
        yield from iterate_layouts(large, part_bytes)
        yield from iterate_layouts(small, part_bytes)

    def make_layout(self, files: Iterable[PartLayout]) -> StateLayout:
        """Return the layout of the state in files that `iterate_files` has returned."""
        return StateLayout(self._types, tuple(files))

    def write_head(self, layout: PartLayout, buffer: mmap) -> None:
        """Write the header of a file into a buffer, and read it back as `load` does.

        Raises:
            ConfigurationError: The file could not be loaded.
        """
        buffer[: len(layout.head)] = layout.head
        _check_readable(layout, memoryview(buffer)[: layout.size])

    def allocate(self, size: int) -> mmap:
        """Allocate memory for files of the state."""
        return map_pinned(size) if self._gpus else map_anonymous(size)

    def copy(
        self,
        files: Iterable[tuple[PartLayout, mmap]],
        *,
        threads: int = 1,
        on_copied: Callable[[memoryview], None] = lambda _: None,
    ) -> None:
        """Copy the tensors into files: see `copy_tensors`."""
        copy_tensors(self._shards, files, threads=threads, on_copied=on_copied)

    def wait_for_gpus(self) -> None:
        """Wait for the computations of the tensors that are on GPUs."""
        wait_for_gpus(self._gpus)


class SnapshotBuffers:
    """Memory for snapshots, which is reused because new memory is slow."""

    def __init__(self) -> None:
        self._buffers: list[mmap] = []

    @property
    def size(self) -> int:
        """Size of the memory in bytes."""
        return sum(map(len, self._buffers))

    def snapshot(
        self,
        shards: StateShards,
        part_bytes: int,
        *,
        on_copied: Callable[[memoryview], None] = lambda _: None,
    ) -> Snapshot:
        """Copy a state, and overwrite the previous copy.

        GPUs copy the first files while later files are laid out. Processors copy after the headers
        of all files were read back.

        Args:
            shards: Shards of the state.
            part_bytes: Largest size of a file in bytes. Only a single larger row exceeds it.
            on_copied: Function that is called with the bytes of each file after their copy, in
                the order of the files, and by one thread at a time.

        Raises:
            ConfigurationError: A value cannot be saved. The message has its path. `on_copied` was
                not called.
        """
        files: list[PartLayout] = []

        def prepare_files() -> Iterator[tuple[PartLayout, mmap]]:
            for layout in shards.iterate_files(part_bytes):
                buffer = self._provide_buffer(len(files), layout.size, shards)
                shards.write_head(layout, buffer)
                files.append(layout)
                yield layout, buffer

        shards.copy(
            prepare_files(),
            threads=min(_COPY_THREADS, count_processors()),
            on_copied=on_copied,
        )
        del self._buffers[len(files) :]
        return Snapshot(shards.make_layout(files), tuple(self._buffers))

    def _provide_buffer(self, number: int, size: int, shards: StateShards) -> mmap:
        """Return the buffer for a file, and replace it if it is too small."""
        if number == len(self._buffers):
            self._buffers.append(shards.allocate(size))
        elif len(self._buffers[number]) < size:
            self._buffers[number] = shards.allocate(size)
        return self._buffers[number]

    def open_files(
        self, shards: StateShards, files: Sequence[PartLayout], count: int
    ) -> list[Callable[[], AbstractContextManager[memoryview]]]:
        """Return a function for each file of a state, which copies the file when it is called.

        The result of the function is a context with the bytes of the file. At most ``count``
        contexts may be open at once, in any threads. The memory is that of so many files.

        Args:
            shards: Shards of the state. The state must not change before the last context ends.
            files: Layouts of the files.
            count: Number of contexts that are open at once.

        Raises:
            ConfigurationError: A file could not be loaded.
        """
        count = min(count, len(files))
        largest = max((layout.size for layout in files), default=0)  # of a rank without a share
        kept = [buffer for buffer in self._buffers if len(buffer) >= largest][:count]
        self._buffers = kept + [shards.allocate(largest) for _ in range(count - len(kept))]
        for layout in files:
            shards.write_head(layout, self._buffers[0])
        shards.wait_for_gpus()  # other threads, with other streams, make the copies
        free = deque(self._buffers)

        @contextmanager
        def open_file(layout: PartLayout) -> Generator[memoryview]:
            buffer = free.popleft()
            try:
                shards.copy([(layout, buffer)])
                yield memoryview(buffer)[: layout.size]
            finally:
                free.append(buffer)

        return [partial(open_file, layout) for layout in files]

    def clear(self) -> None:
        """Free the memory."""
        self._buffers.clear()


def _select_shard(
    name: str, tensor: torch.Tensor, rank: int | None, mine: Callable[[str], bool] | None
) -> TensorShard:
    """Return the part of a tensor that this process holds, marked if this process saves it."""
    shard = find_local_shard(name, tensor)
    if not is_distributed(tensor):
        its = not rank if mine is None or is_skeleton(name) else mine(name)
        if its and tensor.is_meta:
            raise ConfigurationError(
                f"{name} is on the device meta, without content: give a tensor with content."
            )
        return replace(shard, mine=its)
    if rank is None:
        raise ConfigurationError(
            f"{name} is distributed over several ranks: let each of them save with a "
            "Saver(ranks=Ranks.from_group())."
        )
    return shard


def _check_readable(layout: PartLayout, file: memoryview) -> None:
    """Read the header of a file as `load` does, and compare it with the layout.

    Raises:
        ConfigurationError: The file could not be loaded.
    """
    try:
        found = read_boxes(file)
    except CorruptError as error:
        raise ConfigurationError(
            f"The file with {layout.boxes[0].tensor} could not be loaded again: {error} Rename "
            "the tensors of this state, or save with smaller files."
        ) from error
    for box in layout.boxes:
        there = found.get(box.name)
        if there is None or (there.dtype, tuple(there.shape)) != (box.dtype, box.shape):
            raise ConfigurationError(
                f"{box.tensor} could not be found again in its file: give it another name."
            )
