"""The store of a benchmark has cores of its own, where there are more than two."""

from benchmarks.server_cores import split_cores


def test_the_store_shares_no_core_with_the_clients_where_there_are_more_than_two() -> None:
    assert split_cores({0, 1}) == ({0, 1}, {0, 1})
    ours, servers = split_cores({0, 2, 4, 6, 9})
    assert ours | servers == {0, 2, 4, 6, 9}
    assert not ours & servers
    assert ours
    assert servers
