"""The order of an epoch: a permutation of any size, the same everywhere, without a list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.datasets.loader.permutation import Permutation


@given(size=st.integers(1, 5000), seed=st.integers(), epoch=st.integers(0, 1 << 40))
def test_each_number_comes_once(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch).permute(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


@given(
    size=st.integers(1, (1 << 62) - 1),
    seed=st.integers(-(1 << 70), 1 << 70),
    positions=st.lists(st.floats(0, 1, exclude_max=True), max_size=9),
)
def test_a_position_has_the_same_number_alone_and_among_others(
    size: int, seed: int, positions: list[float]
) -> None:
    order = Permutation(size, seed)
    wanted = [min(size - 1, int(one * size)) for one in positions]
    together = order.permute(wanted)
    assert [int(order.permute([one])[0]) for one in wanted] == together.tolist()
    assert all(one < size for one in together.tolist())


def test_the_order_is_that_of_every_machine() -> None:
    """Stored states refer to the order, so it must never change."""
    assert Permutation(1000, 7, 2).permute(range(5)).tolist() == [763, 99, 990, 622, 848]
    largest = (1 << 62) - 1
    assert Permutation(largest, 3).permute([0, 1, largest - 1]).tolist() == [
        4254921609123556785, 2218278483391468362, 4005811916898328287,
    ]  # fmt: skip
    assert Permutation(1, 5).permute([0]).tolist() == [0]


def test_each_order_of_three_numbers_is_equally_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(3000):
        order = tuple(Permutation(3, seed).permute(range(3)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 500) < 5 * 500**0.5 for count in counts.values())


def test_epochs_differ() -> None:
    first, second = (Permutation(1000, 1, epoch).permute(range(1000)) for epoch in (0, 1))
    assert np.count_nonzero(first == second) < 20


@pytest.mark.parametrize("size", [0, -1, 1 << 62])
def test_a_size_without_an_order_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        Permutation(size, 1)


def test_a_position_beyond_the_size_is_refused() -> None:
    with pytest.raises(IndexError, match="not below 10"):
        Permutation(10, 1).permute([3, 10])
