"""Counts of streams, beside the same rules in their simplest form: a list of all positions."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from millrace.datasets.loader.stream_counts import (
    Counts,
    Remainder,
    advance_counts,
    compute_ends,
    deal_streams,
    decode_counts,
    encode_counts,
)


@st.composite
def partly_received(draw: st.DrawFn) -> tuple[Counts, Counts]:
    """Return what was received of each stream, and the lengths, which differ by one at most."""
    streams, total = draw(st.integers(1, 12)), draw(st.integers(1, 60))
    lengths = np.array([total // streams + (n < total % streams) for n in range(streams)])
    counts = np.array([draw(st.integers(0, int(length))) for length in lengths])
    return counts, lengths


def list_positions(counts: Counts, ends: Counts) -> list[tuple[int, int]]:
    """Return the samples that are left, in the order in which they are received."""
    return sorted(
        (index, stream)
        for stream, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
        for index in range(count, end)
    )


@given(state=partly_received(), number=st.integers(0, 70))
def test_samples_are_received_in_the_order_of_their_positions(
    state: tuple[Counts, Counts], number: int
) -> None:
    counts, lengths = state
    expected = counts.copy()
    for _, stream in list_positions(counts, lengths)[:number]:
        expected[stream] += 1
    assert advance_counts(counts, lengths, number).tolist() == expected.tolist()


@given(state=partly_received())
def test_counts_survive_their_encoding(state: tuple[Counts, Counts]) -> None:
    counts, lengths = state
    position, ahead = encode_counts(counts, lengths)
    assert decode_counts(position, ahead, lengths).tolist() == counts.tolist()
    assert position + sum(ahead.values()) == counts.sum()
    assert all(ahead.values())


@given(state=partly_received(), number=st.integers(0, 70))
def test_one_reader_of_all_streams_is_never_ahead(
    state: tuple[Counts, Counts], number: int
) -> None:
    _, lengths = state
    counts = advance_counts(np.zeros_like(lengths), lengths, number)
    assert encode_counts(counts, lengths) == (min(number, int(lengths.sum())), {})


@given(state=partly_received(), world_size=st.integers(1, 5), workers=st.integers(1, 5))
def test_each_stream_has_one_reader(
    state: tuple[Counts, Counts], world_size: int, workers: int
) -> None:
    counts, _ = state
    dealt = deal_streams(counts, world_size, workers)
    assert [len(rank) for rank in dealt] == [workers] * world_size
    assert sorted(s for rank in dealt for own in rank for s in own) == list(range(len(counts)))
    sizes = [sum(map(len, rank)) for rank in dealt]
    assert max(sizes) - min(sizes) <= 1


def test_streams_that_are_ahead_are_dealt_to_all_ranks() -> None:
    """One process read with two workers, the first of which was ahead."""
    counts = np.array([30, 20] * 8)
    for rank in deal_streams(counts, 2):
        assert sorted(counts[rank[0]].tolist()) == [20] * 4 + [30] * 4


@given(
    state=partly_received(),
    world_size=st.integers(1, 4),
    workers=st.integers(1, 3),
    remainder=st.sampled_from(Remainder),
)
def test_workers_with_the_same_number_end_together_on_all_ranks(
    state: tuple[Counts, Counts], world_size: int, workers: int, remainder: Remainder
) -> None:
    counts, lengths = state
    dealt = deal_streams(counts, world_size, workers)
    assume(len(counts) % world_size == 0)
    ends = compute_ends(counts, lengths, dealt, remainder)
    for own in zip(*dealt, strict=True):
        rest = [int((lengths - counts)[one].sum()) for one in own]
        found = [int((ends - counts)[one].sum()) for one in own]
        if remainder is Remainder.KEEP:
            assert found == rest
        elif remainder is Remainder.PAD:
            assert found == [max(rest)] * world_size
            assert (ends >= lengths).all()
        else:
            assert found == [min(rest)] * world_size
            for one in own:  # the last positions are left out
                kept = list_positions(counts[one], ends[one])
                assert kept == list_positions(counts[one], lengths[one])[: min(rest)]


@given(
    total=st.integers(1, 200),
    groups=st.integers(1, 6),
    world_size=st.integers(1, 4),
    workers=st.integers(1, 3),
)
def test_a_whole_epoch_leaves_out_fewer_samples_than_there_are_ranks(
    total: int, groups: int, world_size: int, workers: int
) -> None:
    streams = groups * world_size
    lengths = np.array([total // streams + (n < total % streams) for n in range(streams)])
    none = np.zeros_like(lengths)
    dealt = deal_streams(none, world_size, workers)
    assert compute_ends(none, lengths, dealt, Remainder.DROP).sum() == total - total % world_size
    padded = compute_ends(none, lengths, dealt, Remainder.PAD).sum()
    assert padded == -(-total // world_size) * world_size


@pytest.mark.parametrize(
    ("position", "ahead"), [(-1, {}), (11, {}), (5, {0: 9}), (5, {7: 1}), (5, {-1: 1})]
)
def test_numbers_that_fit_no_streams_are_refused(position: int, ahead: dict[int, int]) -> None:
    with pytest.raises(ValueError, match=r"epoch|fewer"):
        decode_counts(position, ahead, np.array([4, 3, 3]))
