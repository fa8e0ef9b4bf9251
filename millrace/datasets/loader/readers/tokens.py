"""Samples of token shards, as `millrace.datasets.formats.tokens` writes them.

A shard has the tokens of all samples, the end of each sample, and the ids of the samples, which are
not read. A sample has one field. Its array is a part of the bytes that were read, and not a copy.
"""

import ast
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from millrace.datasets.formats import Fields
from millrace.datasets.formats.tokens import HEADER_SIZE, find_tokens
from millrace.datasets.loader.fetch import OpenShard
from millrace.datasets.loader.readers.base import DecodeRows, LoadedSample, raise_damage

_DESCRIPTION = 10  # bytes of the header before the description of the array
_END_SIZE = 8  # bytes of the end of a sample, and of its id
_DTYPES = {"<u2": np.uint16, "<u4": np.uint32}


class TokensSampleReader:
    """Reader of the samples of a token shard.

    Args:
        shard: Bytes of the shard.
        fields: Types of the fields, one of which has the tokens.
        samples: Number of samples of the shard.

    Raises:
        CorruptError: The shard is no token shard, or has another number of samples.
    """

    def __init__(self, shard: OpenShard, fields: Fields, samples: int) -> None:
        self._shard, self._field = shard, find_tokens(fields)
        array_size = HEADER_SIZE + _END_SIZE * samples
        tail = shard.size - 2 * array_size
        if tail < HEADER_SIZE:
            raise_damage(shard, "it is no token shard")
        head = bytes(shard.read_once(0, HEADER_SIZE))
        try:
            described = ast.literal_eval(head[_DESCRIPTION:].decode("latin-1").strip())
            self._dtype = np.dtype(_DTYPES[described["descr"]])
            (count,) = described["shape"]
        except (ValueError, SyntaxError, LookupError, TypeError):
            raise_damage(shard, "it is no token shard")
        ends = np.frombuffer(shard.read_once(tail + HEADER_SIZE, tail + array_size), "<u8").astype(
            np.int64
        )
        self._ends: npt.NDArray[np.int64] = np.concatenate([np.zeros(1, np.int64), ends])
        is_whole = HEADER_SIZE + count * self._dtype.itemsize == tail and self._ends[-1] == count
        if not is_whole or (np.diff(self._ends) < 0).any():
            raise_damage(shard, f"its ends are not those of {samples} samples")

    def load(self, start: int, end: int) -> DecodeRows:
        """Fetch the tokens of the samples alone."""
        ends = self._ends[start : end + 1]
        size = self._dtype.itemsize
        first, last = HEADER_SIZE + size * int(ends[0]), HEADER_SIZE + size * int(ends[-1])
        self._shard.release(first)
        body = self._shard.read(first, last)
        return partial(self._decode, body, (ends - ends[0]).tolist())

    def close(self) -> None:
        """Close the shard."""
        self._shard.close()

    def _decode(self, body: memoryview, ends: list[int]) -> list[LoadedSample]:
        tokens = np.frombuffer(body, self._dtype.newbyteorder("<")).astype(self._dtype, copy=False)
        field = self._field
        return [{field: tokens[at:end]} for at, end in pairwise(ends)]
