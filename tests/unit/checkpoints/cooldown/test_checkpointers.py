"""Selection of checkpointers: Psyche's by its test vectors, ours by its promises."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.checkpoints.cooldown.checkpointers import (
    SelectionRule,
    count_checkpointers,
    order_checkpointers,
)
from millrace.errors import ConfigurationError

SEEDS = st.integers(0, 2**64 - 1)
MEMBERS = st.lists(st.from_regex(r"[a-z0-9]{1,12}", fullmatch=True), min_size=1, unique=True)


@pytest.mark.parametrize(
    ("members", "seed", "chosen"),
    [
        (3, 1, [1]),
        (6, 42, [0, 1]),
        (12, 12345, [0, 3, 6, 7]),
        (48, 7, [1, 2, 3, 5, 8, 12, 13, 14, 16, 17, 18, 22, 27, 36, 42, 43]),
    ],
)
def test_psyches_selection(members: int, seed: int, chosen: list[int]) -> None:
    names = [f"{index:03d}" for index in range(members)]
    order = order_checkpointers(names, seed, SelectionRule.PSYCHE)
    assert sorted(order[: count_checkpointers(members, SelectionRule.PSYCHE)]) == [
        names[i] for i in chosen
    ]


def test_how_many() -> None:
    of = (1, 2, 3, 5, 6, 7, 9, 12, 48, 200)
    assert [count_checkpointers(n, SelectionRule.PSYCHE) for n in of] == [
        1,
        1,
        1,
        1,
        2,
        2,
        3,
        4,
        16,
        16,
    ]
    assert [count_checkpointers(n) for n in of] == [1, 2, 2, 2, 2, 2, 3, 4, 16, 16]


@given(MEMBERS, SEEDS, st.sampled_from(SelectionRule))
def test_everybody_has_one_place(members: list[str], seed: int, choice: SelectionRule) -> None:
    order = order_checkpointers(members, seed, choice)
    assert sorted(order) == sorted(members)
    assert order == order_checkpointers(members, seed, choice)


@given(MEMBERS, SEEDS, st.data())
def test_ours_does_not_depend_on_who_else_there_is(
    members: list[str], seed: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sets(st.sampled_from(members)))
    rest = [name for name in order_checkpointers(members, seed) if name not in gone]
    assert order_checkpointers([name for name in members if name not in gone], seed) == rest


@pytest.mark.parametrize("choice", SelectionRule)
def test_it_is_fair_over_seeds(choice: SelectionRule) -> None:
    names = [f"{index:02d}" for index in range(12)]
    times = Counter(
        name
        for seed in range(600)
        for name in order_checkpointers(names, seed, choice)[: count_checkpointers(12, choice)]
    )
    # 200 are expected of each, and the standard deviation is 11.5.
    assert min(times.values()) > 150
    assert max(times.values()) < 250


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_is_of_64_bits(seed: int) -> None:
    with pytest.raises(ConfigurationError, match="64 bits"):
        order_checkpointers(["a"], seed)
