"""Progress of the processes of an epoch, without a store: their samples are only numbers."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.datasets.loader.epoch_order import EpochOrder
from millrace.datasets.loader.epoch_progress import EpochProgress
from millrace.datasets.loader.loader_state import LoaderState, ReaderProcess, combine_states
from millrace.datasets.loader.readers.base import LoadedSample
from millrace.datasets.loader.stream_counts import Remainder

STREAMS = 12  # which 1, 2, 3 and 4 ranks divide

Sample = tuple[int, int]
"""Stream, and index in the stream."""


def make_order(total: int) -> EpochOrder:
    return EpochOrder([total], seed=1, epoch=0, streams=STREAMS, shuffle_window=4, shuffle=True)


def make_state() -> LoaderState:
    return LoaderState(
        manifest="", split="train", seed=1, epoch=0, streams=STREAMS, shuffle_window=4,
        shuffle=True, transform=False, pack=None,
    )  # fmt: skip


def list_processes(world_size: int, workers: int) -> list[ReaderProcess]:
    return [
        ReaderProcess(rank, worker, world_size, workers)
        for rank in range(world_size)
        for worker in range(workers)
    ]


def read(progress: EpochProgress) -> Iterator[Sample]:
    """Iterate over the rest of the epoch of a process, and count what it receives."""

    def iterate_rows(stream: int, start: int) -> Iterator[LoadedSample]:
        return ({"sample": (stream, row)} for row in range(start, progress.order.lengths[stream]))

    positions = progress.locate_streams()
    rows = {stream: iterate_rows(stream, one.row) for stream, one in positions.items()}
    for sample in progress.merge_rows(rows, positions):
        progress.received += 1
        yield sample["sample"]
    progress.is_ended = True


@given(
    total=st.integers(STREAMS, 90),
    processes=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3])),
        min_size=1, max_size=4,
    ),
    data=st.data(),
)  # fmt: skip
def test_each_sample_is_received_once_by_any_processes_that_follow_each_other(
    total: int, processes: list[tuple[int, int]], data: st.DataObject
) -> None:
    order, state = make_order(total), make_state()
    received = Counter[Sample]()
    for world_size, workers in processes:
        states: list[LoaderState] = []
        for process in list_processes(world_size, workers):
            progress = EpochProgress(state, order, process, Remainder.KEEP)
            samples = read(progress)
            for _ in range(data.draw(st.integers(0, total // (world_size * workers)))):
                received.update(found for found in [next(samples, None)] if found)
            saved = progress.make_state()
            assert LoaderState.model_validate_json(saved.model_dump_json()) == saved
            again = EpochProgress(saved, order, process, Remainder.KEEP)
            assert again.locate_streams() == progress.locate_streams() or saved.epoch
            states.append(again.make_state())
        state = combine_states(states, order.lengths)
        if state.epoch:
            break
    if not state.epoch:
        last = EpochProgress(state, order, ReaderProcess(0, 0, 1, 1), Remainder.KEEP)
        received.update(read(last))
    assert received == {
        (stream, row): 1 for stream in range(STREAMS) for row in range(order.lengths[stream])
    }


@given(total=st.integers(STREAMS, 90), world_size=st.sampled_from([2, 3, 4]), data=st.data())
def test_ranks_that_are_equally_far_have_one_state(
    total: int, world_size: int, data: st.DataObject
) -> None:
    order, count = make_order(total), data.draw(st.integers(0, total // world_size))
    states: list[LoaderState] = []
    for process in list_processes(world_size, 1):
        progress = EpochProgress(make_state(), order, process, Remainder.DROP)
        assert len([found for found, _ in zip(read(progress), range(count), strict=False)]) == count
        states.append(progress.make_state())
    assert states == states[:1] * world_size
    assert states[0].share is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_that_has_ended_is_followed_by_the_next_one(world_size: int) -> None:
    order, process = make_order(20), ReaderProcess(0, 0, world_size, 1)
    progress = EpochProgress(make_state(), order, process, Remainder.KEEP)
    samples = read(progress)
    count = 20 // world_size
    for _ in range(count):
        next(samples)
    assert (progress.is_ended, progress.epoch) == (False, 0)
    assert next(samples, None) is None
    assert (progress.is_ended, progress.epoch, progress.received) == (True, 1, count)
    assert EpochProgress(progress.make_state(), order, process, Remainder.KEEP).epoch == 1
