"""The benchmark of growth finds a quadratic cost beside a constant one."""

import pytest

from benchmarks.common import compute_exponent
from benchmarks.growth import GOAL


@pytest.mark.parametrize("constant", [0.0, 0.3, 0.5, 1.0])
def test_the_exponent_is_that_of_the_largest_sizes(constant: float) -> None:
    sizes = (1, 1_000, 10_000, 100_000)
    for power, factor in ((1, 3e-5), (2, 5e-9)):
        costs = {size: constant + factor * size**power for size in sizes}
        assert compute_exponent(costs, costs[1]) == pytest.approx(power, abs=0.01)
    quick = {size: constant + 1e-9 * size**2 for size in (1, 1_000, 3_000, 10_000)}
    found = compute_exponent(quick, quick[1])
    assert found is not None
    assert found > GOAL


def test_there_is_no_exponent_of_costs_that_are_not_above_the_constant() -> None:
    assert compute_exponent({1: 0.5, 10: 0.5, 100: 0.6}, 0.5) is None
