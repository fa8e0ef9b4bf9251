"""Digests: what the bytes were when we wrote them."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

Bytes = bytes | bytearray | memoryview


def compute_sha256(data: Bytes) -> str:
    """SHA-256 of the bytes, in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def compute_stream_sha256(blocks: Iterable[Bytes]) -> tuple[str, int]:
    """SHA-256 and size in bytes of a stream, read once."""
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
    return digest.hexdigest(), size


def make_local_etag(stat: os.stat_result) -> str:
    """Return a substitute for an ETag of a file in a folder: its size and time of change.

    Not the inode: a copy that keeps times (rsync -a, cp -p) is the same file elsewhere.
    """
    return f"{stat.st_size:x}-{stat.st_mtime_ns:x}"


def dump_canonical_json(value: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and no spaces: the same record, the same bytes, on any machine."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
