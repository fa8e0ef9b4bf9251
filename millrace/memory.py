"""Allocate memory with huge pages, since the first write to small pages costs more than a copy.

A process can also keep the memory that it frees.
"""

import contextlib
import ctypes
import mmap

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
_HUGE_PAGE_SIZE = 2 << 20  # bytes, on x86-64 and with small base pages on Arm


def use_huge_pages(address: int, size: int) -> None:
    """Ask for huge pages for memory that another library has allocated and not written yet.

    Args:
        address: Address of the memory.
        size: Size in bytes. Memory without a whole huge page is left as it is.
    """
    first = -(-address // _HUGE_PAGE_SIZE) * _HUGE_PAGE_SIZE
    count = (address + size - first) // _HUGE_PAGE_SIZE
    if count > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(first, count * _HUGE_PAGE_SIZE, mmap.MADV_HUGEPAGE)  # a refusal does no harm


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next rows, instead of returning it to the system.

    By default, glibc returns freed memory at once, and a worker spends most of its system time on
    page faults. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def map_anonymous(size: int) -> mmap.mmap:
    """Allocate memory whose pages exist only after the first write.

    Huge pages are used if the system has them. With small pages, the first write to a large buffer
    takes longer than the computation of its digest.

    Args:
        size: Number of bytes; at least 1.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(memory)
    return memory


def enlarge_buffer(buffer: mmap.mmap, used: int, size: int) -> mmap.mmap:
    """Return a larger buffer with the first bytes of a buffer, at least twice as large.

    The old buffer is not resized, since an upload may still read it.

    Args:
        buffer: Buffer that is too small.
        used: Number of bytes to keep.
        size: Number of bytes that are needed.
    """
    larger = map_anonymous(max(size, 2 * len(buffer)))
    larger[:used] = buffer[:used]
    return larger


def advise_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages for a mapping that has not been written yet."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
