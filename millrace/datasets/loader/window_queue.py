"""Load the shuffle windows of several streams ahead, by threads."""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import accumulate, chain

from millrace.datasets.loader.epoch_order import EpochOrder
from millrace.datasets.loader.fetch import ShardFetcher
from millrace.datasets.loader.readers import DecodeRows, SampleReader, open_reader
from millrace.datasets.loader.readers.base import FetchedRows, LoadedSample
from millrace.datasets.loader.shard_parts import PartGrowth
from millrace.datasets.loader.shard_table import ShardTable
from millrace.threads import DaemonThreadPool


class ShuffleWindowQueue:
    """Shuffle windows of one stream, loaded in order by one thread at a time.

    Args:
        load: Function that loads a window.
        windows: Numbers of the windows.
        depth: Number of windows that are loaded before they are taken.
        pool: Threads.
    """

    def __init__(
        self,
        load: Callable[[int], list[DecodeRows]],
        windows: range,
        *,
        depth: int,
        pool: DaemonThreadPool,
    ) -> None:
        self._load, self._pool = load, pool
        self._windows = iter(windows)
        self._lock = threading.Lock()
        self._requested: deque[Future[list[DecodeRows]]] = deque()
        self._waiting: deque[tuple[int, Future[list[DecodeRows]]]] = deque()
        self._is_running = False
        for _ in range(depth):
            self._request()

    def take(self) -> list[DecodeRows]:
        """Return the next window, as soon as it is loaded.

        Raises:
            MillraceError: A shard of the window cannot be read.
        """
        self._request()
        return self._requested.popleft().result()

    def _request(self) -> None:
        window = next(self._windows, None)
        if window is None:
            return
        future: Future[list[DecodeRows]] = Future()
        with self._lock:
            self._requested.append(future)
            self._waiting.append((window, future))
            begin = not self._is_running
            self._is_running = True
        if begin:
            self._pool.submit(self._run)

    def _run(self) -> None:
        """Load windows until none waits, or until the pool is shut down."""
        while True:
            with self._lock:
                while self._waiting and self._pool.is_shut_down:
                    self._waiting.popleft()[1].cancel()
                self._is_running = bool(self._waiting)
                if not self._waiting:
                    return
                window, future = self._waiting.popleft()
            try:
                future.set_result(self._load(window))
            except BaseException as error:  # noqa: BLE001 - `take` raises it
                future.set_exception(error)


class StreamShuffleWindows:
    """Rows of one stream of an epoch, shuffled window by window.

    Args:
        table: Shards of the dataset.
        order: Order of the epoch.
        fetcher: Fetcher of the bytes.
        stream: Number of the stream.
    """

    def __init__(
        self,
        table: ShardTable,
        order: EpochOrder,
        fetcher: ShardFetcher,
        *,
        stream: int,
    ) -> None:
        self._table, self._order, self._fetcher = table, order, fetcher
        self._stream = stream
        self._growth = PartGrowth()
        self._shard: int | None = None
        self._reader: SampleReader | None = None

    def iterate_rows(
        self, start: int, *, depth: int, pool: DaemonThreadPool
    ) -> Iterator[LoadedSample]:
        """Return an iterator over the rows of the stream. The first windows are loaded at once.

        Args:
            start: Index of the first row in the stream.
            depth: Number of windows that are loaded before they are used.
            pool: Threads.
        """
        first, skipped = self._order.find_window(start)
        windows = range(first, self._order.count_windows(self._stream))
        queue = ShuffleWindowQueue(self._load, windows, depth=depth, pool=pool)
        return chain.from_iterable(self._decode_windows(windows, skipped, queue))

    def _decode_windows(
        self, windows: range, skipped: int, queue: ShuffleWindowQueue
    ) -> Iterator[Iterator[LoadedSample]]:
        """Yield an iterator over the rows of each window."""
        for window in windows:
            runs = [decode() for decode in queue.take()]
            order = self._order.permute_window(self._stream, window)[skipped:]
            if len(runs) == 1:
                yield map(runs[0].__getitem__, order)
            else:
                starts = list(accumulate(map(len, runs), initial=0))
                yield map(partial(_get_row, runs, starts), order)
            del runs  # before the next window is taken
            skipped = 0

    def _load(self, window: int) -> list[DecodeRows]:
        decoders = [
            self._open(samples.shard).load(samples.start, samples.end)
            for samples in self._order.list_ranges(self._stream, window)
        ]
        following = self._order.find_next_shard(self._stream, window)
        if following is not None:
            self._fetcher.request(following)
        return decoders

    def _open(self, shard: int) -> SampleReader:
        if self._reader is None or self._shard != shard:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            opened = self._fetcher.open(shard, self._growth)
            self._reader = open_reader(self._table, self._table.shards[shard], opened)
            self._shard = shard
        return self._reader


def _get_row(runs: list[FetchedRows], starts: list[int], index: int) -> LoadedSample:
    """Return a row of consecutive runs of rows."""
    run = bisect_right(starts, index) - 1
    return runs[run][index - starts[run]]
