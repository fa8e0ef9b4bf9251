"""Combinations of parameters of a test that have no new value."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

Value = tuple[object, ...]
"""The parameters of one `parametrize`, or one fixture, and the identities of their values."""


def list_further_combinations(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """List the tests whose every value of a parameter is in another combination of their function.

    A value of one `parametrize` is a row of it, as such rows belong together.
    """
    functions: dict[object, dict[pytest.Function, set[Value]]] = defaultdict(dict)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.path, item.originalname][item] = set(_list_values(item))
    for combinations in functions.values():
        missing = set().union(*combinations.values())
        while missing:
            chosen = max(combinations, key=lambda item: len(combinations[item] & missing))
            missing -= combinations.pop(chosen)
        yield from combinations


def _list_values(item: pytest.Function) -> Iterator[Value]:
    values = dict(item.callspec.params)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        names = [name.strip() for name in names]
        yield (*names, *(id(values.pop(name)) for name in names))
    yield from ((name, id(value)) for name, value in values.items())
