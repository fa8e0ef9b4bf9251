"""Load checkpoints: every file is verified before anything of it is used."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from millrace import errors
from millrace.checkpoints.contents import read_part
from millrace.checkpoints.find import Check, checkpoint_of, latest
from millrace.checkpoints.parts import dtype_of, read_boxes
from millrace.checkpoints.tree import SKELETON, put_together
from millrace.memory import anonymous
from millrace.models.checkpoint import Checkpoint, Chunk, TensorRecord
from millrace.progress import Progress, silent
from millrace.storage import Store

_AT_ONCE = 4

Rows = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
        checkpoint: What it is: step, position, notes.
        state: What was saved, or what was asked for of it.
    """

    checkpoint: Checkpoint
    state: dict[str, Any]


def load(
    store: Store,
    job: str,
    *,
    step: int | None = None,
    only: Callable[[str], bool] = lambda _: True,
    rows: Rows | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> Loaded:
    """Load a checkpoint; only the files that hold what is asked for are read.

    Memory is that of the tensors, and of four files.

    Args:
        store: Where it is.
        job: Whose.
        step: Which; by default the newest whose files are all there, with their sizes. If its
            bytes prove to be damaged, the one before it is loaded.
        only: Which tensors, by their paths (``model.layers.0.weight``); others are left out.
        rows: Of these tensors only the rows from the first number to the one before the second.
        device: Where the tensors are put.
        progress: Told ``checkpoint.damaged`` of what was passed over.

    Raises:
        NotFoundError: There is none.
        CorruptError: Of the step that was asked for, a file is not the bytes that were saved.
        ConfigurationError: Rows are asked for of a tensor that has fewer.
    """
    read_rows = dict(rows or {})
    if step is not None:
        return _load(store, checkpoint_of(store, job, step), only, read_rows, device)
    found = latest(store, job, check=Check.SIZES, progress=progress)
    try:
        if found is not None:
            return _load(store, found, only, read_rows, device)
    except errors.CorruptError:  # or its bytes were changed on their way, and it is found again
        found = latest(store, job, check=Check.DIGESTS, progress=progress)
        if found is not None:
            return _load(store, found, only, read_rows, device)
    raise errors.NotFoundError(f"{store.url_of(job)} has no checkpoint that can be loaded.")


def _load(
    store: Store,
    checkpoint: Checkpoint,
    only: Callable[[str], bool],
    rows: Rows,
    device: torch.device | str,
) -> Loaded:
    wanted = {
        name: _wanted(name, record, rows.get(name), device)
        for name, record in checkpoint.tensors.items()
        if name == SKELETON or only(name)
    }
    by_part: dict[int, list[tuple[_Wanted, Chunk]]] = {}
    for tensor in wanted.values():
        for chunk in tensor.chunks():
            by_part.setdefault(chunk.part, []).append((tensor, chunk))

    largest = max(part.size for part in checkpoint.parts)
    free = [memoryview(anonymous(largest)) for _ in range(_AT_ONCE)]

    def fill(number: int) -> None:
        part, asked = checkpoint.parts[number], by_part[number]
        # A buffer that goes round, and a copy: quicker than new memory that the tensors could keep.
        buffer = free.pop()
        boxes = read_boxes(read_part(store, checkpoint.job, part, buffer))
        for tensor, chunk in asked:
            tensor.fill(chunk, boxes.get(chunk.name))
        free.append(buffer)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="part") as pool:
        list(pool.map(fill, sorted(by_part)))
    tensors = {name: tensor.content for name, tensor in wanted.items()}
    tensors[SKELETON] = tensors[SKELETON].cpu()
    return Loaded(checkpoint, put_together(tensors))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor that is being loaded.

    Attributes:
        name: Its name.
        record: What it is in the checkpoint.
        first: The first row that is wanted.
        content: What it is filled into: memory of which no page exists before it is written.
    """

    name: str
    record: TensorRecord
    first: int
    content: torch.Tensor

    def chunks(self) -> Iterator[Chunk]:
        """The boxes that some of it lies in."""
        for chunk in self.record.chunks:
            if not chunk.shape or self._overlap(chunk)[0] < self._overlap(chunk)[1]:
                yield chunk

    def fill(self, chunk: Chunk, box: torch.Tensor | None) -> None:
        """Take from a box what is wanted of it."""
        if box is None or tuple(box.shape) != chunk.shape or box.dtype != self.content.dtype:
            raise errors.CorruptError(f"{self.name} is not in the file that should hold it.")
        if not chunk.shape:
            self.content.copy_(box)
            return
        start, stop = self._overlap(chunk)
        at = chunk.start[0]
        self.content[start - self.first : stop - self.first].copy_(box[start - at : stop - at])

    def _overlap(self, chunk: Chunk) -> tuple[int, int]:
        at = chunk.start[0]
        return max(at, self.first), min(at + chunk.shape[0], self.first + len(self.content))


def _wanted(
    name: str, record: TensorRecord, rows: tuple[int, int] | None, device: torch.device | str
) -> _Wanted:
    first, shape = 0, record.shape
    if rows is not None:
        first, stop = rows
        if not shape or not 0 <= first <= stop <= shape[0]:
            raise errors.ConfigurationError(
                f"{name} has the shape {list(shape)}: rows {first} to {stop} are not in it."
            )
        shape = (stop - first, *shape[1:])
    content = torch.empty(shape, dtype=dtype_of(record.dtype), device=device)
    return _Wanted(name, record, first, content)
