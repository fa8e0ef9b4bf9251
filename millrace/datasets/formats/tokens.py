"""The format ``tokens``: a shard is a file of NumPy with the tokens of its samples.

A shard has three arrays, each as ``numpy.save`` writes it, little-endian and of one dimension:

1. the tokens, of the type ``uint16`` or ``uint32``;
2. the end of each sample, ``uint64``: the index of the first token after it;
3. the id of each sample, ``uint64``: BLAKE2b of 8 bytes, little-endian, of the sample's tokens.

``numpy.load(path, mmap_mode="r")`` maps the tokens and nothing else, as nanoGPT's
``numpy.memmap(path, dtype)`` does with a file without header. With an open file, three calls of
``numpy.load`` read the three arrays. Each header has 128 bytes, so the tokens begin at byte 128,
and the end of the file has the ends and ids: ``2 * (128 + 8 * samples)`` bytes.

The ids are defined as in the pre-tokenised shards of Templar: equal tokens have equal ids. Other
fields and the keys of the samples are not stored. A shard has whole samples, and no token is added
between them: a token that ends a document is part of its sample.

``index.json`` of each split has the type of the tokens, and the name, the number of samples and the
number of tokens of each shard.
"""

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
import orjson

from millrace.datasets.formats.base import BadSampleError, Fields, FieldType, group_shards
from millrace.datasets.formats.values import check_array, check_names
from millrace.datasets.sample import LargeFile, Sample
from millrace.errors import ConfigurationError
from millrace.keys.datasets import DatasetKeys
from millrace.memory import enlarge_buffer, map_anonymous
from millrace.schemas.dataset import ManifestShard

HEADER_SIZE = 128
"""Bytes of the header of each array."""

_SIGNATURE = b"\x93NUMPY\x01\x00" + (HEADER_SIZE - 10).to_bytes(2, "little")
_TYPES = {
    FieldType.UINT16_ARRAY: np.dtype("<u2"),
    FieldType.UINT32_ARRAY: np.dtype("<u4"),
}
_FIELD = "tokens"


class TokensFormat:
    """The format ``tokens``."""

    name = "tokens"
    extension = "npy"
    writer: Mapping[str, str] = MappingProxyType({"tokens": "1"})
    has_types = True

    def make_encoder(self, fields: Fields, capacity: int) -> "TokensEncoder":
        """Return an encoder of the only field that is an array, or of the array ``tokens``.

        Raises:
            ConfigurationError: There is no such field.
        """
        return TokensEncoder(fields, capacity)

    def make_indexes(
        self, keys: DatasetKeys, fields: Fields, shards: Sequence[ManifestShard]
    ) -> Mapping[str, bytes]:
        """Return ``index.json`` of each split, by its key."""
        dtype = _TYPES[fields[find_tokens(fields)]]
        indexes: dict[str, bytes] = {}
        for prefix, named in group_shards(keys, self.name, shards):
            described = [
                {
                    "name": name,
                    "samples": shard.samples,
                    "tokens": _count_tokens(shard, dtype),
                }
                for name, shard in named
            ]
            index = {
                "version": 1,
                "dtype": dtype.name,
                "samples": sum(cast("int", one["samples"]) for one in described),
                "tokens": sum(cast("int", one["tokens"]) for one in described),
                "shards": described,
            }
            indexes[f"{prefix}index.json"] = orjson.dumps(index, option=orjson.OPT_INDENT_2)
        return indexes


class TokensEncoder:
    """Encoder of token shards in a buffer.

    Args:
        fields: Types of the fields.
        capacity: Initial bytes of the buffer. A larger sample enlarges the buffer until `reset`.

    Raises:
        ConfigurationError: There is no field of tokens, or there are several.
    """

    sample_offsets: Sequence[tuple[int, int]] = ()  # a shard has its own table

    def __init__(self, fields: Fields, capacity: int) -> None:
        self._fields = fields
        self._field = find_tokens(fields)
        self._dtype = _TYPES[fields[self._field]]
        self._capacity = max(capacity, HEADER_SIZE)
        self._buffer = map_anonymous(self._capacity)
        self._end = HEADER_SIZE
        self._ends = array("Q")
        self._ids: list[bytes] = []
        self._prepared: bytes | LargeFile | None = None
        self.samples = 0

    @property
    def size(self) -> int:
        """Bytes of the shard if it were closed now."""
        return self._end + _compute_tail_size(self.samples)

    def prepare(self, sample: Sample) -> int:
        """Prepare a sample, and return the size that the shard would have with the sample.

        Raises:
            BadSampleError: The sample has no tokens, no whole number of tokens, or a field without
                a type.
        """
        check_names(sample, self._fields)
        data = sample.fields.get(self._field)
        if data is None:
            raise BadSampleError(f"there is no field {self._field!r}")
        try:
            check_array(len(data), self._dtype.itemsize)
        except BadSampleError as error:
            raise BadSampleError(f"the field {self._field!r} {error}") from error
        self._prepared = data
        return self._end + len(data) + _compute_tail_size(self.samples + 1)

    def append(self) -> None:
        """Append the sample that was prepared last.

        Raises:
            ChangedError: The file of the sample has changed. The sample is not in the shard.
        """
        data, self._prepared = self._prepared, None
        if data is None:
            raise RuntimeError("No sample was prepared.")
        # The reserve includes the end, so that `close` does not copy a large sample.
        end = self._end + len(data)
        self._reserve(end + _compute_tail_size(self.samples + 1))
        digest = hashlib.blake2b(digest_size=8)
        at = self._end
        for block in _iterate_blocks(data):
            digest.update(block)
            self._buffer[at : at + len(block)] = block
            at += len(block)
        if at != end:
            raise ValueError(f"A file of {len(data)} bytes gave {at - self._end}.")
        self._end = end
        self._ends.append((end - HEADER_SIZE) // self._dtype.itemsize)
        self._ids.append(digest.digest())
        self.samples += 1

    def close(self) -> memoryview:
        """Finish the file, and return its bytes. `reset` makes the view invalid."""
        size = self.size
        self._reserve(size)
        tokens = (self._end - HEADER_SIZE) // self._dtype.itemsize
        ends = np.array(self._ends, "<u8").tobytes()
        tail = b"".join(
            (_make_header("<u8", self.samples), ends, _make_header("<u8", self.samples), *self._ids)
        )
        self._buffer[:HEADER_SIZE] = _make_header(self._dtype.str, tokens)
        self._buffer[self._end : size] = tail
        return memoryview(self._buffer)[:size]

    def reset(self) -> None:
        """Begin the next shard in the same buffer, and free the memory of a large sample."""
        if len(self._buffer) > self._capacity:
            self._buffer = map_anonymous(self._capacity)
        self._end = HEADER_SIZE
        self._ends = array("Q")
        self._ids = []
        self._prepared = None
        self.samples = 0

    def _reserve(self, size: int) -> None:
        if size > len(self._buffer):
            self._buffer = enlarge_buffer(self._buffer, self._end, size)


def find_tokens(fields: Fields) -> str:
    """Return the name of the field with the tokens.

    Raises:
        ConfigurationError: No field has tokens, or several have and none is named ``tokens``.
    """
    names = [name for name, kind in fields.items() if kind in _TYPES]
    if len(names) > 1 and _FIELD in names:
        return _FIELD
    if len(names) != 1:
        found = f"{', '.join(names)} have" if names else "no field has"
        raise ConfigurationError(
            f"The format tokens takes one field of the type `uint16[]` or `uint32[]`, and {found} "
            "this type. Make tokens of the texts first, and name their field `tokens`."
        )
    return names[0]


def _compute_tail_size(samples: int) -> int:
    return 2 * (HEADER_SIZE + 8 * samples)


def _count_tokens(shard: ManifestShard, dtype: "np.dtype[np.generic]") -> int:
    return (shard.size - HEADER_SIZE - _compute_tail_size(shard.samples)) // dtype.itemsize


def _iterate_blocks(data: bytes | LargeFile) -> Iterator[bytes]:
    return data.blocks() if isinstance(data, LargeFile) else iter([data])


def _make_header(dtype: str, length: int) -> bytes:
    """Return the header of an array of one dimension (NumPy's format 1.0)."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({length},), }}"
    return _SIGNATURE + text.ljust(HEADER_SIZE - len(_SIGNATURE) - 1).encode() + b"\n"
