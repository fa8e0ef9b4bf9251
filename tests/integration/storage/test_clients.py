import io
import secrets
from datetime import UTC, datetime, timedelta

import pyarrow.parquet
import pytest
import webdataset
from pydantic import SecretStr

from millrace import errors
from millrace.deletion import abort_uploads, find_stale_uploads
from millrace.storage import (
    Right,
    Store,
    delete,
    exists,
    list_objects,
    make_boto3_client,
    open_filesystem,
    open_scoped_store,
    open_store,
    open_writer,
    put,
    read,
)
from millrace.storage.webdataset_urls import register_store
from tests.stores import make_spec


def abort_before(store: Store, when: datetime, prefix: str = "") -> list[str]:
    """Abort the unfinished uploads that were started before a time, and return their keys."""
    found = find_stale_uploads(store, when, prefix=prefix)
    return [one.key for one in abort_uploads(store, found).successes]


def tar_of(texts: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with webdataset.TarWriter(target, encoder=False) as writer:
        for key, text in texts.items():
            writer.write({"__key__": key, "txt": text})
    return target.getvalue()


# webdataset leaves a local file for the garbage collector to close.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["local", "rgw", "r2"])
def test_webdataset_reads_shards_straight_from_a_private_bucket(kind, request):
    store = open_store(make_spec(kind, request))
    texts = {f"k{i}": secrets.token_bytes(50_000) for i in range(60)}
    key = "a b/shard-000000.tar" if kind == "local" else "a b/50%41 #1-000000.tar"
    put(store, key, tar_of(texts))
    register_store(store)
    samples = webdataset.WebDataset([store.make_url(key)], shardshuffle=False, empty_check=True)
    assert {s["__key__"]: s["txt"] for s in samples} == texts


def test_webdataset_is_not_opened_a_store_that_nobody_registered(request):
    store = open_store(make_spec("rgw", request))
    register_store(store)
    with pytest.raises(errors.ConfigurationError, match="register"):
        list(webdataset.WebDataset(["s3://other/a.tar"], shardshuffle=False))


@pytest.mark.parametrize("kind", ["local", "rgw", "r2"])
def test_pyarrow_reads_and_writes_through_the_same_credentials(kind, request):
    store = open_store(make_spec(kind, request))
    files, folder = open_filesystem(store)
    table = pyarrow.table({"a": list(range(1000))})
    pyarrow.parquet.write_table(table, f"{folder}/t.parquet", filesystem=files)
    assert pyarrow.parquet.read_table(f"{folder}/t.parquet", filesystem=files) == table
    assert [stat.key for stat in list_objects(store)] == ["t.parquet"]


@pytest.mark.parametrize("kind", ["rgw", "r2"])
def test_uploads_that_were_never_finished_are_aborted_by_age(kind, request):
    store = open_store(make_spec(kind, request))
    client = make_boto3_client(store)
    bucket = store.location.bucket
    begun = client.create_multipart_upload(Bucket=bucket, Key="below/here/a/half")
    assert begun["UploadId"]
    now = datetime.now(UTC)
    assert abort_before(store, now - timedelta(days=1)) == []
    assert abort_before(store, now + timedelta(days=1), prefix="b") == []
    assert abort_before(store, now + timedelta(days=1)) == ["a/half"]
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


def test_the_halves_of_a_killed_process_are_removed_from_a_folder(tmp_path):
    store = open_store(tmp_path.as_uri())
    put(store, "a/b", b"whole")
    (tmp_path / "a" / "b#1").write_bytes(b"half")
    (tmp_path / "a" / "b#x").write_bytes(b"not ours")
    assert abort_before(store, datetime.now(UTC) + timedelta(days=1)) == ["a/b"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["b", "b#x"]


class TestScopedR2:
    @pytest.fixture
    def store(self, request):
        return open_store(make_spec("r2", request))

    def test_a_reader_reaches_its_prefix_and_nothing_else(self, store):
        put(store, "mine/a", b"mine")
        put(store, "other/a", b"other")
        reader = open_scoped_store(store, "mine/", timedelta(minutes=5))
        assert read(reader, "mine/a") == b"mine"
        assert [stat.key for stat in list_objects(reader, "mine/")] == ["mine/a"]
        for refused in (
            lambda: read(reader, "other/a"),
            lambda: put(reader, "mine/b", b""),
            lambda: list(list_objects(reader, "other/")),
        ):
            with pytest.raises(errors.DeniedError):
                refused()

    def test_a_writer_writes_below_its_prefix_only(self, store):
        writer = open_scoped_store(store, "mine/", timedelta(minutes=5), access=Right.WRITE)
        put(writer, "mine/a", b"mine")
        assert read(store, "mine/a") == b"mine"
        with pytest.raises(errors.DeniedError):
            put(writer, "other/a", b"")
        assert not exists(store, "other/a")

    def test_it_ends_when_it_says(self, store):
        ends = open_scoped_store(store, "mine/", timedelta(seconds=30)).spec.credentials.expires_at
        assert timedelta(0) < ends - datetime.now(UTC) <= timedelta(seconds=30)


def test_an_s3_store_is_scoped_by_sts(request, rgw):
    store = open_store(make_spec("rgw", request))
    put(store, "mine/a", b"mine")
    put(store, "other/a", b"other")
    role = rgw.create_role(f"role-{secrets.token_hex(4)}")
    reader = open_scoped_store(store, "mine/", timedelta(minutes=15), role_arn=role)
    assert read(reader, "mine/a") == b"mine"
    writer = open_scoped_store(
        store, "mine/", timedelta(minutes=15), access=Right.WRITE, role_arn=role
    )
    put(writer, "mine/c", b"")
    assert delete(writer, ["mine/c"]) == []
    assert not exists(store, "mine/c")
    assert [failure.key for failure in delete(writer, ["other/a"])] == ["other/a"]
    for refused in (lambda: read(reader, "other/a"), lambda: put(reader, "mine/b", b"")):
        with pytest.raises(errors.DeniedError):
            refused()


@pytest.mark.parametrize(
    ("prefix", "ttl", "said"),
    [("", timedelta(hours=1), "Name at least one"), ("a/", timedelta(days=8), "7 days")],
)
def test_a_scope_without_bounds_is_refused(prefix, ttl, said, request):
    store = open_store(make_spec("memory", request))
    with pytest.raises(errors.ConfigurationError, match=said):
        open_scoped_store(store, prefix, ttl)


def test_scoped_secrets_do_not_print(request):
    store = open_scoped_store(open_store(make_spec("r2", request)), "a/", timedelta(hours=1))
    secret = store.spec.credentials.secret_access_key
    assert isinstance(secret, SecretStr)
    assert secret.get_secret_value() not in repr(store)


def test_credentials_that_are_given_are_not_mixed_with_the_environments(request, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-of-another-account")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    for kind in ("rgw", "r2"):
        store = open_store(make_spec(kind, request))
        put(store, "a", b"data")
        assert read(store, "a") == b"data"


def test_a_writer_that_fails_leaves_the_uploads_of_other_programs_alone(request):
    store = open_store(make_spec("rgw", request))
    client = make_boto3_client(store)
    keys = ["below/here/x1", "below/here/x10"]
    theirs = [client.create_multipart_upload(Bucket=store.location.bucket, Key=key) for key in keys]

    def fail() -> None:
        with open_writer(store, "x1", part_size=5 << 20) as writer:
            writer.write(bytes(12 << 20))
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        fail()
    left = client.list_multipart_uploads(Bucket=store.location.bucket)["Uploads"]
    assert [upload["UploadId"] for upload in left] == [upload["UploadId"] for upload in theirs]
