"""A state taken apart and put together again: the same values, and nothing of it pickled."""

import math
import random
from collections import OrderedDict
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.checkpoints import tree
from millrace.checkpoints.tree import SKELETON, flatten_state, unflatten_state
from millrace.errors import ConfigurationError, CorruptError
from tests.support.examples import scale_examples


def equal(one: object, other: object) -> bool:
    """Decide whether two states are the same, types included."""
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
    back = unflatten_state(flatten_state(state))
    assert equal(back, state)
    optimizer.load_state_dict(back["optimizer"])
    random.Random().setstate(back["rng"]["python"])
    np.random.RandomState().set_state(back["rng"]["numpy"])


@pytest.mark.parametrize(
    ("value", "restored"),
    [(1.0, 1), (True, 1), ((1, 2), [1, 2]), (np.zeros(2), np.zeros(2, np.float32)), ("a", None)],
    ids=repr,
)
def test_a_state_that_would_not_be_restored_as_it_is_is_refused(monkeypatch, value, restored):
    """The state is restored and compared before it is saved."""
    monkeypatch.setattr(tree, "unflatten_state", lambda tensors: {"a": [0, restored]})
    with pytest.raises(ConfigurationError, match="could not be restored as it is"):
        flatten_state({"a": [0, value]})
    monkeypatch.setattr(tree, "unflatten_state", lambda tensors: {"a": [0, value]})
    flatten_state({"a": [0, value]})


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


@settings(max_examples=scale_examples(200), deadline=None)
@given(state=st.dictionaries(st.text(), states, max_size=4))
def test_whatever_is_in_it(state):
    assert equal(unflatten_state(flatten_state(state)), state)


def test_tied_tensors_are_there_once_and_come_back_tied():
    weight = torch.ones(3)
    tensors = flatten_state({"embed": weight, "head": weight, "part": weight[:2]})
    assert set(tensors) == {"embed", "part", SKELETON}
    back = unflatten_state(tensors)
    assert back["embed"] is back["head"]


def test_views_of_the_same_memory_with_other_values_are_not_tied():
    whole = torch.complex(torch.ones(2), torch.full((2,), 3.0))
    state = {"a": whole, "b": whole.conj(), "c": whole.imag, "d": whole.conj().imag}
    back = unflatten_state(flatten_state(state))
    for name, tensor in state.items():
        assert back[name].tolist() == tensor.tolist()
    assert set(flatten_state({"a": whole.conj(), "b": whole.conj()})) == {"a", SKELETON}


def test_names_that_would_be_the_same_are_told_apart():
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, SKELETON: torch.full((1,), 2.0)}
    assert equal(unflatten_state(flatten_state(state)), state)


def test_what_was_not_loaded_is_left_out():
    tensors = flatten_state({"a": torch.ones(1), "b": {"c": torch.ones(1)}, "d": [torch.ones(1)]})
    del tensors["b.c"], tensors["d.0"]
    assert equal(unflatten_state(tensors), {"a": torch.ones(1), "b": {}, "d": [None]})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (OrderedDict, "type"),
        ({1, 2}, "set"),
        (torch.eye(2).to_sparse(), "sparse"),
        (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), "masked"),
        (np.array([1, 2], dtype=">i4"), "numpy array"),
        (np.longdouble(1) / 3, "longdouble"),
        (1j, "complex"),
        ("broken \udc80", "surrogate"),
        ({"broken \udc80": 1}, "surrogate"),
        ({torch.ones(1): 1}, "key"),
        (np.array(["text"]), "numpy array"),
        (print, "builtin_function"),
    ],
    ids=str,
)
def test_what_cannot_be_saved_is_named_with_its_path(value, kind):
    with pytest.raises(ConfigurationError, match=rf"model\.0\.bad.*{kind}"):
        flatten_state({"model": [{"bad": value}]})


class Level(IntEnum):
    """An integer that is more than one."""

    HIGH = 7


class Celsius(float):
    """A float of a class of its own."""


class Shouted(str):
    """Text that does not print as what it is."""

    def __str__(self) -> str:
        return self.upper()


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float64("nan"), math.nan),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (Level.HIGH, 7),
        (Celsius(1.5), 1.5),
        (Shouted("a"), "a"),
        (10**5000, 10**5000),
        ((np.int64(1), Shouted("b")), (1, "b")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_and_text_of_any_class_come_back_plain_also_as_keys(value, plain):
    state = {"optimizer": {"state": {value: value}}}
    back = unflatten_state(flatten_state(state))
    ((key, found),) = back["optimizer"]["state"].items()
    assert equal([key, found], [plain, plain])


def test_keys_that_would_be_saved_as_one_are_refused_with_their_path():
    class Odd(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

    with pytest.raises(ConfigurationError, match=r"optimizer\.state .*'a'.* twice"):
        flatten_state({"optimizer": {"state": {Odd("a"): 1, Odd("a"): 2}}})


@pytest.mark.parametrize("kind", [dict, list])
def test_a_state_that_contains_itself_is_refused_with_its_path(kind):
    loop = {} if kind is dict else [0]
    state = {"model": {"loop": loop}}
    if isinstance(loop, dict):
        loop["again"] = state
    else:
        loop.append(loop)
    with pytest.raises(ConfigurationError, match=r"model\.loop\.(again|1) .*contains itself"):
        flatten_state(state)


def test_what_is_nested_too_deeply_is_refused_and_a_value_in_two_places_is_not():
    shared = [1]
    assert unflatten_state(flatten_state({"a": shared, "b": [shared]})) == {"a": [1], "b": [[1]]}
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ConfigurationError, match=r"model\.0\.0.* nested"):
        flatten_state({"model": deep})


NO_SKELETONS = [
    b"", b"{", b'["x", 1]', b'["d", 1]', b"[]", b'["y", "load"]', b'["y", "no_type"]', b'["y", 1]',
    b'["l",' * 1000 + b"1" + b"]" * 1000,
]  # fmt: skip


@pytest.mark.parametrize("skeleton", NO_SKELETONS)
def test_a_skeleton_that_is_none_is_refused(skeleton):
    body = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8) if skeleton else torch.empty(0)
    with pytest.raises(CorruptError, match="skeleton"):
        unflatten_state({SKELETON: body})
