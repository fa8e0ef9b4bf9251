import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.keys.datasets import DatasetKeys, ShardName, make_partition_name

PARTITIONS = st.builds(
    make_partition_name, st.sampled_from(["train", "val"]), st.integers(0, 200_000)
)


@given(PARTITIONS, st.integers(0, 2_000_000))
def test_what_is_built_is_parsed_back(partition, number):
    keys, name = DatasetKeys("data/set"), ShardName(partition, number)
    assert ShardName.parse(str(name)) == name
    assert keys.parse_commit(keys.make_commit_key(name)) == name
    assert keys.parse_end(keys.make_end_key(partition)) == partition
    assert keys.parse_end(keys.make_commit_key(name)) is None
    assert keys.parse_commit(keys.make_end_key(partition)) is None


@given(st.lists(st.integers(0, 99_999), min_size=2, max_size=5))
def test_a_listing_is_in_the_order_of_the_numbers(numbers):
    keys = DatasetKeys("d")
    named = {
        keys.make_commit_key(ShardName(make_partition_name("train", 0), n)): n for n in numbers
    }
    assert [named[key] for key in sorted(named)] == sorted(set(numbers))


@pytest.mark.parametrize("key", ["", "d/commits/x.json", "d/commits/train-1-1.json", "e/plan.json"])
def test_what_is_not_ours_is_not_parsed(key):
    assert DatasetKeys("d").parse_commit(key) is None
    assert DatasetKeys("d").parse_end(key) is None
