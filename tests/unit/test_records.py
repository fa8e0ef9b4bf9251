import importlib
import pkgutil
import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

import millrace
from millrace import errors
from millrace.digest import OwnDigest
from millrace.records import (
    Record,
    commit_once,
    commit_same,
    encode_record,
    fetch,
    iterate_records,
    require_intact,
)
from millrace.storage import create, list_objects, open_store, put


class Thing(Record):
    record_kind = "thing"

    name: str
    size: int = 0


class Other(Record):
    record_kind = "other"

    name: str


@pytest.fixture
def store():
    return open_store(f"memory://{secrets.token_hex(8)}")


def test_the_first_commit_stands_and_only_it_is_mine(store):
    first = commit_once(store, "a", Thing(name="one"))
    second = commit_once(store, "a", Thing(name="two"))
    assert (first.mine, second.mine) == (True, False)
    assert second.record == fetch(store, "a", Thing) == Thing(name="one")


def test_of_many_commits_at_once_one_is_mine(store):
    with ThreadPoolExecutor(16) as pool:
        commits = list(pool.map(lambda i: commit_once(store, "a", Thing(name=str(i))), range(64)))
    winners = [commit.record for commit in commits if commit.mine]
    assert len(winners) == 1
    assert {commit.record.name for commit in commits} == {winners[0].name}


def test_the_same_commit_twice_is_no_conflict_and_another_names_its_fields(store):
    commit_same(store, "a", Thing(name="one", size=1))
    assert not commit_same(store, "a", Thing(name="one", size=1)).mine
    with pytest.raises(errors.ConflictError, match="differs in size"):
        commit_same(store, "a", Thing(name="one", size=2))


def test_committed_reads_only_what_is_wanted_in_order(store):
    for i in range(300):
        commit_once(store, f"r/{i:05d}", Thing(name=str(i)))
    create(store, "r/x", b"no record")
    found = iterate_records(store, "r/", Thing, wanted=lambda stat: not stat.key.endswith("x"))
    assert [record.name for _, record in found] == [str(i) for i in range(300)]


def test_a_damaged_record_hides_no_other_and_is_named(store):
    for i in range(5):
        commit_once(store, f"r/{i}", Thing(name=str(i)))
    for key, body in (("r/1", b"nonsense"), ("r/3", bytes(Thing.record_bytes + 1))):
        put(store, key, body)
    found = list(iterate_records(store, "r/", Thing, wanted=lambda _: True))
    assert [one.name for _, one in found if isinstance(one, Thing)] == ["0", "2", "4"]
    damaged = {stat.key: str(one) for stat, one in found if isinstance(one, errors.CorruptError)}
    assert damaged.keys() == {"r/1", "r/3"}
    assert all(key in sentence for key, sentence in damaged.items())
    seen = []
    with pytest.raises(errors.CorruptError, match=r"2 of 5 records below here .*r/1 is .*r/3 has "):
        seen.extend(one.name for one in require_intact("here", found))
    assert seen == ["0", "2", "4"]


def test_a_record_that_no_reader_would_accept_is_not_written(store):
    with pytest.raises(errors.ConfigurationError, match=r"a would have 1,048,\d+ bytes"):
        commit_once(store, "a", Thing(name="x" * Thing.record_bytes))
    assert not list(list_objects(store))


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"kind":"thing","version":1,"nonce":"x"}'])
def test_what_is_no_record_is_said(store, body):
    put(store, "a", body)
    with pytest.raises(errors.CorruptError, match="not a record"):
        fetch(store, "a", Thing)


def test_a_record_of_another_kind_or_version_is_refused(store):
    commit_once(store, "a", Thing(name="one"))
    with pytest.raises(errors.CorruptError, match="kind 'other'"):
        fetch(store, "a", Other)
    put(store, "b", b'{"kind":"thing","version":2,"nonce":"x","record":{"name":"a"}}')
    with pytest.raises(errors.CorruptError, match="thing of version 2"):
        fetch(store, "b", Thing)


def test_nothing_there_is_not_found(store):
    with pytest.raises(errors.NotFoundError):
        fetch(store, "none", Thing)


def test_each_kind_of_record_has_one_stable_name():
    for module in pkgutil.walk_packages(millrace.__path__, "millrace."):
        importlib.import_module(module.name)
    kinds = [
        kind.__dict__.get("record_kind", f"{kind.__qualname__} has none")
        for kind in subclasses(Record)
        if kind.__module__.startswith("millrace.")
    ]
    assert sorted(kinds) == [
        "campaign-training",
        "campaign-warming",
        "chain-link",
        "chain-start",
        "checkpoint",
        "checkpoint-epoch",
        "checkpoint-pin",
        "checkpoint-quarantine",
        "checkpoint-share",
        "cooldown-ended",
        "cooldown-late-vote",
        "cooldown-roster",
        "cooldown-vote",
        "dataset-manifest",
        "dataset-plan",
        "lease",
        "partition-end",
        "rental-contract",
        "rental-detached",
        "rental-installation",
        "rental-intent",
        "rental-released",
        "shard-commit",
        "start-window",
        "window-opening",
    ]


def subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


class Hashed(Record):
    record_kind = "hashed"

    digest: OwnDigest


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"digest": "sha256:" + "0" * 64}, "is a digest of sha256, where Millrace writes one of"),
        ({"digest": "md5:" + "0" * 32}, "is a digest of md5, where Millrace writes one of BLAKE3"),
        ({"digest": "0" * 64}, "is a SHA-256 of an earlier version of Millrace"),
        ({"digest": ""}, "is not a digest"),
    ],
)
def test_a_digest_of_another_algorithm_is_refused_with_what_to_do(store, values, what):
    put(store, "a", encode_record(Hashed.model_construct(**values), "nonce"))
    with pytest.raises(errors.CorruptError, match="cannot be used: ") as refusal:
        fetch(store, "a", Hashed)
    assert what in str(refusal.value)
