"""The format WebDataset: a shard is a tar file, and a sample is the members that share a key.

The bytes are those of webdataset's own ``TarWriter(mtime=0)``, the same on every run and machine.
Headers (ustar, POSIX.1-1988) are made from a template. The next shard uses the same buffer.
"""

import tarfile
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import orjson

from millrace.datasets.formats.base import BadSampleError, Fields, copy_file, group_shards
from millrace.datasets.sample import LargeFile, Sample
from millrace.keys.datasets import DatasetKeys
from millrace.memory import enlarge_buffer, map_anonymous
from millrace.schemas.dataset import TAR_BLOCK, ManifestShard

_MIN_OFFSET_STEP = 1 << 20
_OFFSETS = 8  # of samples in a full shard, whose places are kept
_RECORD = 10240  # the end of a tar file is padded to a whole record, as `tarfile` does
_ZEROS = bytes(_RECORD + 2 * TAR_BLOCK)
_NAME = 100
_LARGEST = 8**11 - 1

_MODE_OWNER = b"0000444\x00" + b"0000000\x00" * 2
_MTIME = b"00000000000\x00"
_TAIL = b"0" + bytes(100) + b"ustar\x00" + b"00" + b"bigdata".ljust(32, b"\x00") * 2 + bytes(183)
_CONSTANT = sum(_TAIL) + 8 * ord(" ")


class WebDatasetFormat:
    """WebDataset. A sample can have any fields, which have no types."""

    name = "webdataset"
    extension = "tar"
    writer: Mapping[str, str] = {"webdataset": "ustar-1"}
    has_types = False

    def make_encoder(self, fields: Fields, capacity: int) -> "TarEncoder":
        """Return an encoder of tar files."""
        return TarEncoder(capacity)

    def make_indexes(
        self, keys: DatasetKeys, fields: Fields, shards: Sequence[ManifestShard]
    ) -> dict[str, bytes]:
        """Return webdataset's index of the shards of each split (wids-shard-index-v1).

        That in the folder of the dataset has the shards of ``train``. URLs are relative to the
        index. There is no ``md5sum``; ``digest`` is that of the manifest.
        """
        train = [shard for shard in shards if shard.split == "train"]
        indexes = {keys.index: _make_index(keys, f"{keys.dataset}/", train)}
        for prefix, named in group_shards(keys, self.name, shards):
            indexes[f"{prefix}index.json"] = _make_index(keys, prefix, [one for _, one in named])
        return indexes


def _make_index(keys: DatasetKeys, prefix: str, shards: Iterable[ManifestShard]) -> bytes:
    index = {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": keys.dataset,
        "shardlist": [
            {
                "url": shard.key.removeprefix(prefix),
                "nsamples": shard.samples,
                "filesize": shard.size,
                "digest": shard.digest,
            }
            for shard in shards
        ],
    }
    return orjson.dumps(index, option=orjson.OPT_INDENT_2)


class TarEncoder:
    """Encoder of tar files in a buffer.

    Args:
        capacity: Initial bytes of the buffer. A larger sample enlarges the buffer until `reset`.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        self._capacity = capacity
        self._buffer = map_anonymous(capacity)
        self._end = 0
        self._prepared: list[tuple[bytes, bytes | LargeFile]] = []
        self._closed_size = 0  # of the tar file with the prepared sample
        self._offset_step = max(_MIN_OFFSET_STEP, capacity // _OFFSETS)
        self._next_offset = self._offset_step  # from which on the next offset is kept
        self.samples = 0
        self.sample_offsets: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        """Bytes of the shard if it were closed now, with its two empty blocks and the padding."""
        return _round_up(self._end + 2 * TAR_BLOCK, _RECORD)

    def prepare(self, sample: Sample) -> int:
        """Make the headers of a sample's members, and return the size of the tar file with them."""
        key = sample.key
        members: list[tuple[bytes, bytes | LargeFile]] = []
        end = self._end
        for extension in sorted(sample.fields):
            data = sample.fields[extension]
            header = _make_header(f"{key}.{extension}", len(data))
            members.append((header, data))
            end += len(header) + len(data) + -len(data) % TAR_BLOCK
        self._prepared = members
        self._closed_size = _round_up(end + 2 * TAR_BLOCK, _RECORD)
        return self._closed_size

    def append(self) -> None:
        """Append the members of the prepared sample."""
        # The end is reserved too, so that `close` does not copy a large sample.
        self._reserve(self._closed_size)
        at, buffer = self._end, self._buffer
        if at >= self._next_offset:
            self.sample_offsets.append((self.samples, at))
            self._next_offset = at - at % self._offset_step + self._offset_step
        for header, data in self._prepared:
            body = at + len(header)
            buffer[at:body] = header
            after = body + len(data)
            if isinstance(data, LargeFile):
                copy_file(data, memoryview(buffer)[body:after])
            else:
                buffer[body:after] = data
            at = after + -len(data) % TAR_BLOCK
            buffer[after:at] = _ZEROS[: at - after]
        self._end = at
        self._prepared = []
        self.samples += 1

    def close(self) -> memoryview:
        """Finish the tar file, and return its bytes."""
        size = self.size
        self._reserve(size)
        self._buffer[self._end : size] = _ZEROS[: size - self._end]
        return memoryview(self._buffer)[:size]

    def reset(self) -> None:
        """Begin the next tar file in the same buffer, and free the memory of a large sample."""
        if len(self._buffer) > self._capacity:
            self._buffer = map_anonymous(self._capacity)
        self._end, self._next_offset = 0, self._offset_step
        self._prepared = []
        self.samples, self.sample_offsets = 0, []

    def _reserve(self, size: int) -> None:
        if size > len(self._buffer):
            self._buffer = enlarge_buffer(self._buffer, self._end, size)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _make_header(name: str, size: int) -> bytes:
    """Return a member's header: 512 bytes, or more if ustar cannot hold the name or the size."""
    if len(name) > _NAME or not name.isascii() or size > _LARGEST:
        return _make_pax_header(name, size)
    raw = name.encode()
    middle, constant = _make_header_middle(size)
    return b"%b%b%06o\x00 %b" % (raw.ljust(_NAME, b"\x00"), middle, constant + sum(raw), _TAIL)


@lru_cache(1 << 12)
def _make_header_middle(size: int) -> tuple[bytes, int]:
    """Return the header's bytes between name and checksum, and the checksum without the name."""
    middle = b"%b%011o\x00%b" % (_MODE_OWNER, size, _MTIME)
    return middle, _CONSTANT + sum(middle)


def _make_pax_header(name: str, size: int) -> bytes:
    """Return a header by `tarfile`, with a pax record for values beyond ustar (POSIX.1-2001)."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime, info.uname, info.gname = size, 0o444, 0, "bigdata", "bigdata"
    try:
        return info.tobuf(tarfile.PAX_FORMAT)
    except (ValueError, UnicodeEncodeError) as error:
        raise BadSampleError(f"no tar member can have its name: {error}") from error
