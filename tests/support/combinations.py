"""Combinations of parameters of a test that have no new value."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

Value = tuple[object, ...]
"""Names of parameters, and the identities of their values."""


@dataclass(frozen=True)
class Combination:
    """Test with values for its parameters.

    Attributes:
        test: The test.
        rows: Rows of each `parametrize`. The values of a row belong together.
        fixtures: Values of fixtures that have several.
    """

    test: pytest.Function
    rows: frozenset[Value]
    fixtures: frozenset[Value]


def list_further_combinations(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """List the tests that have no row of a `parametrize` and no value of a fixture for themselves.

    The functions of a module take the values of a fixture in turn. In a module with the mark
    `contract`, each function has all of them. A test that has the mark `soak` already stands for no
    value, since it does not run beside the others.
    """
    functions: dict[tuple[Path, str], list[Combination]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("soak"):
            continue
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.path, item.originalname].append(_read_combination(item))
    uses: dict[Path, Counter[Value]] = defaultdict(Counter)
    for (path, _), combinations in functions.items():
        chosen = _choose(combinations, uses[path])
        yield from (one.test for one in combinations if one not in chosen)


def _choose(combinations: Sequence[Combination], uses: Counter[Value]) -> list[Combination]:
    """Choose combinations that have all rows, with the values of fixtures that were used least."""
    missing = set(chain.from_iterable(one.rows for one in combinations))
    chosen: list[Combination] = []
    while missing or not chosen:
        best = max(
            combinations,
            key=lambda one: (len(one.rows & missing), -sum(uses[value] for value in one.fixtures)),
        )
        chosen.append(best)
        missing -= best.rows
        uses.update(best.fixtures)
    return chosen


def _read_combination(test: pytest.Function) -> Combination:
    values = dict(test.callspec.params)
    rows: set[Value] = set()
    for mark in test.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        names = [name.strip() for name in names]
        rows.add((*names, *(id(values.pop(name)) for name in names)))
    fixtures: set[Value] = {(name, id(value)) for name, value in values.items()}
    if test.get_closest_marker("contract"):
        rows, fixtures = rows | fixtures, set()
    return Combination(test, frozenset(rows), frozenset(fixtures))
