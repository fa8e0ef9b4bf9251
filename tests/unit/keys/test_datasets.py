import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigurationError
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.datasets import CommitName, DatasetKeys, make_partition_name
from millrace.keys.leases import COLLECTOR, LeaseKeys, make_clock_probe_key, make_run_lease_name
from millrace.keys.rentals import RentalKeys

PARTITIONS = st.builds(
    make_partition_name, st.sampled_from(["train", "val"]), st.integers(0, 200_000)
)


@given(PARTITIONS, st.integers(0, 2_000_000))
def test_what_is_built_is_parsed_back(partition, number):
    keys, name = DatasetKeys("data/set"), CommitName(partition, number)
    assert CommitName.parse(str(name)) == name
    assert keys.parse_commit(keys.make_commit_key(name)) == name
    assert keys.parse_end(keys.make_end_key(partition)) == partition
    assert keys.parse_end(keys.make_commit_key(name)) is None
    assert keys.parse_commit(keys.make_end_key(partition)) is None


@pytest.mark.parametrize("digest", ["", f"blake3:{'0123456789abcdef' * 4}"])
def test_shards_and_quarantines_with_and_without_a_digest_are_those_of_their_dataset(digest):
    keys, name = DatasetKeys("data/set"), CommitName("train-00000", 3)
    suffix = "-0123456789abcdef" if digest else ""
    shard = keys.make_shard_key("mds", "train", name, "mds", digest)
    quarantine = keys.make_quarantine_key(name, digest)
    assert shard == f"data/set/shards/mds/train/train-00000-000003{suffix}.mds"
    assert quarantine == f"data/set/quarantine/train-00000-000003{suffix}.jsonl"
    for key in (shard, quarantine):
        assert keys.is_shard_or_quarantine(key)
        assert keys.is_own(key)
        assert not keys.is_shard_or_quarantine(key.replace("-000003", "-000003-0123"))
    assert keys.parse_commit(f"data/set/commits/train-00000/000003{suffix}.json") == (
        None if digest else name
    )


@pytest.mark.parametrize(
    "key",
    [
        "d/transforms/lower/plan.json",
        "d/transforms/notes.txt",
        f"d/transforms/{'a' * 63}.py",
        "d/shards/mds/train/notes.txt",
        "d/quarantine/notes.txt",
        "d/partitions/notes.txt",
        "d/lease/notes.txt",
        "d/lease/000000.json",
        "d/lease/clock/photo.jpg",
        "d/e/manifest.json",
        f"e/transforms/{'a' * 64}.py",
        "e/lease/train-00000/000000.json",
    ],
)
def test_what_others_keep_below_a_dataset_is_not_its_own(key):
    assert not DatasetKeys("d").is_own(key)


def test_the_objects_of_leases_are_a_datasets_own():
    keys = DatasetKeys("d")
    for name in ("train-00000", COLLECTOR, make_run_lease_name("0123456789abcdef")):
        lease = LeaseKeys("d", name)
        for key in (lease.make_term_key(0), lease.make_beat_key(1), lease.make_end_key(2)):
            assert keys.is_own(key)
    assert keys.is_own(make_clock_probe_key("d", "0123456789abcdef"))


@pytest.mark.parametrize("folder", ["shards", "commits", "partitions", "quarantine", "transforms"])
def test_no_name_has_a_folder_of_a_dataset_in_it(folder):
    for make in (DatasetKeys, CheckpointKeys, RentalKeys):
        with pytest.raises(ConfigurationError, match="reserved"):
            make(f"words/{folder}/lower")


@given(st.lists(st.integers(0, 99_999), min_size=2, max_size=5))
def test_a_listing_is_in_the_order_of_the_numbers(numbers):
    keys = DatasetKeys("d")
    named = {
        keys.make_commit_key(CommitName(make_partition_name("train", 0), n)): n for n in numbers
    }
    assert [named[key] for key in sorted(named)] == sorted(set(numbers))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "d/commits/x.json",
        "d/commits/train-1/1.json",
        "d/commits/train-00000-000000.json",
        "train-00000/end.json",
        "e/plan.json",
    ],
)
def test_what_is_not_ours_is_not_parsed(key):
    assert DatasetKeys("d").parse_commit(key) is None
    assert DatasetKeys("d").parse_end(key) is None
