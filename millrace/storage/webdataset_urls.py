"""Let webdataset read shards from private stores.

After `register_store`, ``webdataset.WebDataset([store.make_url(key), ...])`` reads shards from the
store. The credentials stay in this process. Forked workers of a DataLoader inherit them. Spawned
workers call `register_store` in their ``worker_init_fn``.
"""

import io
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from webdataset.gopen import gopen_schemes  # pyright: ignore[reportUnknownVariableType]

from millrace.errors import ConfigurationError
from millrace.storage.locations import Backend
from millrace.storage.open import Store
from millrace.storage.read import stream

_stores: dict[str, Store] = {}


def register_store(store: Store) -> None:
    """Let webdataset open the URLs of a store with the store's credentials."""
    _stores[store.url] = store
    if store.location.backend is not Backend.FILE:  # webdataset opens files by itself
        gopen_schemes[store.location.backend.value] = _open_url


class _BlockReader(io.RawIOBase):
    """File object over a stream of blocks. The stream is read once, from the beginning."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def close(self) -> None:
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()  # the generator cancels its pending requests
        super().close()


def _open_url(url: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> io.BufferedReader:
    if mode != "rb":
        raise ConfigurationError(
            f"{url} cannot be opened with mode {mode!r}: shards are read-only, so use 'rb'."
        )
    matching = [base for base in _stores if url.startswith(f"{base}/")]
    if not matching:
        raise ConfigurationError(
            f"No store was registered for {url}: call register_store(store) first."
        )
    base = max(matching, key=len)
    blocks = stream(_stores[base], unquote(url.removeprefix(f"{base}/")))
    return io.BufferedReader(_BlockReader(blocks), max(bufsize, 1 << 20))
