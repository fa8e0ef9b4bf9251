"""State of a `ShardLoader`: a few integers and digests, as plain JSON.

A state describes one epoch of one order. It names a position, before which all samples were
received, and the streams that are further. A process that reads only a share of the streams, and
cannot know how far the others are, adds its share. The states of all shares make one state.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from millrace.datasets.loader.sample_stream import StreamPosition
from millrace.datasets.loader.stream_counts import (
    Counts,
    Remainder,
    advance_counts,
    compute_ends,
    deal_streams,
    decode_counts,
    encode_counts,
)
from millrace.errors import ConfigurationError

KIND = "millrace-shard-loader"

PositionNumbers = tuple[int, int, int, int]
"""Numbers of a `StreamPosition`."""


class ReaderProcess(NamedTuple):
    """One of the processes that read an epoch together.

    Attributes:
        rank: Number of its rank.
        worker: Number of the worker process of the rank.
        world_size: Number of ranks.
        workers: Number of worker processes of each rank.
    """

    rank: int
    worker: int
    world_size: int
    workers: int


class LoaderShare(BaseModel):
    """Share of one process in the samples that follow the position of a state.

    Attributes:
        rank: Number of the rank.
        world_size: Number of ranks.
        worker: Number of the worker process of the rank.
        workers: Number of worker processes of each rank.
        remainder: Rule for the end of the epoch.
        received: Number of samples that the process has received since the position.
        is_ended: Whether the process has reached the end of the epoch.
        streams: Position of each stream of the process, if samples are transformed or packed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    worker: int = Field(ge=0)
    workers: int = Field(ge=1)
    remainder: Remainder
    received: int = Field(ge=0)
    is_ended: bool
    streams: dict[int, PositionNumbers] | None = None

    @property
    def process(self) -> ReaderProcess:
        """The process."""
        return ReaderProcess(self.rank, self.worker, self.world_size, self.workers)


class OrderSettings(BaseModel):
    """Values that decide the samples of each epoch, and their order.

    Attributes:
        manifest: Digest of the manifest.
        split: Split of the samples.
        seed: Seed of the order.
        streams: Number of streams.
        shuffle_window: Samples of a stream that are shuffled among themselves. States of older
            versions have them as ``window``.
        shuffle: Whether the samples are shuffled.
        transform: Whether samples are transformed.
        pack: Number of tokens of a sequence; None without packing.
        pack_field: Field with the tokens; None without packing, and in states of older versions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: str
    split: str
    seed: int
    streams: int = Field(ge=1)
    shuffle_window: int = Field(ge=1, validation_alias=AliasChoices("shuffle_window", "window"))
    shuffle: bool
    transform: bool
    pack: int | None
    pack_field: str | None = None

    @property
    def makes_samples(self) -> bool:
        """True if samples are made of the rows, so that their number is not known before."""
        return self.transform or self.pack is not None


class LoaderState(OrderSettings):
    """State of a loader.

    Attributes:
        kind: Mark of such a state.
        version: Version of the form of the state.
        epoch: Number of the epoch.
        position: Position before which all samples of the epoch were received.
        ahead: Number of samples beyond it that were received, by the stream.
        positions: Position of each stream instead, if samples are transformed or packed.
        share: Share of one process, if the state is that of one process only.
        is_after_end: Whether the epoch before was read to its end, and nothing of this epoch.
    """

    kind: Literal["millrace-shard-loader"] = KIND
    version: Literal[1] = 1
    epoch: int = Field(ge=0)
    position: int = 0
    ahead: dict[int, int] = {}
    positions: list[PositionNumbers] | None = None
    share: LoaderShare | None = None
    is_after_end: bool = False

    def list_epochs(self) -> set[int]:
        """Return the epoch, and at an end of one also that before or after it."""
        epochs = {self.epoch}
        if self.is_after_end:
            epochs.add(self.epoch - 1)
        if self.share is not None and self.share.is_ended:
            epochs.add(self.epoch + 1)
        return epochs

    def end_epoch(self) -> "LoaderState":
        """Return the state of the end of the epoch, which is the beginning of the next one."""
        none: dict[str, Any] = {"position": 0, "ahead": {}, "positions": None, "share": None}
        return self.model_copy(update={**none, "epoch": self.epoch + 1, "is_after_end": True})

    def replace_positions(self, positions: list[list[int]]) -> "LoaderState":
        """Return the state with the position of each stream instead of one for all."""
        changed: dict[str, Any] = {"positions": positions, "position": 0, "ahead": {}}
        return LoaderState.model_validate({**self.model_dump(), **changed})


def find_states(saved: Any) -> Iterator[LoaderState]:
    """Yield the states of loaders within any state, such as that of a ``StatefulDataLoader``.

    Raises:
        ConfigurationError: A state has another form, or is older than the samples that were
            received.
    """
    if isinstance(saved, LoaderState):
        yield saved
    elif isinstance(saved, Mapping):
        values = cast("Mapping[str, Any]", saved)
        if values.get("kind") == KIND:
            yield _parse(values)
            return
        if values.get("_steps_since_snapshot"):
            raise ConfigurationError(
                "The StatefulDataLoader has given samples since its last snapshot, so its state "
                "does not fit them. Open it with `snapshot_every_n_steps=1`, or save at a multiple."
            )
        for value in values.values():
            yield from find_states(value)
    elif isinstance(saved, Sequence) and not isinstance(saved, str | bytes):
        for value in cast("Sequence[Any]", saved):
            yield from find_states(value)


def _parse(values: Mapping[str, Any]) -> LoaderState:
    try:
        return LoaderState.model_validate(dict(values))
    except ValidationError as error:
        wrong = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigurationError(
            f"The state of the loader cannot be read: {wrong} has a value that it cannot have. "
            "Another version of Millrace wrote it, or it is damaged."
        ) from None


def read_counts(state: LoaderState, lengths: Counts) -> Counts:
    """Return the samples that were received of each stream, without those of the share.

    Raises:
        ConfigurationError: The numbers do not fit the dataset.
    """
    if state.positions is not None:
        if len(state.positions) != len(lengths):
            raise ConfigurationError(
                f"The state of the loader has {len(state.positions)} streams, not {len(lengths)}. "
                "It is damaged."
            )
        return np.array([numbers[0] for numbers in state.positions], np.int64)
    try:
        return decode_counts(state.position, state.ahead, lengths)
    except ValueError as error:
        raise ConfigurationError(
            f"The state of the loader does not fit the dataset: {error}. It is damaged."
        ) from None


def read_positions(state: LoaderState, lengths: Counts) -> list[StreamPosition]:
    """Return the position of each stream, without what the share has received.

    Raises:
        ConfigurationError: The numbers do not fit the dataset.
    """
    counts = read_counts(state, lengths)
    if state.positions is not None:
        return [StreamPosition(*numbers) for numbers in state.positions]
    return [StreamPosition(count, count) for count in counts.tolist()]


def combine_states(states: Sequence[LoaderState], lengths: Counts) -> LoaderState:
    """Return the one state of the states of several processes.

    Ranks take equally many samples, unless the rule for the end of the epoch is ``keep``. So the
    states of the workers of one rank are enough otherwise.

    Raises:
        ConfigurationError: The states do not belong together, or some are missing.
    """
    if not states:
        raise ConfigurationError("There is no state of a ShardLoader in what was given to load.")
    first = states[0]
    common: dict[str, Any] = {
        "share": None,
        "is_after_end": all(one.is_after_end for one in states),
    }
    without = first.model_copy(update=common)
    if any(one.model_copy(update=common) != without for one in states):
        raise ConfigurationError(
            "The states to load are of different steps or datasets. Give those that all ranks and "
            "workers saved at one step."
        )
    shares = [one.share for one in states]
    if all(share is None for share in shares):
        return without
    known = {share.process: share for share in shares if share is not None}
    if None in shares or len({process[2:] for process in known}) > 1:
        raise ConfigurationError(
            "The states to load are of different numbers of processes. Give those that all ranks "
            "and workers saved at one step."
        )
    if len({share.remainder for share in known.values()}) > 1:
        raise ConfigurationError("The states to load are of loaders with different `remainder`.")
    if first.makes_samples:
        return _combine_positions(without, known, lengths)
    return _combine_counts(without, known, lengths)


def _combine_positions(
    state: LoaderState, known: Mapping[ReaderProcess, LoaderShare], lengths: Counts
) -> LoaderState:
    _, _, world_size, workers = next(iter(known))
    positions = [one.list_numbers() for one in read_positions(state, lengths)]
    for rank in range(world_size):
        for worker in range(workers):
            share = known.get(ReaderProcess(rank, worker, world_size, workers))
            if share is None or share.streams is None:
                raise _make_missing_error(rank, worker, world_size, workers)
            for stream, numbers in share.streams.items():
                if not 0 <= stream < len(positions):
                    raise ConfigurationError("The state of the loader has an unknown stream.")
                positions[stream] = list(numbers)
    if all(share.is_ended for share in known.values()):
        return state.end_epoch()
    return state.replace_positions(positions)


def _combine_counts(
    state: LoaderState, known: Mapping[ReaderProcess, LoaderShare], lengths: Counts
) -> LoaderState:
    some, _, world_size, workers = next(iter(known))
    counts = read_counts(state, lengths)
    dealt = deal_streams(counts, world_size, workers)
    remainder = next(iter(known.values())).remainder
    ends = compute_ends(counts, lengths, dealt, remainder)
    reached = counts.copy()
    for rank, own in enumerate(dealt):
        is_known = (
            remainder is Remainder.KEEP or ReaderProcess(rank, 0, world_size, workers) in known
        )
        like = rank if is_known else some
        for worker, streams in enumerate(own):
            share = known.get(ReaderProcess(like, worker, world_size, workers))
            if share is None:
                raise _make_missing_error(like, worker, world_size, workers)
            reached[streams] = advance_counts(counts[streams], ends[streams], share.received)
    if (reached >= ends).all():
        return state.end_epoch()
    position, ahead = encode_counts(reached, lengths)
    return state.model_copy(update={"position": position, "ahead": ahead})


def _make_missing_error(
    rank: int, worker: int, world_size: int, workers: int
) -> ConfigurationError:
    of_worker = f", worker {worker} of {workers}," if workers > 1 else ""
    return ConfigurationError(
        f"The state of rank {rank} of {world_size}{of_worker} is missing. Each process knows only "
        "how far its own streams are: give the states of all of them, as a list."
    )
