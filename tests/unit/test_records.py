import importlib
import json
import pkgutil
import secrets
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

import millrace
from millrace import errors
from millrace.digest import OwnDigest, dump_canonical_json
from millrace.records import (
    PART_CONFIG,
    JsonObject,
    Record,
    commit_once,
    commit_same,
    decode_record,
    encode_record,
    fetch,
    is_stored,
    iterate_records,
    require_intact,
)
from millrace.schemas.checkpoint import EpochRecord, LateVote, RankShare, Roster, Vote
from millrace.schemas.gradient import StartWindow
from millrace.schemas.registration import Registration
from millrace.storage import create, list_objects, open_store, put


class Thing(Record):
    record_kind = "thing"

    name: str
    size: int = 0


class Other(Record):
    record_kind = "other"

    name: str


class Bag(Record):
    record_kind = "bag"

    content: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class Item:
    name: str
    size: int = 0
    inside: tuple["Item", ...] = ()


class ItemList(Record):
    record_kind = "item-list"
    record_items = "many"
    record_bytes = 64 << 20

    after: str = ""
    before: JsonObject = Field(default_factory=dict)
    many: tuple[Item, ...]
    others: JsonObject = Field(default_factory=dict)


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
    put(store, "c", b'{"kind":"thing","version":1,"nonce":"x","record":{"name":"a","new":1}}')
    with pytest.raises(errors.VersionError, match="a later version wrote it"):
        fetch(store, "c", Thing)
    put(store, "d", b'{"kind":"thing","version":1,"nonce":"x","record":{"name":1,"new":1}}')
    with pytest.raises(errors.CorruptError, match="not a record") as found:
        fetch(store, "d", Thing)
    assert not isinstance(found.value, errors.VersionError)


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
        "dataset-card",
        "dataset-manifest",
        "dataset-plan",
        "lease",
        "page-index",
        "partition-end",
        "rental-contract",
        "rental-detached",
        "rental-installation",
        "rental-intent",
        "rental-raised",
        "rental-released",
        "seek-point",
        "shard-commit",
        "start-window",
        "window-opening",
        "window-scores",
        "worker-registration",
    ]


@pytest.mark.parametrize(
    "kind", [EpochRecord, LateVote, RankShare, Registration, Roster, StartWindow, Vote]
)
def test_every_integer_that_a_peer_writes_can_be_encoded_again(kind):
    integers = list(list_integers(kind.model_json_schema()))
    assert [one for one in integers if not {"minimum", "exclusiveMinimum"} & {*one}] == []
    assert [one for one in integers if not {"maximum", "exclusiveMaximum"} & {*one}] == []


def list_integers(schema):
    if isinstance(schema, dict) and schema.get("type") == "integer":
        yield schema
    elif isinstance(schema, dict | list):
        for one in schema.values() if isinstance(schema, dict) else schema:
            yield from list_integers(one)


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


def fill_bag(content: bytes) -> bytes:
    return b'{"kind":"bag","version":1,"nonce":"x","record":{"content":%s}}' % content


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"a":[' + b"[]," * 40_000 + b"[]]}", "40,00[0-9] JSON objects and arrays"),
        (b'{"a":[' + b"{}," * 40_000 + b"{}]}", "40,00[0-9] JSON objects and arrays"),
        (b"{" + b'"a":0,' * 60_000 + b'"b":0}', "60,00[0-9] colons"),
        (b'{"a":[' + b"0," * 200_000 + b"0]}", "200,00[0-9] commas"),
        (b"[" * 100_000, "100,00[0-9] JSON objects and arrays"),
    ],
    ids=["lists", "dicts", "keys", "numbers", "nesting"],
)
def test_a_record_of_many_small_values_is_refused_before_it_is_parsed(
    store, monkeypatch, content, what
):
    put(store, "a", fill_bag(content))
    monkeypatch.setattr("orjson.loads", lambda body: pytest.fail("parsed"))
    with pytest.raises(errors.CorruptError, match=rf"/a has {what} .*Look at the object"):
        fetch(store, "a", Bag)


def test_a_record_of_many_small_values_is_not_written(store):
    for content in ({"a": [[]] * 40_000}, {"a": [0] * 200_000}):
        with pytest.raises(errors.ConfigurationError, match=r"a would have .*Nothing was written"):
            commit_once(store, "a", Bag(content=content))
    assert not list(list_objects(store))


def test_a_record_is_parsed_once(store, monkeypatch):
    commit_once(store, "a", Bag(content={"a": [1, {"b": None}]}))
    wrong = "parsed or encoded again"
    monkeypatch.setattr("orjson.dumps", lambda *given, **more: pytest.fail(wrong))
    monkeypatch.setattr(Bag, "model_validate_json", lambda *given: pytest.fail(wrong))
    assert fetch(store, "a", Bag).content == {"a": [1, {"b": None}]}


@pytest.mark.parametrize("depth", [101, 300, 1000])
def test_a_value_that_is_nested_too_deeply_is_refused(store, depth):
    put(store, "a", fill_bag(b'{"a":' + b"[" * depth + b"]" * depth + b"}"))
    with pytest.raises(errors.CorruptError):
        fetch(store, "a", Bag)


def test_a_value_of_the_largest_depth_is_read_again(store):
    content = {}
    for _ in range(99):
        content = {"a": content}
    commit_once(store, "a", Bag(content=content))
    assert fetch(store, "a", Bag).content == content


@pytest.mark.parametrize("field", ["kind", "version", "nonce"])
def test_nested_lists_instead_of_a_kind_a_version_or_a_nonce_are_refused(store, field):
    envelope = {"kind": b'"thing"', "version": b"1", "nonce": b'"x"', "record": b'{"name":"a"}'}
    envelope[field] = b"[" * 1020 + b"]" * 1020
    body = b",".join(b'"%s":%s' % (name.encode(), value) for name, value in envelope.items())
    put(store, "a", b"{" + body + b"}")
    with pytest.raises(errors.CorruptError, match="not a record"):
        fetch(store, "a", Thing)


def test_an_error_about_a_damaged_record_keeps_nothing_of_the_record():
    with pytest.raises(errors.CorruptError) as refusal:
        decode_record("there", Thing, b'{"kind":"thing","version":1,"nonce":"x","record":{"a":1}}')
    assert refusal.value.__cause__ is None
    assert refusal.value.__context__ is None


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500])
def test_a_record_of_many_items_has_the_same_canonical_bytes(count):
    many = tuple(Item(name=f"n{number}", size=number) for number in range(count))
    record = ItemList(many=many, before={"many": [{"name": "x"}]}, others={"many": [1]})
    envelope = {"kind": "item-list", "nonce": "x", "record": record.model_dump(mode="json")}
    assert encode_record(record, "x") == dump_canonical_json(envelope | {"version": 1})


TEXTS = ["plain", '"},{"inside":', '\\"},{\\"inside":[', "},{", "\\", "],[", '{"many":[{"inside":']


@pytest.mark.parametrize("others", [{}, {"many": [{"inside": 1}]}], ids=["alone", "twice"])
@pytest.mark.parametrize("has_inner", [False, True])
@pytest.mark.parametrize("batch", [1, 50, 1000, 1 << 20])
def test_items_are_decoded_in_batches_of_any_size(monkeypatch, batch, has_inner, others):
    monkeypatch.setattr("millrace.records._BATCH_BYTES", batch)
    inside = (Item(name="a"), Item(name="b")) if has_inner else ()
    many = tuple(Item(name=text, size=n, inside=inside) for n, text in enumerate(TEXTS * 5))
    record = ItemList(many=many, after="a", others=others)
    for body in (encode_record(record, "x"), json.dumps(json.loads(encode_record(record, "x")))):
        data = body if isinstance(body, bytes) else body.encode()
        assert decode_record("here", ItemList, data) == (record, "x")


@pytest.mark.parametrize("at", [200, 2000, -300, -20])
def test_a_damaged_record_of_many_items_is_refused(monkeypatch, at):
    monkeypatch.setattr("millrace.records._BATCH_BYTES", 100)
    body = bytearray(encode_record(ItemList(many=tuple(Item(name=str(n)) for n in range(99))), "x"))
    at = body.index(b'"', at % len(body))
    for damaged in (body[:at], body[:at] + body[at + 1 :], body[:at] + b'"z":0,' + body[at:]):
        with pytest.raises(errors.CorruptError, match=r"not a record|a later version wrote it"):
            decode_record("here", ItemList, bytes(damaged))


def test_few_objects_of_a_record_of_many_items_are_parsed_at_once():
    many = tuple(Item(name=f"{number:09d}", size=number) for number in range(50_000))
    body = encode_record(ItemList(many=many), "x")
    expected = ItemList(many=many)
    del many
    tracemalloc.start()
    record, _ = decode_record("here", ItemList, body)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record == expected
    assert most - kept < 4 * len(body)  # all JSON objects at once take six times the bytes


def test_a_stored_record_is_compared_without_parsing_it(store, monkeypatch):
    record = ItemList(many=(Item(name="a"), Item(name="b", size=2)))
    commit_once(store, "a", record)
    put(store, "b", json.dumps(json.loads(encode_record(record, "x")), indent=1).encode())
    put(store, "c", b"nonsense")
    assert is_stored(store, "b", record)  # other bytes of the same record
    assert not is_stored(store, "a", ItemList(many=(Item(name="a"),)))
    assert not is_stored(store, "a", ItemList(many=(*record.many, Item(name="c"))))
    with pytest.raises(errors.NotFoundError):
        is_stored(store, "none", record)
    with pytest.raises(errors.CorruptError):
        is_stored(store, "c", record)
    monkeypatch.setattr("orjson.loads", lambda body: pytest.fail("parsed"))
    assert is_stored(store, "a", record)
