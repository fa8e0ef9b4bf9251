"""Memory for buffers that go round: new memory costs more than copying into it."""

import contextlib
import mmap


def map_anonymous(size: int) -> mmap.mmap:
    """Memory of which no page exists before it is written.

    In huge pages where the system has them: with small ones, touching a large buffer for the
    first time takes longer than hashing it.

    Args:
        size: Bytes, more than none.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
