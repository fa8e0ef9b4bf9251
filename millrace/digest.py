"""Digests of bytes, and canonical JSON."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

Bytes = bytes | bytearray | memoryview


def compute_sha256(data: Bytes) -> str:
    """Return the SHA-256 of bytes, in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def compute_stream_sha256(blocks: Iterable[Bytes]) -> tuple[str, int]:
    """Return the SHA-256 in hexadecimal and the size in bytes of a stream, which is read once."""
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
    return digest.hexdigest(), size


def make_local_etag(stat: os.stat_result) -> str:
    """Return a substitute for the ETag of a file: its size and modification time.

    The inode is left out, so that a copy with the same times (rsync -a, cp -p) has the same ETag.
    """
    return f"{stat.st_size:x}-{stat.st_mtime_ns:x}"


def dump_canonical_json(value: Mapping[str, Any]) -> bytes:
    """Return JSON with sorted keys and without spaces, so that equal values have equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
