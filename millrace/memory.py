"""Allocate memory for buffers that are used again, since new memory costs more than a copy."""

import contextlib
import mmap


def map_anonymous(size: int) -> mmap.mmap:
    """Allocate memory whose pages exist only after the first write.

    Huge pages are used if the system has them. With small pages, the first write to a large buffer
    takes longer than the computation of its digest.

    Args:
        size: Number of bytes; at least 1.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
