import pytest

from millrace.keys.leases import LeaseKeys, parse_lease


def test_a_leases_keys_are_parsed_back():
    keys = LeaseKeys("run", "train-00001")
    assert keys.parse(keys.epoch(3)) == (3, "json")
    assert keys.parse(keys.beat(3)) == (3, "beat")
    assert keys.parse(keys.end(3)) == (3, "end")
    assert keys.parse(LeaseKeys("run", "train-00002").epoch(3)) is None


@pytest.mark.parametrize("name", ["members/a//", "members/../a/", "members/./a/", "members/a\n/"])
def test_a_key_that_no_store_reads_is_no_lease(name):
    assert parse_lease("job", f"job/lease/{name}000000.json") is None
    assert parse_lease("job", "job/lease/members/a/000000.json") == LeaseKeys("job", "members/a")
