"""Contract of every store: the same tests for each kind of URL, and for the asynchronous twins."""

import contextlib
import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from pydantic import SecretStr

from millrace import errors, storage
from millrace.digest import hash_blocks
from millrace.storage import (
    Backend,
    Credentials,
    Store,
    StoreSpec,
    asynchronous,
    copy,
    create,
    delete,
    describe_difference,
    exists,
    head,
    list_fairly,
    list_folders,
    list_objects,
    list_uploads,
    open_store,
    open_writer,
    put,
    read,
    read_and_hash,
    read_range,
    read_views_and_hash,
    stream,
)
from tests.oracle import compute_blake3
from tests.stores import make_spec
from tests.support.event_loops import EventLoopThread

pytestmark = pytest.mark.contract

MIB = 1 << 20
LARGE = 256 << 10
"""Bytes from which on Millrace signs a body by itself, and obstore does not."""


@pytest.fixture(params=["local", "memory", "rgw", "r2", "gcs"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    return open_store(make_spec(request.param, request))


@pytest.fixture(params=["plain", "asynchronous"], autouse=True)
def verbs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the tests call the verbs, or their asynchronous twins under the same names."""
    if request.param == "plain":
        yield
        return
    with EventLoopThread() as loop:
        for name in globals().keys() & vars(asynchronous).keys() & {*storage.__all__}:
            monkeypatch.setitem(globals(), name, loop.wrap(getattr(asynchronous, name)))
        yield


def keys_of(store: Store, prefix: str = "", after: str = "") -> list[str]:
    return sorted(stat.key for stat in list_objects(store, prefix, after=after))


def test_what_is_put_is_read_back_whole_and_by_range(store):
    data = secrets.token_bytes(100_000)
    put(store, "a/b c+ü.bin", data)
    assert read(store, "a/b c+ü.bin") == data
    assert read_range(store, "a/b c+ü.bin", 10, 20) == data[10:20]
    assert read_range(store, "a/b c+ü.bin", 99_990, 200_000) == data[99_990:]
    assert read_range(store, "a/b c+ü.bin", 5, 5) == b""
    buffer = bytearray(100_001)
    target = memoryview(buffer)[: len(data)]
    assert read_and_hash(store, "a/b c+ü.bin", [target], size=len(data)) == hash_blocks(data)
    assert bytes(buffer) == data + b"\0"
    small = bytearray(10)
    assert read_and_hash(store, "a/b c+ü.bin", [memoryview(small)], size=len(small)) == b""
    assert not any(small)


def test_a_range_is_read_into_several_buffers_and_its_blocks_are_hashed(store):
    data = secrets.token_bytes((3 << 20) + 5)
    put(store, "large.bin", data)
    for start, count in ((0, len(data)), (1 << 20, 1 << 20), (2 << 20, (1 << 20) + 5)):
        memory = bytearray(count)
        cuts = [0, 1, 70_000, min(count, (1 << 20) + 3), count]
        buffers = [memoryview(memory)[a:b] for a, b in pairwise(cuts)]
        blocks = read_and_hash(store, "large.bin", buffers, size=len(data), start=start)
        assert memory == data[start : start + count]
        assert blocks == hash_blocks(data[start : start + count])
    buffer = memoryview(bytearray(1 << 20))
    for size in (len(data) - 1, len(data) + 1):
        assert read_and_hash(store, "large.bin", [buffer], size=size) == b""
    with pytest.raises(errors.NotFoundError):
        read_and_hash(store, "missing", [buffer], size=1 << 20)


def test_a_range_is_read_where_it_arrives_and_its_blocks_are_hashed(store):
    data = secrets.token_bytes((3 << 20) + 5)
    put(store, "large.bin", data)
    for start, end in ((0, len(data)), (1 << 20, 2 << 20), (2 << 20, len(data)), (0, 1)):
        views, blocks = read_views_and_hash(store, "large.bin", start, end, size=len(data))
        assert b"".join(views) == data[start:end]
        assert blocks == hash_blocks(data[start:end])
    for size in (len(data) - 1, len(data) + 1):
        assert read_views_and_hash(store, "large.bin", 0, 1 << 20, size=size) == ([], b"")
    with pytest.raises(errors.NotFoundError):
        read_views_and_hash(store, "missing", 0, 1 << 20, size=1 << 20)


def test_a_file_of_more_buffers_than_one_read_takes_is_hashed(tmp_path):
    store = open_store(StoreSpec(url=tmp_path.as_uri()))
    data = secrets.token_bytes(5000)
    put(store, "a", data)
    buffers = [memoryview(bytearray(1)) for _ in data]
    assert read_and_hash(store, "a", buffers, size=len(data)) == hash_blocks(data)
    assert b"".join(buffers) == data


def test_a_range_behind_the_end_is_an_error_at_once(store):
    put(store, "short", b"1234")
    with pytest.raises(errors.CorruptError, match="short ends before the requested range"):
        read_range(store, "short", 4, 8)


def test_a_buffer_may_be_used_again_once_it_was_written(store):
    buffer = bytearray(b"first")
    put(store, "put", memoryview(buffer))
    create(store, "create", memoryview(buffer))
    large = bytearray(b"first") * LARGE
    put(store, "put large", memoryview(large))
    create(store, "create large", memoryview(large))
    buffer[:], large[:] = b"later", b"later" * LARGE
    assert read(store, "put") == read(store, "create") == b"first"
    assert read(store, "put large") == read(store, "create large") == b"first" * LARGE


def test_a_put_replaces_what_was_there(store):
    put(store, "a", b"one")
    put(store, "a", memoryview(bytearray(b"two")))
    assert read(store, "a") == b"two"
    put(store, "a", memoryview(bytearray(b"three" * LARGE)))
    assert read(store, "a") == b"three" * LARGE


def test_an_empty_object_is_an_object(store):
    put(store, "empty", b"")
    assert exists(store, "empty")
    assert read(store, "empty") == b""
    assert list(stream(store, "empty")) == []


def test_what_is_not_there_is_said(store):
    assert not exists(store, "none")
    for verb in (head, read):
        with pytest.raises(errors.NotFoundError, match="none"):
            verb(store, "none")
    with pytest.raises(errors.NotFoundError):
        list(stream(store, "none"))
    with pytest.raises(errors.NotFoundError):
        copy(store, "none", "other")


def test_head_tells_size_etag_and_the_stores_time(store):
    put(store, "a", b"12345")
    before = head(store, "a")
    assert (before.key, before.size) == ("a", 5)
    assert before.last_modified.tzinfo is not None
    put(store, "a", b"123456")
    assert head(store, "a").etag != before.etag


@pytest.fixture(params=["small", "large"])
def make_body(request: pytest.FixtureRequest) -> Callable[[bytes], bytes]:
    """Return a body that obstore sends, or one that Millrace sends by itself."""
    return (lambda data: data) if request.param == "small" else (lambda data: data.ljust(LARGE))


def test_create_wins_once_and_keeps_the_first(store, make_body):
    create(store, "a/b c+ü~'(1)*.bin", make_body(b"first"))
    with pytest.raises(errors.ExistsError, match="b c"):
        create(store, "a/b c+ü~'(1)*.bin", make_body(b"second"))
    assert read(store, "a/b c+ü~'(1)*.bin") == make_body(b"first")


def test_a_create_that_is_called_off_leaves_nothing(store, make_body):
    data, asked = secrets.token_bytes(5 * MIB), 0

    def later() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(errors.StoppedError):
        create(store, "off", data, is_stopped=lambda: True)
    with contextlib.suppress(errors.StoppedError):  # or it was sent in one go
        create(store, "later", data, is_stopped=later)
    assert not exists(store, "off")
    assert exists(store, "later") == (asked <= 3)
    create(store, "off", make_body(b"1"))  # the connections are as good as before
    assert read(store, "off") == make_body(b"1")


def test_an_object_is_compared_with_what_was_written(store):
    put(store, "same", b"1234")
    assert describe_difference(store, "same", 4) == ""
    digests = [compute_blake3(b"1234"), f"sha256:{hashlib.sha256(b'1234').hexdigest()}"]
    for digest in digests:
        assert describe_difference(store, "same", 4, digest) == ""
        assert describe_difference(store, "same", 5, digest) == "4 bytes, not 5"
        assert describe_difference(store, "gone", 4, digest) == "missing"
    put(store, "same", b"1235")
    assert describe_difference(store, "same", 4) == ""
    for digest in digests:
        assert "the digest differs" in describe_difference(store, "same", 4, digest)


def test_a_large_object_is_created_whole(store):
    data = secrets.token_bytes(5 * MIB + 7)
    create(store, "large", data)
    create(store, "empty", b"")
    create(store, "empty too", b"", is_stopped=lambda: False)
    assert read(store, "large") == data
    assert read(store, "empty") == read(store, "empty too") == b""


@pytest.mark.parametrize("size", [LARGE - 1, LARGE, LARGE + 1])
def test_a_body_is_whole_whoever_sends_it(store, size):
    data = secrets.token_bytes(size)
    create(store, "created", data)
    put(store, "put", data)
    assert read(store, "created") == read(store, "put") == data


def test_of_many_creates_at_once_one_wins(store, make_body):
    def attempt(i: int) -> bool:
        try:
            create(store, "race", make_body(str(i).encode()))
        except errors.ExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = [i for i, mine in enumerate(pool.map(attempt, range(8))) if mine]
    assert len(won) == 1
    assert read(store, "race") == make_body(str(won[0]).encode())


def test_another_content_than_the_one_meant_is_refused(store):
    put(store, "a", b"one")
    etag = head(store, "a").etag
    assert read(store, "a", etag=etag) == b"one"
    put(store, "a", b"twotwo")
    with pytest.raises(errors.ChangedError):
        read(store, "a", etag=etag)
    with pytest.raises(errors.ChangedError):
        read_range(store, "a", 0, 2, etag=etag)
    with pytest.raises(errors.ChangedError):
        list(stream(store, "a", etag=etag))


def test_a_stream_is_the_object_in_order(store):
    data = secrets.token_bytes(3 * MIB + 17)
    put(store, "a", data)
    assert b"".join(stream(store, "a", block_size=MIB, prefetch=3)) == data
    assert (
        b"".join(stream(store, "a", start=100, end=2 * MIB, block_size=MIB)) == data[100 : 2 * MIB]
    )


def test_a_stream_that_is_left_early_ends(store):
    put(store, "a", bytes(4 * MIB))
    blocks = stream(store, "a", block_size=MIB)
    assert len(next(blocks)) == MIB
    blocks.close()


def test_a_writer_publishes_when_it_ends_and_not_before(store):
    data = secrets.token_bytes(23 * MIB)
    with open_writer(store, "big", part_size=5 * MIB) as writer:
        for start in range(0, len(data), 3 * MIB):
            writer.write(data[start : start + 3 * MIB])
        assert not exists(store, "big")
    assert read(store, "big") == data


def test_a_writer_that_fails_publishes_nothing_and_leaves_nothing(store):
    def fail() -> None:
        with open_writer(store, "half", part_size=5 * MIB) as writer:
            writer.write(bytes(12 * MIB))
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        fail()
    assert not exists(store, "half")
    assert keys_of(store) == []
    assert list(list_uploads(store)) == []


def test_a_writer_that_fails_leaves_other_writers_of_its_key_alone(store):
    data = secrets.token_bytes(12 * MIB)

    def fail() -> None:
        with open_writer(store, "shared", part_size=5 * MIB) as writer:
            writer.write(bytes(12 * MIB))
            raise ValueError("enough")

    with open_writer(store, "shared", part_size=5 * MIB) as writer:
        writer.write(data)
        with pytest.raises(ValueError, match="enough"):
            fail()
    assert read(store, "shared") == data
    assert list(list_uploads(store)) == []


def test_listing_takes_any_text_as_a_prefix(store):
    for key in ("a/b", "a/b-1", "a/b/c", "a/c", "ab", "b"):
        if not (key == "a/b/c" and store.location.backend is Backend.FILE):
            put(store, key, key.encode())
    deeper = [] if store.location.backend is Backend.FILE else ["a/b/c"]
    assert keys_of(store, "a/b") == ["a/b", "a/b-1", *deeper]
    assert keys_of(store, "a/") == ["a/b", "a/b-1", *deeper, "a/c"]
    assert keys_of(store, "a") == ["a/b", "a/b-1", *deeper, "a/c", "ab"]
    assert keys_of(store) == ["a/b", "a/b-1", *deeper, "a/c", "ab", "b"]
    assert keys_of(store, "x/y") == []
    assert keys_of(store, after="a/c") == ["ab", "b"]


def test_a_listing_goes_over_its_pages(store):
    keys = [f"many/{i:05d}" for i in range(2100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: put(store, key, b""), keys))
    assert keys_of(store, "many/") == keys
    assert delete(store, keys) == []
    assert keys_of(store) == []


def test_folders_are_named_without_what_is_in_them(store):
    for key in ("one/a", "one/b/c", "two/a", "file"):
        put(store, key, b"")
    assert sorted(list_folders(store)) == ["one", "two"]
    assert list_folders(store, "one/") == ["b"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_with_many_objects_makes_a_fair_listing_no_longer(store, depth):
    owners = [f"{name}/" * depth for name in ("w1", "w10", "w2")]
    own = [f"run/{owner}{number}" for owner in owners for number in range(3)]
    for key in [*own, *(f"run/{owners[1]}x/{number:03d}" for number in range(40)), "run/z"]:
        put(store, key, b"")
    found = [stat.key for stat in list_fairly(store, "run/", depth=depth, limit=5)]
    assert len(found) == 3 + 5 + 3 + 1
    assert set(found) >= {key for key in own if not key.startswith(f"run/{owners[1]}")} | {"run/z"}


def test_deleting_what_is_gone_is_a_success(store):
    put(store, "a", b"")
    assert delete(store, ["a", "never/there"]) == []
    assert not exists(store, "a")


def test_a_copy_is_the_same_bytes(store):
    put(store, "a", b"data")
    copy(store, "a", "b/c")
    assert read(store, "b/c") == b"data"


def test_a_copy_that_is_made_again_leaves_nothing_else(store):
    put(store, "a", b"data")
    for _ in range(3):
        copy(store, "a", "b")
    assert keys_of(store) == ["a", "b"]
    assert list(list_uploads(store)) == []
    put(store, "a", b"new")
    assert read(store, "b") == b"data"
    copy(store, "a", "b")
    assert read(store, "b") == b"new"


@pytest.mark.parametrize("prefix", ["0", "a/0", "a/00", "a/-0"])
def test_listing_takes_a_prefix_that_ends_in_a_zero(store, prefix):
    """Right before a zero comes the slash, which no part of a key has."""
    for key in ("-", "0", "00", "1", "a/-0b", "a/0", "a/00", "a/0b", "a/1", "a/b"):
        put(store, key, b"")
    found = [stat.key for stat in list_objects(store, prefix)]
    everything = [stat.key for stat in list_objects(store)]
    assert found
    assert sorted(found) == sorted(key for key in everything if key.startswith(prefix))


def test_keys_do_not_escape_the_stores_prefix(store):
    below = "" if store.location.backend is Backend.MEMORY else "/in/side"  # it has no prefix
    inner = open_store(store.spec.model_copy(update={"url": f"{store.spec.url}{below}"}))
    for key in ("../out", "a/../../out", "/../out"):
        for write, body in itertools.product((put, create), (b"", bytes(LARGE))):
            with pytest.raises(errors.ConfigurationError, match="is invalid"):
                write(inner, key, body)
    put(inner, "a", b"1")
    assert keys_of(store) == [f"{below}/a"[1:]]


def make_calls(store: Store, key: str) -> dict[str, Callable[[], object]]:
    """Return a call of each verb that takes one key."""
    return {
        "put": lambda: put(store, key, b"2"),
        "put a large body": lambda: put(store, key, bytes(LARGE)),
        "create": lambda: create(store, key, b"2"),
        "create a large body": lambda: create(store, key, bytes(LARGE)),
        "write": lambda: write_streamed(store, key),
        "copy from": lambda: copy(store, key, "b"),
        "copy to": lambda: copy(store, "a", key),
        "head": lambda: head(store, key),
        "exists": lambda: exists(store, key),
        "read": lambda: read(store, key),
        "read a range": lambda: read_range(store, key, 0, 1),
        "hash": lambda: read_and_hash(store, key, [memoryview(bytearray(1))], size=1),
        "read views": lambda: read_views_and_hash(store, key, 0, 1, size=1),
        "stream": lambda: list(stream(store, key)),
    }


def write_streamed(store: Store, key: str) -> None:
    with open_writer(store, key) as writer:
        writer.write(b"2")


@pytest.mark.parametrize("key", ["/a", "a/", "/a/", "", "/", "./a", "a\tb", "k" * 1025, "\udcff"])
def test_a_key_that_would_be_another_object_is_refused_at_once(store, key):
    put(store, "a", b"1")
    for name, call in make_calls(store, key).items():
        with pytest.raises(errors.ConfigurationError, match="is invalid") as refused:
            call()
        assert len(str(refused.value)) < 600, name
    assert (keys_of(store), read(store, "a")) == (["a"], b"1")


@pytest.mark.parametrize("key", ["/a", "a/", "/a/", ""])
def test_to_delete_a_key_with_slashes_leaves_the_key_without_them(store, key):
    put(store, "a", b"1")
    failed = [failure.key for failure in delete(store, [key, "b"])]
    # S3 deletes the exact key, and so does Google if the key ends in a slash.
    is_exact = store.is_s3_compatible or (store.location.backend is Backend.GS and key[-1:] == "/")
    assert failed == ([] if is_exact else [key])
    assert keys_of(store) == ["a"]


def test_one_text_is_no_list_of_keys_to_delete(store):
    put(store, "k", b"1")
    put(store, "x", b"1")
    with pytest.raises(errors.ConfigurationError, match=r"delete\(store, \[key\]\)"):
        delete(store, "kx")
    assert keys_of(store) == ["k", "x"]


@pytest.mark.parametrize("kind", ["rgw", "r2"])
class TestRights:
    def test_a_read_only_key_reads_and_may_not_write(self, kind, request):
        full = open_store(make_spec(kind, request))
        put(full, "a", b"data")
        reader = open_store(make_spec(kind, request, "read_only"))
        assert read(reader, "a") == b"data"
        for write, size in itertools.product((put, create), (1, 5 * MIB)):
            with pytest.raises(errors.DeniedError, match="refuses these credentials"):
                write(reader, "b", bytes(size))
        with pytest.raises(errors.DeniedError, match="may list this bucket, but not write") as said:
            write_streamed(reader, "b")
        assert "<" not in str(said.value)
        assert [failure.key for failure in delete(reader, ["a"])] == ["a"]
        assert exists(full, "a")

    def test_a_wrong_secret_is_refused_without_a_word_of_it(self, kind, request):
        spec = make_spec(kind, request)
        wrong = Credentials(
            access_key_id=spec.credentials.access_key_id, secret_access_key=SecretStr("wrong" * 8)
        )
        store = open_store(spec.model_copy(update={"credentials": wrong}))
        with pytest.raises(errors.DeniedError) as refusal:
            read(store, "a")
        assert "wrong" * 8 not in f"{refusal.value}{refusal.value!r}{store!r}"

    def test_a_bucket_that_is_not_there_is_said(self, kind, request):
        spec = make_spec(kind, request)
        bucket = request.getfixturevalue("bucket")
        store = open_store(spec.model_copy(update={"url": spec.url.replace(bucket, "no-such")}))
        for size in (0, LARGE):
            with pytest.raises(errors.NotFoundError, match=r"no-such.*: there is no such bucket"):
                create(store, "a", bytes(size))
            with pytest.raises(errors.NotFoundError, match=r"no-such.*: there is no such bucket"):
                put(store, "a", bytes(size))


def test_rgws_own_log_shows_the_requests(request, rgw):
    store = open_store(make_spec("rgw", request))
    key = f"seen-{secrets.token_hex(8)}"
    put(store, key, b"data")
    assert any(key in line and "PUT" in line for line in rgw.list_requests())
