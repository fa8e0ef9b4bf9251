"""Progress of one process in an epoch: how far its streams are, and the state that it saves."""

from collections.abc import Iterator, Mapping

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
        positions: Position of each stream of the process.
        received: Number of samples that the process has received since the streams were dealt.
        is_ended: Whether the process has reached the end of the epoch.

    Raises:
        ConfigurationError: The state does not fit the order or the process.
    """

    def __init__(
        self, state: LoaderState, order: EpochOrder, process: ReaderProcess, remainder: Remainder
    ) -> None:
        self.order = order
        self.received, self.is_ended = 0, False
        self._start = state.model_copy(update={"share": None})
        self._process, self._remainder = process, remainder
        counts = read_counts(state, order.lengths)
        dealt = deal_streams(counts, process.world_size, process.workers)
        self._ends = compute_ends(counts, order.lengths, dealt, remainder)
        positions = read_positions(state, order.lengths)
        own = dealt[process.rank][process.worker]
        self.positions = {stream: positions[stream] for stream in own}
        if state.share is not None and state.share.process == process:
            self._resume(state.share)

    @property
    def epoch(self) -> int:
        """Number of the epoch. After its end, that of the next one."""
        return self._start.epoch + self.is_ended

    def list_open_streams(self) -> list[int]:
        """Return the streams of the process that may have further samples."""
        return [
            stream
            for stream, position in self.positions.items()
            if self._start.makes_samples or position.outputs < self.get_end(stream)
        ]

    def get_end(self, stream: int) -> int:
        """Return the number of samples with which a stream ends, if none are transformed."""
        return int(self._ends[stream])

    def start_epoch(self, epoch: int) -> LoaderState:
        """Return the state of the beginning of an epoch."""
        return self._start.start_epoch(epoch)

    def make_state(self) -> LoaderState:
        """Return the state of the process, which is that of all of them where this is known."""
        process, lengths = self._process, self.order.lengths
        is_alone = process.world_size == process.workers == 1
        is_share = not is_alone and (process.workers > 1 or self._remainder is Remainder.KEEP)
        if self.is_ended and not is_share:
            return self.start_epoch(self.epoch)
        if not is_alone:
            state = self._start.model_copy(update={"share": self._make_share()})
            return state if is_share else combine_states([state], lengths)
        positions = [self.positions[stream] for stream in range(len(lengths))]
        if self._start.makes_samples:
            return self._start.replace_positions([one.list_numbers() for one in positions])
        position, ahead = encode_counts(np.array([one.row for one in positions]), lengths)
        return self._start.model_copy(update={"position": position, "ahead": ahead})

    def make_undealt_state(self) -> LoaderState:
        """Return a state whose streams can be dealt to other processes of the same rank.

        Raises:
            ConfigurationError: The process has received samples, and others do not know how many.
        """
        state = self.make_state() if self.received else self._start
        if state.share is not None:
            raise ConfigurationError(
                "This rank has received transformed samples in another process, so its streams "
                "cannot be dealt to workers. Load the states of all ranks, as a list."
            )
        return state

    def take_turns(self, samples: Mapping[int, Iterator[LoadedSample]]) -> Iterator[LoadedSample]:
        """Yield the samples of streams by their index in the stream, then by stream, to the end.

        Args:
            samples: Samples of each open stream. The iterator moves the position of its stream.
        """
        turns = [(self.positions[stream], found) for stream, found in samples.items()]
        level = min((position.outputs for position, _ in turns), default=0)
        while turns:
            ended: list[StreamPosition] = []
            for position, found in turns:
                if position.outputs == level:
                    sample = next(found, None)
                    if sample is None:
                        ended.append(position)
                    else:
                        self.received += 1
                        yield sample
            if ended:
                turns = [turn for turn in turns if not any(turn[0] is one for one in ended)]
            level += 1
        self.is_ended = True

    def _resume(self, share: LoaderShare) -> None:
        """Move the streams of the process to what it had received."""
        own = list(self.positions)
        self.received = share.received
        # A worker that has ended gives no sample until the other workers of its rank have, too.
        self.is_ended = share.is_ended and share.workers == 1
        if share.streams is not None:
            if sorted(share.streams) != own:
                raise ConfigurationError("The state of the loader has other streams.")
            self.positions = {one: StreamPosition(*share.streams[one]) for one in own}
            return
        counts = np.array([self.positions[one].outputs for one in own])
        reached = advance_counts(counts, self._ends[own], share.received)
        lengths = self.order.lengths[own]
        for stream, count, length in zip(own, reached.tolist(), lengths.tolist(), strict=True):
            self.positions[stream] = StreamPosition(count, min(count, length))

    def _make_share(self) -> LoaderShare:
        streams = None
        if self._start.makes_samples:
            streams = {
                stream: (one.outputs, one.row, one.part, one.token)
                for stream, one in self.positions.items()
            }
        return LoaderShare(
            **self._process._asdict(),
            remainder=self._remainder,
            received=self.received,
            is_ended=self.is_ended,
            streams=streams,
        )
