"""Decompress an archive while it arrives."""

import zlib
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import zstandard

from millrace import errors
from millrace.swarm.archives.limits import READ_SIZE, Reader, make_truncation_error

# Inputs of a decoder are small, so that its outputs stay small: deflate expands one byte to at most
# 1032 bytes, and zstd four bytes to a block of 128 KiB.
_GZIP_FEED = 4 << 10
_ZSTD_FEED = 1 << 10
_ZSTD_WINDOW = 128 << 20


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def gunzip(archive: Reader) -> Iterator[bytes]:
    """Yield the content of a gzip file."""
    return _decompress_frames(archive, lambda: zlib.decompressobj(wbits=31), _GZIP_FEED)


def unzstd(archive: Reader) -> Iterator[bytes]:
    """Yield the content of a zstd file. Refuse a file with a window above 128 MiB."""
    zstd = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    # Cast: the stubs of zstandard use types that Python no longer has.
    return _decompress_frames(archive, lambda: cast("_Decoder", zstd.decompressobj()), _ZSTD_FEED)


def _decompress_frames(archive: Reader, new: Callable[[], _Decoder], feed: int) -> Iterator[bytes]:
    """Yield the content of consecutive compressed frames. Zeros between frames are skipped."""
    decoder = new()
    while data := archive.read(READ_SIZE):
        for at in range(0, len(data), feed):
            piece = data[at : at + feed]
            while piece:
                if decoder.eof:
                    piece = piece.lstrip(b"\0")
                    if not piece:
                        break
                    decoder = new()
                try:
                    found = decoder.decompress(piece)
                except (zlib.error, zstandard.ZstdError) as error:
                    raise errors.ArchiveError(
                        f"The archive is damaged, or has another compression: {error}. Upload it "
                        "again, or name its method in `unpack`."
                    ) from error
                piece = decoder.unused_data if decoder.eof else b""
                if found:
                    yield found
    if not decoder.eof:
        raise make_truncation_error()
