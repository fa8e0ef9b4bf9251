"""Load the samples of a dataset that Millrace sharded, in a shuffled order that resumes exactly."""

import logging
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from millrace import errors
from millrace.dataset_ledger import read_manifest
from millrace.datasets.formats import FormatName
from millrace.datasets.formats.tokens import find_tokens
from millrace.datasets.loader.dataset_files import ProcessFiles
from millrace.datasets.loader.disk_cache import DiskCache
from millrace.datasets.loader.epoch_order import EpochOrder
from millrace.datasets.loader.epoch_progress import EpochProgress
from millrace.datasets.loader.fetch import ShardFetcher
from millrace.datasets.loader.loader_state import (
    LoaderShare,
    LoaderState,
    OrderSettings,
    ReaderProcess,
    combine_states,
    find_states,
)
from millrace.datasets.loader.mirrored_files import FileLocations, list_specs
from millrace.datasets.loader.readers.base import LoadedSample
from millrace.datasets.loader.sample_iterator import IterationFailure, SampleIterator
from millrace.datasets.loader.sample_stream import (
    StreamPosition,
    StreamSteps,
    Transform,
    iterate_transformed,
    repeat_last,
)
from millrace.datasets.loader.shard_table import ShardTable, make_shard_table
from millrace.datasets.loader.stream_counts import Remainder, compute_ends, deal_streams
from millrace.datasets.loader.window_queue import StreamShuffleWindows
from millrace.digest import BLOCK_SIZE
from millrace.keys.datasets import DatasetKeys
from millrace.settings import validate_settings
from millrace.storage import StoreSpec
from millrace.storage.mirror_locations import MirrorReport
from millrace.threads import DaemonThreadPool

if TYPE_CHECKING:
    from millrace.datasets.loader.torch_dataset import TorchShards

logger = logging.getLogger(__name__)

_MOST_STREAMS = 64  # by default
_LEAST_STREAMS = (
    16  # of large samples: as many ranks can resume, and the order is the same on fewer
)
_MAX_THREADS = 16
_MAX_DEPTH = 8  # windows of a stream that are loaded ahead
_PARTS_IN_FLIGHT = 16  # of all streams of a process
_MAX_PART = 8 * BLOCK_SIZE

_Settings = TypeVar("_Settings", bound=OrderSettings)


class ShardLoader:
    """Samples of a dataset for a training loop, verified, shuffled and exactly resumable.

    An iteration goes on where the last one stopped, and ends with the epoch. The next iteration is
    the next epoch. A sample counts as received when the loop gets it.

    Each sample is a dict of the fields, with the types of the manifest, and of ``__key__``. See
    `millrace.datasets.loader.readers` for the values, and `millrace.datasets.loader.epoch_order`
    for the order.

    Args:
        source: URL of the dataset, or URL and credentials, or several of them that have the same
            dataset. With `dataset`, those of the stores, or a bucket with mirrors.
        dataset: Name of the dataset; by default the last part of the URL.
        split: Split of the samples.
        format: Format of the shards; by default the first one of the dataset. The order is the same
            for each format.
        decode: Whether fields have the types of the manifest; in tar shards without types, those of
            their extensions. Otherwise they are bytes, for tar shards only.
        seed: Seed of the order.
        rank: Number of this rank; by default 0.
        world_size: Number of ranks, which divides `streams`; by default 1. They are not taken from
            the environment, where a warning says that they are missing.
        batch_size: Samples of a batch, which is a list; None gives single samples.
        shuffle: Whether the samples are shuffled.
        streams: Number of streams that are mixed. By default 64, and 1 without shuffling. A smaller
            power of two if the split has fewer than four shards for each stream. For large samples,
            of which `buffer_bytes` has no room for one of each stream, at least 16.
        buffer_bytes: Bytes of the samples that are shuffled among themselves, in all streams
            together; at the beginning of an epoch a sixteenth, and then more and more. They count
            as in the dataset's largest format. One process that reads all streams takes up to five
            times this memory, or four samples and 2 MiB for each stream if that is more, and 32 MiB
            for requests, or 128 MiB with a `cache`. A stream of parquet also takes up to five times
            a row group, which has up to 1,000 samples.
        shuffle_window: Samples of a stream that are shuffled among themselves, instead of
            `buffer_bytes`.
        remainder: Treatment of the last samples, where ranks would have different numbers. ``drop``
            leaves out fewer than `world_size` samples, ``pad`` repeats as many, ``keep`` lets ranks
            end at different times. With `transform` or `pack` always ``keep``. Where workers were
            at different places when a run stopped, and the number of ranks or workers changed, it
            can be up to about a batch for each rank, after a warning.
        transform: Function that makes none, one or several samples of a sample.
        pack: Number of tokens of a sequence. The tokens of the samples of a stream follow each
            other, and fewer than `pack` tokens of each stream are left out at its end.
        pack_field: Field with the tokens; by default that of the format ``tokens``.
        cache: Cache of whole shards on the disk of the node, or its folder, which then grows as
            long as the disk has room. Without one, and without readable digests of blocks, whole
            shards are copied into the folder of temporary files, after a warning.
        warmed: Folder, or several, with files of the dataset below their keys, as a prewarm leaves
            them. They need a cache, which remembers that the files were verified.

    Raises:
        NotFoundError: The dataset has no manifest.
        ConfigurationError: The dataset has no such split or format, or an argument is invalid.

    Example:
        loader = ShardLoader("s3://bucket/my-dataset", seed=7, rank=rank, world_size=8)
        for sample in loader:
            train(sample["txt"])
    """

    def __init__(
        self,
        source: FileLocations,
        dataset: str | None = None,
        *,
        split: str = "train",
        format: str | None = None,  # noqa: A002 - the name of settings and manifests
        decode: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        streams: int | None = None,
        buffer_bytes: int = 32 << 20,
        shuffle_window: int | None = None,
        remainder: Remainder | str | None = None,
        transform: Transform | None = None,
        pack: int | None = None,
        pack_field: str | None = None,
        cache: DiskCache | Path | str | None = None,
        warmed: Sequence[Path | str] | Path | str = (),
    ) -> None:
        specs, name = _find_dataset(source, dataset)
        self._files = ProcessFiles(specs, cache, warmed)
        keys = DatasetKeys(name)
        manifest = self._files.open().ask_stores(lambda store: read_manifest(store, keys))
        self.table = make_shard_table(manifest, split, _parse_format(format), decode=decode)
        if rank is None and world_size is None:
            _warn_of_ranks(os.environ.get("WORLD_SIZE", ""))
        rank, world_size = rank or 0, 1 if world_size is None else world_size
        _check_ranks(rank, world_size)
        _check_numbers(
            buffer_bytes, batch_size=batch_size, pack=pack, shuffle_window=shuffle_window
        )
        if streams is None:
            room = buffer_bytes if shuffle_window is None else inf
            streams = _choose_streams(self.table, room, world_size, shuffle=shuffle)
        if not _can_deal(streams, world_size):
            multiple = -(-max(1, streams) // world_size) * world_size
            raise errors.ConfigurationError(
                f"Each rank reads whole streams, and {streams} streams cannot be dealt equally to "
                f"{world_size} ranks. Give `streams` a multiple, such as {multiple}, on every rank."
            )
        field = pack_field or (find_tokens(self.table.fields) if pack and not transform else None)
        self._steps = StreamSteps(transform, pack, field or "tokens")
        if shuffle_window is None:
            shuffle_window = _choose_shuffle_window(self.table, buffer_bytes / streams)
        self._settings = _validate(
            OrderSettings,
            manifest=self.table.manifest_digest,
            split=split,
            seed=seed,
            streams=streams,
            shuffle_window=shuffle_window,
            shuffle=shuffle,
            transform=transform is not None,
            pack=pack,
            pack_field=self._steps.field if pack else None,
        )
        self._remainder = _choose_remainder(remainder, self._steps)
        self._batch_size = batch_size
        self._process = ReaderProcess(rank, 0, world_size, 1)
        self._iteration = 0
        self._stays_at_end = False
        self._progress = self._begin(self._make_first_state(epoch=0))
        if self.samples < world_size:
            raise errors.ConfigurationError(
                f"The split {split!r} has {self.samples} samples, fewer than the {world_size} "
                "ranks. Use fewer ranks."
            )
        if self._remainder is Remainder.PAD and self.samples < streams:
            raise errors.ConfigurationError(
                f"The split {split!r} has {self.samples} samples, fewer than the {streams} "
                "streams, and a stream without samples has none to repeat. Use fewer streams, or "
                "another `remainder`."
            )

    @property
    def epoch(self) -> int:
        """Number of the current epoch. After its end, that of the next one."""
        return self._progress.epoch

    @property
    def samples(self) -> int:
        """Number of samples of an epoch, of all ranks, before `transform` and `pack`."""
        return self._progress.order.total

    @property
    def is_at_end(self) -> bool:
        """True if the next iteration is the rest of an epoch that has no more samples."""
        return self._stays_at_end

    def make_mirror_report(self) -> MirrorReport:
        """Return the work of each location in this process, for mirrors and for the cache."""
        return self._files.open().make_report()

    @property
    def rank_samples(self) -> int:
        """Number of samples of an epoch of each rank, before `transform` and `pack`.

        Where `remainder` is ``keep``, it is that of this rank.
        """
        lengths = self._progress.order.lengths
        none = np.zeros_like(lengths)
        dealt = deal_streams(none, self._process.world_size)
        ends = compute_ends(none, lengths, dealt, self._remainder)
        return int(ends[dealt[self._process.rank][0]].sum())

    def __len__(self) -> int:
        """Return the number of samples of an epoch of this rank, or of batches with `batch_size`.

        After a resume, it is still that of the whole epoch. Worker processes have up to one more
        batch each, since each ends with a shorter batch.

        Raises:
            TypeError: `transform` or `pack` decide the number while the samples are read.
        """
        if self._steps:
            raise TypeError(
                "With `transform` or `pack`, nobody knows the number of samples before the end of "
                "the epoch. Count steps instead, or use `rank_samples`, the number before them."
            )
        size = self._batch_size or 1
        return (self.rank_samples + size - 1) // size

    def __bool__(self) -> bool:
        """Return True, also where `len` is not known."""
        return True

    def seek(self, epoch: int, received: int) -> None:
        """Go to the place in an epoch at which this rank has received a number of samples.

        Args:
            epoch: Number of the epoch.
            received: Number of samples of this rank.

        Raises:
            ConfigurationError: The rank has fewer samples. Or samples are transformed or packed,
                whose number is not known before they are read, or there are worker processes.
        """
        if self._steps or self._process.workers > 1 or not 0 <= received <= self.rank_samples:
            raise errors.ConfigurationError(
                f"The loader cannot go to {received} of the {self.rank_samples} samples of its "
                "rank. That needs a number in this range, a loader without `transform` and `pack`, "
                "and no worker processes. Otherwise load a state."
            )
        share = LoaderShare(
            **self._process._asdict(), remainder=self._remainder, received=received,
            is_ended=False, streams=None,
        )  # fmt: skip
        self._go_to(self._make_first_state(epoch).model_copy(update={"share": share}))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch.

        Raises:
            CorruptError: A shard does not have its digest.
            ChangedError: A shard was replaced by one of another size.
            NotFoundError: A shard was deleted.
            ConfigurationError: The process was forked after the loader was opened, a later
                iteration has begun, or this one has failed before. Or a field without a type cannot
                be decoded.
        """
        self._files.open()
        self._iteration += 1
        if self._stays_at_end:
            self._stays_at_end = False
            self._progress.pass_end()
            return iter(())
        if self._progress.is_ended:
            self._progress = self._begin(self._make_first_state(self.epoch))
        self._progress.is_resumed_at_end = False
        if self._batch_size is None:
            samples = self._iterate(self._iteration)
        else:
            samples = self._iterate_batches(self._iteration, self._batch_size)
        return SampleIterator(samples, IterationFailure(self._progress))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. The current epoch stays where it is.

        The current epoch of a state that was saved at the end of an epoch is this epoch. Then the
        next iteration is its rest, without a sample.

        Raises:
            ConfigurationError: The number of the epoch is negative, or no integer.
        """
        state = self._make_first_state(epoch)
        if epoch == self._progress.last_ended:
            self.stay_at_end(epoch)
            return
        self._stays_at_end = self._progress.is_resumed_at_end = False
        if epoch != self.epoch or self._progress.is_ended:
            self._go_to(state)

    def begin_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, also of the current one."""
        self._go_to(self._make_first_state(epoch))

    def stay_at_end(self, epoch: int | None = None) -> None:
        """Let the next iteration have no sample, if the loaded state is of the end of an epoch.

        Args:
            epoch: Number of the epoch; None for any.
        """
        ended = self._progress.last_ended
        self._stays_at_end = ended is not None and epoch in {None, ended}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the sample that was received last, as plain JSON.

        Ranks that have received equally many samples have equal states. Where `remainder` is
        ``keep``, the states of all ranks are needed to resume with another number of ranks, or with
        another `remainder`.
        """
        return self._progress.make_state().model_dump(mode="json")

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go to the position of a state, with any number of ranks and workers.

        Args:
            state: State of this loader or of torchdata's ``StatefulDataLoader``, or those of all
                ranks. `streams` and `shuffle_window` are taken from the state.

        Raises:
            ConfigurationError: The state is of another dataset, split, seed or order, or states of
                other ranks are missing. The loader stays where it is.
        """
        states = list(find_states(state))
        for one in states:
            self._check_state(one)
        if len(states) == 1 and self._can_resume_alone(states[0].share):
            (found,) = states
        else:
            order = self._make_order(states[0]) if states else self._progress.order
            found = combine_states(states, order.lengths)
        self._go_to(found)
        changed = {"streams": found.streams, "shuffle_window": found.shuffle_window}
        self._settings = self._settings.model_copy(update=changed)
        self._warn_of_unequal_ranks()

    def read_as_worker(self, worker: int, workers: int) -> None:
        """Take the share of one of several worker processes of this rank.

        Args:
            worker: Number of the worker.
            workers: Number of workers.

        Raises:
            ConfigurationError: The rank has received samples in another process, and the other
                ranks may be at other places: with `transform`, `pack` or ``keep``.
        """
        process = self._process._replace(worker=worker, workers=workers)
        if process != self._process:
            state = self._progress.make_undealt_state()
            self._process = process
            self._progress = self._begin(state)

    def as_torch_dataset(self) -> "TorchShards":
        """Return this loader as an ``IterableDataset`` of PyTorch, for a ``DataLoader``.

        With `num_workers`, the store must be a folder, or `multiprocessing_context` "spawn". The
        state is that of a ``StatefulDataLoader`` of torchdata, with any number of workers.

        Give `batch_size` to this loader, and ``batch_size=None`` to the ``DataLoader``. Only then
        is a state exact after an error within a batch: a ``DataLoader`` that makes the batches
        drops the samples which it has taken.
        """
        from millrace.datasets.loader.torch_dataset import (  # noqa: PLC0415 - imports torch
            TorchShards,
        )

        return TorchShards(self)

    def _make_first_state(self, epoch: int) -> LoaderState:
        """Return the state of the beginning of an epoch."""
        return _validate(LoaderState, **self._settings.model_dump(), epoch=epoch)

    def _make_order(self, state: LoaderState) -> EpochOrder:
        return EpochOrder(
            [shard.samples for shard in self.table.shards],
            seed=state.seed,
            epoch=state.epoch,
            streams=state.streams,
            shuffle_window=state.shuffle_window,
            shuffle=state.shuffle,
        )

    def _begin(self, state: LoaderState) -> EpochProgress:
        """Return the progress of a state, for which the streams are dealt anew."""
        return EpochProgress(state, self._make_order(state), self._process, self._remainder)

    def _go_to(self, state: LoaderState) -> None:
        """Go to a state, and end the current iteration."""
        self._progress, self._stays_at_end = self._begin(state), False
        self._iteration += 1

    def _check_state(self, state: LoaderState) -> None:
        if state.manifest != self.table.manifest_digest:
            raise errors.ConfigurationError(
                f"The state is of another dataset, or of another version of it: the manifest had "
                f"the digest {state.manifest}, and that of {self.table.dataset} has "
                f"{self.table.manifest_digest}. Open the dataset of the state, or begin a new "
                "epoch."
            )
        for name in ("split", "seed", "shuffle", "transform", "pack", "pack_field"):
            theirs, own = getattr(state, name), getattr(self._settings, name)
            if theirs != own and (name, theirs) != ("pack_field", None):
                raise errors.ConfigurationError(
                    f"The state is of a loader with {name}={theirs!r}, and this one has "
                    f"{name}={own!r}. Open the loader as it was when the state was saved."
                )
        world_size = self._process.world_size
        if not _can_deal(state.streams, world_size):
            raise errors.ConfigurationError(
                f"The order of the state has {state.streams} streams, which cannot be dealt "
                f"equally to {world_size} ranks. Resume with a number of ranks that divides "
                f"{state.streams}, or begin a new epoch."
            )

    def _warn_of_unequal_ranks(self) -> None:
        """Warn, in one process, if ranks leave out or repeat more samples than in a whole epoch."""
        rank, worker, world_size, _ = self._process
        unequal = self._progress.unequal_samples
        if unequal >= world_size and rank == worker == 0:
            logger.warning(
                "In epoch %d, the ranks together %s about %d samples, since the processes that "
                "saved the state were at different places. Resume with the same numbers of ranks "
                "and workers, or with `remainder='keep'`, with which ranks end at different times.",
                self.epoch,
                "repeat" if self._remainder is Remainder.PAD else "leave out",
                unequal,
            )

    def _can_resume_alone(self, share: LoaderShare | None) -> bool:
        """Decide whether this process needs no states of others beside the one with a share.

        Under another `remainder` it needs them: where ranks were at different places, one of them
        would save its own place as that of all.
        """
        own = (self._process, self._remainder)
        return share is None or (share.process, share.remainder) == own

    def _iterate(self, iteration: int) -> Generator[LoadedSample]:
        progress = self._progress
        with self._open_samples(progress) as samples:
            while True:
                if iteration != self._iteration:
                    self._raise_later_iteration()
                sample = next(samples, None)
                if sample is None:
                    break
                progress.received += 1
                yield sample
            progress.is_ended = True

    def _iterate_batches(self, iteration: int, size: int) -> Generator[list[LoadedSample]]:
        progress, is_ended = self._progress, False
        with self._open_samples(progress) as samples:
            while not is_ended:
                if iteration != self._iteration:
                    self._raise_later_iteration()
                with progress.restore_on_error():
                    batch = list(islice(samples, size))
                progress.received += len(batch)
                progress.is_ended = is_ended = len(batch) < size
                if batch:
                    yield batch

    def _raise_later_iteration(self) -> NoReturn:
        raise errors.ConfigurationError(
            "A later iteration of the loader has begun, or its state was loaded. End this one "
            "first."
        )

    @contextmanager
    def _open_samples(self, progress: EpochProgress) -> Generator[Iterator[LoadedSample]]:
        """Open the streams of the process at their positions, and merge their samples."""
        settings, positions = self._settings, progress.locate_streams()
        stream_count = max(1, len(positions))
        part = round(settings.shuffle_window * self.table.mean_size / 2 / BLOCK_SIZE) * BLOCK_SIZE
        fetcher = ShardFetcher(
            self._files.open(),
            self.table,
            part_bytes=min(_MAX_PART, max(BLOCK_SIZE, part)),
            parts_ahead=min(_MAX_DEPTH, _PARTS_IN_FLIGHT // stream_count),
        )
        pool = DaemonThreadPool(min(_MAX_THREADS, stream_count), "shard-windows")
        depth = min(_MAX_DEPTH, max(1, settings.streams // stream_count // 2))
        merge = progress.take_turns if self._steps else progress.merge_rows
        try:
            samples = {
                stream: self._open_stream(progress, stream, position, fetcher, pool, depth)
                for stream, position in positions.items()
            }
            yield merge(samples, positions)
        finally:
            pool.shutdown()
            fetcher.close()

    def _open_stream(
        self,
        progress: EpochProgress,
        stream: int,
        position: StreamPosition,
        fetcher: ShardFetcher,
        pool: DaemonThreadPool,
        depth: int,
    ) -> Iterator[LoadedSample]:
        length, end = int(progress.order.lengths[stream]), progress.get_end(stream)
        windows = StreamShuffleWindows(self.table, progress.order, fetcher, stream=stream)
        start = position.row if self._steps else min(position.row, length - 1)
        rows = windows.iterate_rows(start, depth=depth, pool=pool)
        if self._steps:
            return iterate_transformed(rows, position, self._steps)
        if end > length:
            copies = end - max(position.outputs, length)
            return repeat_last(rows, copies, skip_first=position.row == length)
        return rows


def _find_dataset(source: FileLocations, dataset: str | None) -> tuple[list[StoreSpec], str]:
    """Return the stores and the name of a dataset."""
    specs = list_specs(source)
    if dataset is not None:
        return specs, dataset
    stores, names = list[StoreSpec](), set[str]()
    for spec in specs:
        url, _, name = spec.url.rstrip("/").rpartition("/")
        if not name or url.endswith("/"):
            raise errors.ConfigurationError(
                f"{spec.url} names a store and no dataset. Write its name behind the URL, such as "
                f"{spec.url.rstrip('/')}/my-dataset, or give it as `dataset`."
            )
        stores.append(spec.model_copy(update={"url": url}))
        names.add(name)
    if len(names) > 1:
        raise errors.ConfigurationError(
            f"The locations have datasets of different names: {', '.join(sorted(names))}. Write "
            "URLs of one dataset, or give its name as `dataset` and the URLs of the stores."
        )
    return stores, names.pop()


def _parse_format(name: str | None) -> FormatName | None:
    if name is None:
        return None
    try:
        return FormatName(name)
    except ValueError:
        raise errors.ConfigurationError(
            f"There is no format {name!r}. The formats are {', '.join(FormatName)}."
        ) from None


def _choose_streams(
    table: ShardTable, buffer_bytes: float, world_size: int, *, shuffle: bool
) -> int:
    """Return the default number of streams.

    A stream holds at least a sample, so there are fewer streams of large samples, down to 16.
    """
    most = min(_MOST_STREAMS, max(1, len(table.shards) // 4)) if shuffle else 1
    streams = 1 << (most.bit_length() - 1)
    size = table.largest_mean_size
    while (
        streams > _LEAST_STREAMS
        and streams * size > buffer_bytes
        and _can_deal(streams // 2, world_size)
    ):
        streams //= 2
    return streams


def _can_deal(streams: int, world_size: int) -> bool:
    return streams >= 1 and streams % world_size == 0


def _choose_shuffle_window(table: ShardTable, buffer_bytes: float) -> int:
    # The mean of the largest format, so that all formats have one order.
    return max(1, int(buffer_bytes / max(1.0, table.largest_mean_size)))


def _choose_remainder(remainder: Remainder | str | None, steps: StreamSteps) -> Remainder:
    if remainder is None:
        return Remainder.KEEP if steps else Remainder.DROP
    try:
        chosen = Remainder(remainder)
    except ValueError:
        raise errors.ConfigurationError(
            f"There is no remainder {remainder!r}. It is one of {', '.join(Remainder)}."
        ) from None
    if steps and chosen is not Remainder.KEEP:
        raise errors.ConfigurationError(
            f"With `transform` or `pack`, nobody knows the number of samples of a rank before the "
            f"end, so `remainder` cannot be {chosen.value!r}. Remove it, and end an epoch on all "
            "ranks when the first one ends."
        )
    return chosen


@cache
def _warn_of_ranks(processes: str) -> None:
    """Warn once if a launcher such as torchrun has started several processes."""
    if processes.isdecimal() and int(processes) > 1:
        logger.warning(
            "The variable WORLD_SIZE is %s, and the loader was opened without `rank` and "
            "`world_size`, so each process reads all samples. Give both, or `world_size=1` if that "
            "is right.",
            processes,
        )


def _check_ranks(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise errors.ConfigurationError(
            f"`rank` is {rank}, and the ranks of a `world_size` of {world_size} are 0 to "
            f"{world_size - 1}. Correct them."
        )


def _check_numbers(buffer_bytes: int, **numbers: int | None) -> None:
    if buffer_bytes < 0:
        raise errors.ConfigurationError("`buffer_bytes` is at least 0. Correct it.")
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise errors.ConfigurationError(f"`{name}` is at least 1, or None. Correct it.")


def _validate(model: type[_Settings], **values: Any) -> _Settings:
    return validate_settings(model, values, source="The arguments of the loader")
