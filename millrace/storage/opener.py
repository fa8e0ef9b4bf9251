"""Let webdataset read shards straight from a private store.

``webdataset.WebDataset([store.url_of(key), ...])`` works once `register` has told webdataset's
``gopen`` how to open the store's URLs. The credentials stay in this process: a DataLoader's
forked workers inherit them, spawned ones call `register` in their ``worker_init_fn``.
"""

import io
from collections.abc import Iterator
from typing import Any

from webdataset.gopen import gopen_schemes  # pyright: ignore[reportUnknownVariableType]

from millrace.errors import ConfigurationError
from millrace.storage.open import Backend, Store
from millrace.storage.read import stream

_stores: dict[str, Store] = {}


def register_store(store: Store) -> None:
    """Have webdataset open this store's URLs with this store's credentials."""
    _stores[store.url] = store
    if store.location.backend is not Backend.FILE:  # files it opens itself
        gopen_schemes[store.location.backend.value] = _open_url


class _BlockReader(io.RawIOBase):
    """A stream of blocks as a file that is read once, from its beginning."""

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
            close()  # the generator's own clean-up: it cancels what is being fetched
        super().close()


def _open_url(url: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> io.BufferedReader:
    if mode != "rb":
        raise ConfigurationError("Shards are opened for reading only: they never change.")
    matching = [base for base in _stores if url.startswith(f"{base}/")]
    if not matching:
        raise ConfigurationError(f"No store was registered for {url}: call register(store) first.")
    base = max(matching, key=len)
    blocks = stream(_stores[base], url.removeprefix(f"{base}/"))
    return io.BufferedReader(_BlockReader(blocks), max(bufsize, 1 << 20))
