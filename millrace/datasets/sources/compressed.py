"""Read compressed files from any of their seek points, which are stored as the files are read.

Nothing is read while a run is planned. The first run that reads a file stores the state of its
decompressor about every 32 MiB of the file. A run that continues begins at the last of these seek
points. They are not needed: without them, the file is read from the beginning. A warning names a
file of zstd whose frame is too long for them.
"""

import contextlib
import logging
from collections.abc import Iterator

from millrace import errors
from millrace.datasets.sources.decoder import DamageError, DecoderState, FileDecompressor
from millrace.datasets.sources.files import SourceFiles
from millrace.datasets.sources.lines import Section
from millrace.formatting import format_size
from millrace.keys.datasets import make_seek_point_key, parse_seek_point
from millrace.records import commit_once, fetch
from millrace.schemas.dataset import (
    COMPRESSED_STEP,
    CompressedRange,
    FileRef,
    SeekPoint,
)
from millrace.storage import Store, list_objects

SEEK_INTERVAL = 32 << 20  # compressed bytes from one seek point to the next

logger = logging.getLogger(__name__)

_EXTENSIONS = (".gz", ".zst")
_REFUSED = (".bz2", ".xz", ".lz4", ".zip", ".7z", ".br")


def find_compression(path: str) -> str:
    """Return the extension by which a file is compressed, such as ``.gz``; else an empty text.

    Raises:
        ConfigurationError: No run could continue in the middle of such a file.
    """
    name = path.lower()
    if name.endswith(_REFUSED):
        raise errors.ConfigurationError(
            f"{path} is compressed, and a run could not continue in the middle of it: decompress "
            "it first, or compress it as .gz or .zst."
        )
    return next((extension for extension in _EXTENSIONS if name.endswith(extension)), "")


def iterate_compressed_sections(
    files: SourceFiles,
    store: Store | None,
    source_range: CompressedRange,
    cursor: int,
    *,
    store_states: bool,
    block: int,
) -> Iterator[Section]:
    """Yield the decompressed bytes of a file from a cursor on, to the end of the file.

    Args:
        files: Files of the source.
        store: Store of the dataset, for the seek points; None for no seek points.
        source_range: Range with the file.
        cursor: Cursor from which the file is read. The first sections may be before it.
        store_states: Whether to store the seek points that are found.
        block: Bytes of the file that are read at a time.

    Raises:
        ConfigurationError: The file is damaged.
    """
    file = source_range.file
    state = _find_state(store, source_range, cursor) if store else DecoderState()
    extension = find_compression(file.path)
    decoder = _open_decoder(extension, state)
    cursor, offset, position = state.cursor, state.offset, state.position
    seek_point, may_warn = position, store_states and extension == ".zst"
    try:
        for step in _iterate_steps(files, file, position, block):
            for data in decoder.decode(position, step):
                yield Section(cursor, offset, data)
                cursor, offset = cursor + len(data), offset + len(data)
            if (found := decoder.take_state()) is not None and store and store_states:
                _store_state(store, source_range, found)
                seek_point = found.position
            position += len(step)
            if store and may_warn and position - seek_point > 2 * SEEK_INTERVAL:
                logger.warning(
                    "%s has a frame of zstd of more than %s: a run that continues reads the file "
                    "from byte %d again. Compress it in several frames, as `pzstd` does.",
                    files.make_url(file.path), format_size(2 * SEEK_INTERVAL), seek_point,
                )  # fmt: skip
                may_warn = False
            cursor = CompressedRange.make_cursor(position, 0)
        decoder.finish()
    except DamageError as error:
        raise errors.ConfigurationError(
            f"{files.make_url(file.path)} cannot be decompressed near byte {position}: {error}. "
            "Shard the source under another dataset name, with the file replaced, or left out with "
            "`exclude`."
        ) from None


def _open_decoder(extension: str, state: DecoderState) -> FileDecompressor:
    """Return a decompressor. Numpy and zstandard are imported only for what needs them."""
    if extension == ".gz":
        from millrace.datasets.sources.gzip_members import GzipDecoder  # noqa: PLC0415

        return GzipDecoder(state, SEEK_INTERVAL)
    from millrace.datasets.sources.zstd_frames import ZstdDecoder  # noqa: PLC0415

    return ZstdDecoder(state, SEEK_INTERVAL)


def _iterate_steps(files: SourceFiles, file: FileRef, position: int, block: int) -> Iterator[bytes]:
    """Yield the bytes of a file in steps. The first one may be shorter."""
    size = COMPRESSED_STEP - position % COMPRESSED_STEP
    held = b""
    for data in files.iterate_blocks(file, position, file.size, block=block):
        held = held + data if held else data
        at = 0
        while len(held) - at >= size:
            yield held[at : at + size]
            at, size = at + size, COMPRESSED_STEP
        held = held[at:]
    if held:
        yield held


def _find_state(store: Store, source_range: CompressedRange, cursor: int) -> DecoderState:
    """Return the last stored state before a cursor; that of the beginning if there is none."""
    folder = source_range.seek_points
    if cursor == 0:
        return DecoderState()
    cursors = (parse_seek_point(folder, stat.key) for stat in list_objects(store, f"{folder}/"))
    found = max((one for one in cursors if one is not None and one <= cursor), default=None)
    if found is None:
        return DecoderState()
    # Another process may have deleted the seek point. A damaged one is as if there were none.
    with contextlib.suppress(errors.NotFoundError, errors.CorruptError):
        point = fetch(store, make_seek_point_key(folder, found), SeekPoint)
        file = source_range.file
        is_same = point.file == file if file.etag else point.file.size == file.size
        if is_same and point.cursor == found:
            return DecoderState(
                position=point.position,
                bit=point.bit,
                cursor=point.cursor,
                offset=point.offset,
                window=point.decode_window(),
                checksum=point.checksum,
                member_bytes=point.member_bytes,
            )
    return DecoderState()


def _store_state(store: Store, source_range: CompressedRange, state: DecoderState) -> None:
    point = SeekPoint.make(
        source_range.file,
        state.window,
        position=state.position,
        bit=state.bit,
        cursor=state.cursor,
        offset=state.offset,
        checksum=state.checksum,
        member_bytes=state.member_bytes,
    )
    with contextlib.suppress(errors.CorruptError):  # a damaged one is there
        commit_once(store, make_seek_point_key(source_range.seek_points, state.cursor), point)
