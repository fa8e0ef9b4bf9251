import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace import errors
from millrace.keys import DatasetKeys, LeaseKeys, ShardName, checked_name, split_name

SPLITS = st.builds(split_name, st.sampled_from(["train", "val"]), st.integers(0, 200_000))


@given(SPLITS, st.integers(0, 2_000_000))
def test_what_is_built_is_parsed_back(split, n):
    keys, name = DatasetKeys("data/set"), ShardName(split, n)
    assert ShardName.parse(str(name)) == name
    assert keys.parse_commit(keys.commit(name)) == name
    assert keys.parse_end(keys.end(split)) == split
    assert keys.parse_end(keys.commit(name)) is None
    assert keys.parse_commit(keys.end(split)) is None


@given(st.lists(st.integers(0, 99_999), min_size=2, max_size=5))
def test_a_listing_is_in_the_order_of_the_numbers(numbers):
    keys = DatasetKeys("d")
    named = {keys.commit(ShardName(split_name("train", 0), n)): n for n in numbers}
    assert [named[key] for key in sorted(named)] == sorted(set(numbers))


@pytest.mark.parametrize("key", ["", "d/commits/x.json", "d/commits/train-1-1.json", "e/plan.json"])
def test_what_is_not_ours_is_not_parsed(key):
    assert DatasetKeys("d").parse_commit(key) is None
    assert DatasetKeys("d").parse_end(key) is None


@pytest.mark.parametrize("name", ["", "../up", "a//b", "a b", ".hidden", "a/../b", "x" * 201, "ä"])
def test_a_name_that_some_store_would_change_is_refused(name):
    with pytest.raises(errors.ConfigurationError, match="letters, digits"):
        checked_name(name, what="The dataset's name")


def test_a_leases_keys_are_parsed_back():
    keys = LeaseKeys("run", "train-00001")
    assert keys.parse(keys.epoch(3)) == (3, "json")
    assert keys.parse(keys.beat(3)) == (3, "beat")
    assert keys.parse(keys.end(3)) == (3, "end")
    assert keys.parse(LeaseKeys("run", "train-00002").epoch(3)) is None
