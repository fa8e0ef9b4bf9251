"""A state taken apart and put together again: the same values, and nothing of it pickled."""

import math
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.checkpoints.tree import SKELETON, put_together, taken_apart
from millrace.errors import ConfigurationError, CorruptError


def equal(one: object, other: object) -> bool:
    """Whether two states are the same, types included."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        assert isinstance(other, list | tuple)
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other


def test_a_training_state_comes_back_as_it_was():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "rng": {
            "torch": torch.get_rng_state(),
            "numpy": np.random.RandomState(1).get_state(),
            "python": random.Random(1).getstate(),
        },
        "loader": {"shard": 7, "seen": b"\x00\xff", "epoch": None, "done": False},
    }
    back = put_together(taken_apart(state))
    assert equal(back, state)
    optimizer.load_state_dict(back["optimizer"])
    random.Random().setstate(back["rng"]["python"])
    np.random.RandomState().set_state(back["rng"]["numpy"])


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=20),
    st.sampled_from([torch.bfloat16, torch.int8]),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(state=st.dictionaries(st.text(), states, max_size=4))
def test_whatever_is_in_it(state):
    assert equal(put_together(taken_apart(state)), state)


def test_tied_tensors_are_there_once_and_come_back_tied():
    weight = torch.ones(3)
    tensors = taken_apart({"embed": weight, "head": weight, "part": weight[:2]})
    assert set(tensors) == {"embed", "part", SKELETON}
    back = put_together(tensors)
    assert back["embed"] is back["head"]


def test_names_that_would_be_the_same_are_told_apart():
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, SKELETON: torch.full((1,), 2.0)}
    assert equal(put_together(taken_apart(state)), state)


def test_what_was_not_loaded_is_left_out():
    tensors = taken_apart({"a": torch.ones(1), "b": {"c": torch.ones(1)}, "d": [torch.ones(1)]})
    del tensors["b.c"], tensors["d.0"]
    assert equal(put_together(tensors), {"a": torch.ones(1), "b": {}, "d": [None]})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (OrderedDict, "type"),
        ({1, 2}, "set"),
        (torch.eye(2).to_sparse(), "sparse"),
        (np.array(["text"]), "numpy array"),
        (print, "builtin_function"),
    ],
    ids=str,
)
def test_what_cannot_be_saved_is_named_with_its_path(value, kind):
    with pytest.raises(ConfigurationError, match=rf"model\.0\.bad.*{kind}"):
        taken_apart({"model": [{"bad": value}]})


@pytest.mark.parametrize("skeleton", [b"", b"{", b'["x", 1]', b'["d", 1]', b"[]"])
def test_a_skeleton_that_is_none_is_refused(skeleton):
    body = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8) if skeleton else torch.empty(0)
    with pytest.raises(CorruptError, match="skeleton"):
        put_together({SKELETON: body})
