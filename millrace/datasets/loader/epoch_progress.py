"""Progress of one process in an epoch: how far its streams are, and the state that it saves."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, cycle, islice, pairwise

import numpy as np

from millrace.datasets.loader.epoch_order import EpochOrder
from millrace.datasets.loader.loader_state import (
    LoaderShare,
    LoaderState,
    ReaderProcess,
    combine_states,
    read_counts,
    read_positions,
)
from millrace.datasets.loader.readers.base import LoadedSample
from millrace.datasets.loader.sample_stream import StreamPosition
from millrace.datasets.loader.stream_counts import (
    Remainder,
    advance_counts,
    compute_ends,
    deal_streams,
    encode_counts,
)
from millrace.errors import ConfigurationError


class EpochProgress:
    """Progress of one process in an epoch.

    Args:
        state: State with which the process begins. The streams are dealt by it, to all processes.
        order: Order of the epoch.
        process: The process.
        remainder: Rule for the end of the epoch.

    Attributes:
        order: Order of the epoch.
        received: Number of samples that the process has received since the streams were dealt. The
            loader counts them.
        is_ended: Whether the process has reached the end of the epoch. The loader sets it.
        is_resumed_at_end: Whether the state was saved at the end of an epoch, and nothing was read
            since then. The loader changes it.

    Raises:
        ConfigurationError: The state does not fit the order or the process.
    """

    def __init__(
        self, state: LoaderState, order: EpochOrder, process: ReaderProcess, remainder: Remainder
    ) -> None:
        self.order = order
        self.received, self.is_ended = 0, False
        self.is_resumed_at_end, self._is_before_end = state.is_after_end, False
        self._start = state.model_copy(update={"share": None, "is_after_end": False})
        self._process, self._remainder = process, remainder
        counts = read_counts(state, order.lengths)
        dealt = deal_streams(counts, process.world_size, process.workers)
        self._ends = compute_ends(counts, order.lengths, dealt, remainder)
        positions = read_positions(state, order.lengths)
        own = dealt[process.rank][process.worker]
        self._positions = {stream: positions[stream] for stream in own}
        if state.share is not None and state.share.process == process:
            self._resume(state.share)

    @property
    def epoch(self) -> int:
        """Number of the epoch. After its end, that of the next one."""
        return self._start.epoch + self.is_ended

    @property
    def last_ended(self) -> int | None:
        """Number of the epoch at whose end the state was saved; None if it was not at an end."""
        return self._start.epoch - (not self._is_before_end) if self.is_resumed_at_end else None

    @property
    def unequal_samples(self) -> int:
        """Number of samples that all ranks together leave out or repeat to end together."""
        return int(abs(self._ends - self.order.lengths).sum())

    def locate_streams(self) -> dict[int, StreamPosition]:
        """Return the positions of the process's streams that may have further samples.

        The iterators of streams whose samples are transformed move these positions. Otherwise they
        follow from the number of samples that were received.
        """
        positions = self._locate_all()
        if self._start.makes_samples:
            return positions
        return {
            stream: position
            for stream, position in positions.items()
            if position.outputs < self.get_end(stream)
        }

    def get_end(self, stream: int) -> int:
        """Return the number of samples with which a stream ends, if none are transformed."""
        return int(self._ends[stream])

    def pass_end(self) -> None:
        """Note that the trainer has seen the end of the epoch that the state is at the end of."""
        self.is_ended |= self._is_before_end

    def make_state(self) -> LoaderState:
        """Return the state of the process, which is that of all of them where this is known."""
        process, lengths = self._process, self.order.lengths
        is_alone = process.world_size == process.workers == 1
        is_share = not is_alone and (process.workers > 1 or self._remainder is Remainder.KEEP)
        if self.is_ended and not is_share:
            return self._start.end_epoch()
        start = self._start.model_copy(update={"is_after_end": self.is_resumed_at_end})
        if not is_alone:
            state = start.model_copy(update={"share": self._make_share()})
            return state if is_share else combine_states([state], lengths)
        found = self._locate_all()
        positions = [found[stream] for stream in range(len(lengths))]
        if self._start.makes_samples:
            return start.replace_positions([one.list_numbers() for one in positions])
        position, ahead = encode_counts(np.array([one.row for one in positions]), lengths)
        return start.model_copy(update={"position": position, "ahead": ahead})

    def make_undealt_state(self) -> LoaderState:
        """Return a state whose streams can be dealt to other processes of the same rank.

        Raises:
            ConfigurationError: The process has received samples, and others do not know how many.
        """
        state = self.make_state() if self.received else self._start
        if state.share is not None:
            raise ConfigurationError(
                "This rank has received samples in another process, and the other ranks may be at "
                "other places, so its streams cannot be dealt to workers. Load the states of all "
                "ranks, as a list."
            )
        return state

    def merge_rows(
        self,
        rows: Mapping[int, Iterator[LoadedSample]],
        positions: Mapping[int, StreamPosition],
    ) -> Iterator[LoadedSample]:
        """Return the rows of streams by their index in the stream, then by stream, to the end.

        No Python code runs between two rows but that of their reader.

        Args:
            rows: Rows of each open stream.
            positions: Positions of these streams.
        """
        spans = [
            (found, positions[stream].outputs, self.get_end(stream))
            for stream, found in rows.items()
        ]
        levels = sorted({level for _, start, end in spans for level in (start, end)})

        def merge_levels() -> Iterator[Iterator[LoadedSample]]:
            for level, following in pairwise(levels):
                active = [found for found, start, end in spans if start <= level < end]
                yield islice(map(next, cycle(active)), (following - level) * len(active))

        return chain.from_iterable(merge_levels())

    def take_turns(
        self,
        samples: Mapping[int, Iterator[LoadedSample]],
        positions: Mapping[int, StreamPosition],
    ) -> Iterator[LoadedSample]:
        """Yield the transformed samples of streams in the same order, to the end.

        Args:
            samples: Samples of each stream. The iterator moves the position of its stream.
            positions: Positions of the streams.
        """
        turns = [(positions[stream], found) for stream, found in samples.items()]
        level = min((position.outputs for position, _ in turns), default=0)
        while turns:
            ended: list[StreamPosition] = []
            for position, found in turns:
                if position.outputs == level:
                    sample = next(found, None)
                    if sample is None:
                        ended.append(position)
                    else:
                        yield sample
            if ended:
                turns = [turn for turn in turns if not any(turn[0] is one for one in ended)]
            level += 1

    @contextmanager
    def restore_on_error(self) -> Generator[None]:
        """Move the streams back if not all samples of a batch can be made.

        The loop has not received those that were made.
        """
        if not self._start.makes_samples:  # positions follow from what was received
            yield
            return
        before = {stream: replace(one) for stream, one in self._positions.items()}
        try:
            yield
        except BaseException:
            self._positions = before
            raise

    def _locate_all(self) -> dict[int, StreamPosition]:
        """Return the positions of all streams of the process."""
        if self._start.makes_samples:
            return self._positions
        own = list(self._positions)
        counts = np.array([position.outputs for position in self._positions.values()], np.int64)
        reached = advance_counts(counts, self._ends[own], self.received)
        lengths = self.order.lengths[own]
        return {
            stream: StreamPosition(count, min(count, length))
            for stream, count, length in zip(own, reached.tolist(), lengths.tolist(), strict=True)
        }

    def _resume(self, share: LoaderShare) -> None:
        """Move the streams of the process to what it had received."""
        own = list(self._positions)
        self.received = share.received
        self._is_before_end = share.is_ended
        self.is_resumed_at_end |= share.is_ended
        # A worker that has ended gives no sample until the other workers of its rank have, too.
        self.is_ended = share.is_ended and share.workers == 1
        if share.streams is not None:
            if sorted(share.streams) != own:
                raise ConfigurationError("The state of the loader has other streams.")
            self._positions = {one: StreamPosition(*share.streams[one]) for one in own}

    def _make_share(self) -> LoaderShare:
        streams = None
        if self._start.makes_samples:
            streams = {
                stream: (one.outputs, one.row, one.part, one.token)
                for stream, one in self._positions.items()
            }
        return LoaderShare(
            **self._process._asdict(),
            remainder=self._remainder,
            received=self.received,
            is_ended=self.is_ended,
            streams=streams,
        )
