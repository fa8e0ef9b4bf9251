"""Copies of tensors into the bytes of files, on several threads and from GPUs.

torch copies each tensor with threads of its own, which all wait for the slowest. While other
threads upload files, this took ten times as long as without them.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from mmap import mmap

import numpy as np
import numpy.typing as npt
import torch

from millrace.checkpoints.parts import Box, PartLayout
from millrace.checkpoints.tensor_shards import TensorShard
from millrace.threads import map_slices

_COPY_SIZE = 8 << 20  # bytes that a thread copies at once


def copy_tensors(
    shards: Mapping[str, TensorShard],
    files: Iterable[tuple[PartLayout, mmap]],
    *,
    threads: int,
    on_copied: Callable[[memoryview], None],
) -> None:
    """Copy tensors into files. All copies have ended afterwards, also after an error.

    Args:
        shards: Shards of tensors to copy, by the tensors' names.
        files: Layouts of the files, with their buffers.
        threads: Number of threads.
        on_copied: Function that is called with the bytes of each file after their copy, in the
            order of the files, and by one thread at a time.
    """
    copied = _CopiedFiles(on_copied)
    copies: list[tuple[_FileCopy, BytesCopy]] = []
    gpus = set[torch.device]()
    try:
        for layout, buffer in files:
            file_gpus = find_gpus(shards[box.tensor] for box in layout.boxes)
            gpus |= file_gpus
            buffer[: len(layout.head)] = layout.head
            file_copies = [
                copy for box in layout.boxes for copy in _start_copy(shards, box, buffer)
            ]
            file = _FileCopy(
                memoryview(buffer)[: layout.size],
                [_record_event(gpu) for gpu in file_gpus],
                len(file_copies),
            )
            copied.add(file)
            copies += [(file, copy) for copy in file_copies]

        def run_copies(some: slice) -> None:
            for file, copy in copies[some]:
                copy.run()
                copied.count_copy(file)

        map_slices(run_copies, len(copies), step=1, threads=threads)
        copied.wait()
    finally:
        wait_for_gpus(gpus)


def find_gpus(shards: Iterable[TensorShard]) -> set[torch.device]:
    """Return the GPUs that have some of the tensors."""
    return {shard.local.device for shard in shards if shard.local.is_cuda}


def wait_for_gpus(gpus: Iterable[torch.device]) -> None:
    """Wait for the computations and the copies in the streams that this thread uses."""
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()


@dataclass(frozen=True, slots=True)
class BytesCopy:
    """Copy of some bytes of a tensor into a file."""

    target: npt.NDArray[np.uint8]
    source: npt.NDArray[np.uint8]

    def run(self) -> None:
        """Copy the bytes without the GIL."""
        np.copyto(self.target, self.source)


@dataclass(slots=True)
class _FileCopy:
    """Copy of a file that has begun.

    Attributes:
        body: Bytes of the file.
        events: Ends of its copies from GPUs.
        missing: Number of its other copies that have not ended.
    """

    body: memoryview
    events: list[torch.cuda.Event]
    missing: int


class _CopiedFiles:
    """Queue of files, from which each is taken after its copy."""

    def __init__(self, on_copied: Callable[[memoryview], None]) -> None:
        self._on_copied = on_copied
        self._waiting = deque[_FileCopy]()
        self._lock = threading.Lock()

    def add(self, file: _FileCopy) -> None:
        """Add the next file."""
        self._waiting.append(file)

    def count_copy(self, file: _FileCopy) -> None:
        """Count a copy of a file that has ended, and take the first files if they are complete."""
        with self._lock:
            file.missing -= 1
            while self._is_first_complete():
                self._take()

    def wait(self) -> None:
        """Wait for the copies from GPUs, and take the files."""
        while self._waiting:
            for event in self._waiting[0].events:
                event.synchronize()
            self._take()

    def _is_first_complete(self) -> bool:
        if not self._waiting or self._waiting[0].missing:
            return False
        return all(event.query() for event in self._waiting[0].events)

    def _take(self) -> None:
        self._on_copied(self._waiting.popleft().body)


def _record_event(gpu: torch.device) -> torch.cuda.Event:
    """Record the end of the copies from a GPU that this thread has begun."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(gpu))
    return event


def _start_copy(shards: Mapping[str, TensorShard], box: Box, buffer: mmap) -> list[BytesCopy]:
    """Start the copy of a box from a GPU, or return the copies of its bytes."""
    if not box.size:
        return []
    shard = shards[box.tensor]
    local = shard.local.detach()
    whole = tuple(local.shape) == box.shape
    source = local if whole else local.narrow(0, box.start[0] - shard.start[0], box.shape[0])
    # A copy from a GPU would resolve these bits in the pinned memory, before the bytes are there.
    source = source.resolve_conj().resolve_neg()
    if source.device.type != "cpu" or not source.is_contiguous():
        count = box.size // box.dtype.itemsize
        target = torch.frombuffer(buffer, dtype=box.dtype, count=count, offset=box.offset)
        target.view(box.shape).copy_(source, non_blocking=source.is_cuda)
        return []
    # The strides of dimensions of one element may be any, so `view` can refuse them.
    vector = source.as_strided((source.numel(),), (1,))
    source_bytes = vector.view(torch.uint8).numpy()
    target_bytes = np.frombuffer(buffer, np.uint8, box.size, box.offset)
    return [
        BytesCopy(
            target_bytes[first : first + _COPY_SIZE], source_bytes[first : first + _COPY_SIZE]
        )
        for first in range(0, box.size, _COPY_SIZE)
    ]
