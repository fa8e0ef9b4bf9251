import pytest

from millrace.keys.leases import LeaseKeys, parse_lease


def test_a_leases_keys_are_parsed_back():
    keys = LeaseKeys("run", "train-00001")
    assert keys.parse(keys.make_term_key(3)) == (3, "json")
    assert keys.parse(keys.make_beat_key(3)) == (3, "beat")
    assert keys.parse(keys.make_end_key(3)) == (3, "end")
    assert keys.parse(LeaseKeys("run", "train-00002").make_term_key(3)) is None


@pytest.mark.parametrize("name", ["members/a//", "members/../a/", "members/./a/", "members/a\n/"])
def test_a_key_that_no_store_reads_is_no_lease(name):
    assert parse_lease("job", f"job/lease/{name}000000.json") is None
    assert parse_lease("job", "job/lease/members/a/000000.json") == LeaseKeys("job", "members/a")


@pytest.mark.parametrize("number", ["0000003", "00000000003", "3"])
def test_a_number_with_other_zeros_than_ours_is_no_epoch(number):
    assert LeaseKeys("job", "members/a").parse(f"job/lease/members/a/{number}.json") is None


def test_a_lease_below_a_members_own_is_not_another_members():
    assert parse_lease("job", "job/lease/members/a/b/000000.json") is None
    assert parse_lease("job", "job/lease/members/a/b/c/000000.json") is None
