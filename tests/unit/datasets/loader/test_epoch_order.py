"""The order of an epoch: each sample once, well mixed, the same everywhere, in little memory."""

import itertools
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace import errors
from millrace.datasets.loader.epoch_order import EpochOrder

FILES = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


def make_order(samples: list[int], **options: object) -> EpochOrder:
    given: dict[str, object] = {
        "seed": 0, "epoch": 0, "streams": 4, "shuffle_window": 5, "shuffle": True, **options,
    }  # fmt: skip
    return EpochOrder(samples, **given)  # type: ignore[arg-type]


def list_stream(order: EpochOrder, stream: int) -> Iterator[tuple[int, int]]:
    """Yield the samples of a stream in their order, each as its file and its number in the file."""
    for number in range(order.count_windows(stream)):
        runs = order.list_ranges(stream, number)
        rows = [(run.shard, row) for run in runs for row in range(run.start, run.end)]
        yield from (rows[one] for one in order.permute_window(stream, number))


@given(
    samples=FILES,
    seed=st.integers(),
    epoch=st.integers(0, 1000),
    streams=st.integers(1, 20),
    window=st.integers(1, 60),
    shuffle=st.booleans(),
)
def test_the_streams_have_each_sample_once(
    samples: list[int], seed: int, epoch: int, streams: int, window: int, shuffle: bool
) -> None:
    order = make_order(
        samples, seed=seed, epoch=epoch, streams=streams, shuffle_window=window, shuffle=shuffle
    )
    found = [list(list_stream(order, stream)) for stream in range(streams)]
    assert [len(one) for one in found] == order.lengths.tolist()
    assert max(order.lengths) - min(order.lengths) <= 1
    expected = [(file, row) for file, count in enumerate(samples) for row in range(count)]
    assert sorted(one for stream in found for one in stream) == expected


@given(samples=FILES, streams=st.integers(1, 20), window=st.integers(1, 60))
def test_without_shuffling_the_streams_are_the_dataset_cut_in_parts(
    samples: list[int], streams: int, window: int
) -> None:
    order = make_order(samples, streams=streams, shuffle_window=window, shuffle=False)
    found = [one for stream in range(streams) for one in list_stream(order, stream)]
    assert found == [(file, row) for file, count in enumerate(samples) for row in range(count)]


@given(samples=FILES, streams=st.integers(1, 20), window=st.integers(1, 60))
def test_the_next_file_is_that_of_the_next_windows(
    samples: list[int], streams: int, window: int
) -> None:
    order = make_order(samples, streams=streams, shuffle_window=window)
    for stream in range(streams):
        windows = range(order.count_windows(stream))
        files = [[run.shard for run in order.list_ranges(stream, n)] for n in windows]
        for number, own in enumerate(files):
            later = [one for found in files[number + 1 :] for one in found if one != own[-1]]
            assert order.find_next_shard(stream, number) == (later[0] if later else None)


def test_a_stream_reads_each_file_from_its_beginning_to_its_end() -> None:
    order = make_order([100] * 20, streams=2, shuffle_window=30)
    for stream in range(2):
        runs = [
            run
            for number in range(order.count_windows(stream))
            for run in order.list_ranges(stream, number)
        ]
        for one, following in itertools.pairwise(runs):
            assert following.start == (one.end if one.shard == following.shard else 0)
        assert len({run.shard for run in runs}) == 10


def test_the_order_is_that_of_every_machine() -> None:
    """Stored states refer to the order, so it must never change."""
    order = make_order([5, 7, 3], seed=11, epoch=2, streams=2, shuffle_window=4)
    assert [list(list_stream(order, stream)) for stream in range(2)] == [
        [(1, 3), (1, 1), (1, 2), (1, 0), (1, 4), (2, 0), (1, 6), (1, 5)],
        [(2, 1), (2, 2), (0, 1), (0, 0), (0, 3), (0, 2), (0, 4)],
    ]


def test_the_short_windows_are_those_of_every_machine() -> None:
    order = make_order([20], seed=11, epoch=2, streams=1, shuffle_window=16)
    assert [order.permute_window(0, number) for number in range(6)] == [
        [0], [0], [1, 0], [0, 3, 2, 1], [0, 1, 5, 4, 3, 7, 6, 2], [3, 1, 0, 2],
    ]  # fmt: skip


def test_an_epoch_begins_with_short_windows() -> None:
    order = make_order([1000], streams=1, shuffle_window=160)
    sizes = [len(order.permute_window(0, number)) for number in range(order.count_windows(0))]
    assert sizes == [10, 10, 20, 40, 80, 160, 160, 160, 160, 160, 40]
    assert [order.find_window(row) for row in (0, 9, 10, 79, 80, 159, 160, 319, 999)] == [
        (0, 0), (0, 9), (1, 0), (3, 39), (4, 0), (4, 79), (5, 0), (5, 159), (10, 39),
    ]  # fmt: skip


@given(window=st.integers(1, 60), row=st.integers(0, 300))
def test_each_row_is_in_one_window(window: int, row: int) -> None:
    order = make_order([301], streams=1, shuffle_window=window)
    number, within = order.find_window(row)
    (run,) = order.list_ranges(0, number)
    assert run.start + within == row
    assert row < run.end


def test_seeds_and_epochs_have_other_orders() -> None:
    orders = {
        tuple(list_stream(make_order([50] * 9, seed=seed, epoch=epoch), 0))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_neighbours_come_from_as_many_files_as_there_are_streams() -> None:
    order = make_order([1000] * 64, streams=16, shuffle_window=50)
    first = [next(list_stream(order, stream))[0] for stream in range(16)]
    assert len(set(first)) == 16


def test_each_order_of_a_window_is_equally_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    order = make_order([9000], streams=1, shuffle_window=3)
    for window in range(3000):
        found = tuple(order.permute_window(0, window))
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 500) < 5 * 500**0.5 for count in counts.values())


def test_ten_million_samples_take_little_memory() -> None:
    tracemalloc.start()
    order = make_order([1000] * 10_000, streams=64, shuffle_window=1000)
    for stream in range(64):
        order.list_ranges(stream, 100)
        order.permute_window(stream, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert order.total == 10_000_000
    assert peak < 2_000_000


@pytest.mark.parametrize(
    ("samples", "options", "text"),
    [
        ([], {}, "no samples"),
        ([0, 0], {}, "no samples"),
        ([1], {"streams": 0}, "at least 1"),
        ([1], {"shuffle_window": 0}, "at least 1"),
    ],
)
def test_an_order_of_nothing_is_refused(
    samples: list[int], options: dict[str, object], text: str
) -> None:
    with pytest.raises(errors.ConfigurationError, match=text):
        make_order(samples, **options)


def test_more_streams_than_samples_leave_streams_empty() -> None:
    order = make_order([2, 1], streams=5)
    assert np.array_equal(order.lengths, [1, 1, 1, 0, 0])
    assert order.permute_window(3, 0) == []
