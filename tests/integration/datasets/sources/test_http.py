"""Files behind HTTP, from a real server on this machine that behaves as it is told."""

import gzip
import ipaddress
import json
import random
import ssl
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
import zstandard
from pydantic import SecretStr

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets import SourceLocation, preflight_dataset
from millrace.datasets.plan import commit_plan, make_plan
from millrace.datasets.progress_events import ShardCommitted
from millrace.datasets.sources import compressed, http_files, open_files
from millrace.datasets.sources.files import Patterns
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import FileRef
from millrace.storage import StoreSpec, open_store
from millrace.testing.tls import make_certificates
from tests.oracle import Folder
from tests.support.flows.fixtures import make_jsonl, make_texts, read_texts
from tests.support.web import Site, serve

HOUR = "Thu, 01 Jan 2026 00:00:00 GMT"


@pytest.fixture
def site() -> Iterator[Site]:
    with serve(Site()) as site:
        yield site


@pytest.fixture
def other() -> Iterator[Site]:
    with serve(Site()) as other:
        yield other


def open_site(site: Site, paths=None, *, private=True, retry=5.0, **options):
    spec = StoreSpec(
        url=site.url + "/data", retry_timeout=timedelta(seconds=retry),
        options={name: SecretStr(value) for name, value in options.items()},
    )  # fmt: skip
    return open_files(spec, paths=paths or ["a.jsonl"], allow_private=private)


def read_all(files) -> bytes:
    table = files.collect(Patterns())
    path, size, etag = table.rows[0].split(b"\0")
    file = FileRef(path=path.decode(), size=int(size), etag=etag.decode())
    return b"".join(files.iterate_blocks(file, 0, file.size, block=7))


def make_settings(site: Site, tmp_path, *, workers=2, **source) -> PipelineSettings:
    chosen = {"url": site.url + "/data", "paths": ["a.jsonl", "b c.jsonl"], "allow_private": True}
    return PipelineSettings(
        dataset="words",
        source=SourceLocation(**(chosen | source), columns={"txt": "text"}),
        store=StoreSpec(url=(tmp_path / "out").as_uri()),
        sharding={"shard_bytes": 65536, "partition_bytes": 100_000},
        execution={"workers": workers},
    )


@pytest.mark.parametrize("has_ranges", [True, False])
def test_every_row_of_named_files_becomes_a_sample(site, tmp_path, has_ranges):
    texts = make_texts()
    site.has_ranges = has_ranges
    site.files = {
        "/data/a.jsonl": make_jsonl(texts[:3000]), "/data/b%20c.jsonl": make_jsonl(texts[3000:])
    }  # fmt: skip
    settings = make_settings(site, tmp_path)
    plan, found = preflight_dataset(settings, samples=2)
    assert found.refusals == ()
    shown = {row.fields["txt"].beginning[:9] for row in found.preview.rows}
    assert shown <= {text[:9] for text in texts}
    assert len(shown) == 2
    if has_ranges:
        assert (len(plan.partitions) > 4, found.notes) == (True, ())
    else:
        assert len(plan.partitions) == 2
        (note,) = found.notes
        assert note.startswith("The server sends no parts of 2 files. Each becomes one partition")
    report = shard_dataset(settings)
    assert report.samples == len(texts)
    assert sorted(read_texts(Folder(tmp_path / "out")).elements()) == sorted(texts)
    assert shard_dataset(settings).was_complete


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.csv.gz"])
def test_compressed_and_csv_files_are_continued_after_a_stop(
    site, tmp_path, monkeypatch, name, has_ranges
):
    monkeypatch.setattr(compressed, "SEEK_INTERVAL", 64 << 10)
    generator = random.Random(name)
    texts = [f"{n} {generator.randrange(1 << 800):0200x}" for n in range(3000)]
    body = make_jsonl(texts)
    if ".csv" in name:
        body = b"id,text\n" + b"".join(f'{n},"{t}"\n'.encode() for n, t in enumerate(texts))
    if name.endswith(".gz"):
        body = gzip.compress(body)
    elif name.endswith(".zst"):
        parts = (body[at : at + 100_000] for at in range(0, len(body), 100_000))
        body = b"".join(map(zstandard.ZstdCompressor().compress, parts))
    site.has_ranges, site.files = has_ranges, {f"/data/{name}": body}
    settings = make_settings(site, tmp_path, workers=0, paths=[name], kind=name.split(".")[1])
    commits = 0

    def stop(event):
        nonlocal commits
        commits += isinstance(event, ShardCommitted)
        if commits == 40:  # of 51
            raise StoppedError

    with pytest.raises(StoppedError):
        shard_dataset(settings, progress=stop)
    site.requests.clear()
    report = shard_dataset(settings)
    assert report.samples == len(texts)
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
    starts = [int(span[6:].split("-")[0]) for _, span in site.requests if span]
    if has_ranges:
        assert max(starts) > len(body) // 2  # the header of a CSV file is read, too


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_begun_run_keeps_its_partitions_when_the_server_begins_or_ceases_to_send_parts(
    site, tmp_path, caplog, has_ranges
):
    texts = make_texts()
    site.has_ranges, site.files = has_ranges, {"/data/a.jsonl": make_jsonl(texts)}
    settings = make_settings(site, tmp_path, workers=0, paths=["a.jsonl"])
    planned, _ = preflight_dataset(settings)
    assert (len(planned.partitions) > 4) == has_ranges
    commits = 0

    def stop(event):
        nonlocal commits
        commits += isinstance(event, ShardCommitted)
        if commits == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        shard_dataset(settings, progress=stop)
    site.has_ranges = not has_ranges
    plan, found = preflight_dataset(settings)
    assert (plan, found.refusals) == (planned, ())
    assert "sends parts of other files than when words was planned" in caplog.text
    assert shard_dataset(settings).samples == len(texts)
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
    site.has_ranges = has_ranges
    assert shard_dataset(settings).was_complete


def test_a_plan_without_commits_is_made_again_when_the_server_ceases_to_send_parts(site, tmp_path):
    texts = make_texts()
    site.files = {"/data/a.jsonl": make_jsonl(texts)}
    settings = make_settings(site, tmp_path, workers=0, paths=["a.jsonl"])
    keys, store = DatasetKeys("words"), open_store(settings.store)
    plan, divided = make_plan(
        keys, settings.source, settings.source.open_files(), settings.sharding
    )
    commit_plan(store, keys, plan, divided.objects)
    site.has_ranges = False
    report = shard_dataset(settings)
    assert (report.samples, report.partitions) == (len(texts), 1)


def test_the_url_of_one_file_needs_no_paths(site):
    site.files["/data/a.jsonl"] = b"body"
    spec = StoreSpec(url=site.url + "/data/a.jsonl")
    files = open_files(spec, allow_private=True)
    assert read_all(files) == b"body"
    assert files.url == site.url + "/data"


@pytest.mark.parametrize("slash", ["%2F", "%2f"])
def test_an_escaped_slash_in_the_name_of_one_file_is_refused(site, slash):
    site.files = {f"/o/folder{slash}a%20b.jsonl": b"body", "/o/folder/a%20b.jsonl": b"other"}
    spec = StoreSpec(url=f"{site.url}/o/folder{slash}a%20b.jsonl")
    with pytest.raises(errors.ConfigurationError, match=r"escaped slash.*Write `/` for `%2F`"):
        open_files(spec, allow_private=True)
    spec = StoreSpec(url=f"{site.url}/o/folder/a%20b.jsonl")
    assert read_all(open_files(spec, allow_private=True)) == b"other"


def test_a_url_that_cannot_be_listed_is_refused(site):
    files = open_files(StoreSpec(url=site.url), allow_private=True)
    with pytest.raises(errors.ConfigurationError, match="cannot be listed: write the files"):
        files.collect(Patterns())
    with pytest.raises(errors.ConfigurationError, match="`paths` is for https://"):
        open_files(StoreSpec(url="s3://b"), paths=["a"])
    with pytest.raises(errors.ConfigurationError, match="write secrets as headers"):
        open_files(StoreSpec(url="https://me:secret@host/x"), paths=["a"])


def test_private_addresses_are_refused_before_anything_is_sent(site, other):
    site.files["/data/a.jsonl"] = b"body"
    with pytest.raises(errors.ConfigurationError, match=r"127\.0\.0\.1.*allow_private: true"):
        read_all(open_site(site, private=False))
    assert site.requests == []


def test_a_token_is_a_header_that_no_other_host_gets(site, other):
    site.token = "Bearer secret"
    site.files["/data/a.jsonl"] = b"body"
    with pytest.raises(errors.DeniedError, match=r"refuses the request \(401\)"):
        read_all(open_site(site))
    assert read_all(open_site(site, Authorization="Bearer secret")) == b"body"
    site.redirects["/data/a.jsonl"] = other.url + "/elsewhere"
    other.files["/elsewhere"] = b"moved"
    assert read_all(open_site(site, Authorization="Bearer secret")) == b"moved"
    assert set(other.authorizations) == {None}


def test_a_busy_server_is_asked_again_and_a_cut_answer_is_continued(site):
    body = bytes(range(256)) * 40
    site.files["/data/a.jsonl"] = body
    site.statuses = [(503, {}), (429, {"Retry-After": "0"})]
    site.cut_after = [10, 0, 5000]
    assert read_all(open_site(site)) == body
    assert [span for _, span in site.requests][-3:] == [
        "bytes=10-10239", "bytes=10-10239", "bytes=5010-10239"
    ]  # fmt: skip


def test_a_server_without_ranges_that_cuts_its_answer_is_read_from_the_beginning(site):
    body = bytes(range(256)) * 40
    site.files["/data/a.jsonl"], site.has_ranges = body, False
    files = open_site(site)
    table = files.collect(Patterns())
    assert len(table) == 1
    site.cut_after = [5000]
    file = FileRef(path="a.jsonl", size=len(body), etag='"1"')
    assert files.unseekable == {"a.jsonl"}
    assert b"".join(files.iterate_blocks(file, 300, 9000)) == body[300:9000]


def test_a_server_that_never_answers_is_given_up(site):
    site.statuses = [(503, {})] * 100
    with pytest.raises(errors.UnavailableError, match=r"does not answer \(status 503\)"):
        read_all(open_site(site, retry=0.0))


@pytest.mark.parametrize("change", ["etag", "size", "gone"])
@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_file_that_changed_stops_the_run(site, change, has_ranges):
    site.files["/data/a.jsonl"], site.has_ranges = b"0123456789", has_ranges
    files = open_site(site)
    files.collect(Patterns())
    file = FileRef(path="a.jsonl", size=10, etag='"1"')
    match change:
        case "etag":
            site.headers = {"ETag": '"2"'}
        case "size":
            site.files["/data/a.jsonl"] = b"0123456789a"
        case "gone":
            del site.files["/data/a.jsonl"]
    with pytest.raises(errors.ChangedError, match="has changed since the plan was made"):
        list(files.iterate_blocks(file, 2, 5))


def test_a_time_stands_for_an_etag_and_nothing_is_refused(site):
    site.files["/data/a.jsonl"] = b"body"
    site.headers = {"Last-Modified": HOUR}
    assert open_site(site).collect(Patterns()).rows == [b"a.jsonl\x004\x00" + HOUR.encode()]
    site.headers = {}
    with pytest.raises(errors.ConfigurationError, match="neither an ETag nor a Last-Modified"):
        open_site(site).collect(Patterns())


def test_an_empty_file_has_no_rows(site):
    site.files["/data/a.jsonl"] = b""
    assert open_site(site).collect(Patterns()).rows == [b'a.jsonl\x000\x00"1"']


@pytest.mark.parametrize("coding", ["", "identity", "Identity", "aws-chunked", "utf-8"])
def test_codings_that_compress_nothing_are_read(site, coding):
    site.files["/data/a.jsonl"] = b"body"
    site.headers = {"ETag": "1", "Content-Encoding": coding}
    assert read_all(open_site(site)) == b"body"


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "aws-chunked, br", "x-gzip,identity", "zstd"])
def test_compressed_answers_are_refused(site, coding):
    site.files["/data/a.jsonl"] = b"body"
    site.headers = {"ETag": "1", "Content-Encoding": coding}
    with pytest.raises(errors.ConfigurationError, match="compresses its answers"):
        read_all(open_site(site))


def test_wrong_ranges_and_endless_redirects_are_refused(site):
    site.files["/data/a.jsonl"] = b"body"
    site.statuses = [(206, {"Content-Range": "bytes 9-9/20", "ETag": "1"})]
    with pytest.raises(errors.ConfigurationError, match="another range"):
        read_all(open_site(site))
    site.redirects["/data/a.jsonl"] = "/data/a.jsonl"
    with pytest.raises(errors.ConfigurationError, match="redirected too often"):
        read_all(open_site(site))


def test_tls_is_verified_and_is_not_left_by_a_redirect(tmp_path):
    made = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with serve(Site(files={"/a": b"body"}), context) as site:
        trusting = StoreSpec(url=f"{site.url}/a", ca_file=made.ca)
        assert read_all(open_files(trusting, allow_private=True)) == b"body"
        with pytest.raises(errors.ConfigurationError, match=r"not trusted.*`ca_file`"):
            read_all(open_files(StoreSpec(url=f"{site.url}/a"), allow_private=True))
        site.redirects["/a"] = "http://127.0.0.1:1/a"
        with pytest.raises(errors.ConfigurationError, match="which is not read"):
            read_all(open_files(trusting, allow_private=True))


def test_parquet_needs_a_server_that_sends_parts(site, tmp_path):
    site.files["/data/a.parquet"], site.has_ranges = b"x" * 100, False
    settings = make_settings(site, tmp_path, kind="parquet", paths=["a.parquet"])
    with pytest.raises(errors.ConfigurationError, match="sends no parts of files, which parquet"):
        shard_dataset(settings)


def test_headers_are_in_no_record_and_in_no_message(site, tmp_path):
    site.files["/data/a.jsonl"] = make_jsonl(make_texts(10))
    site.token = "Bearer planted"
    settings = make_settings(
        site, tmp_path, paths=["a.jsonl"], options={"Authorization": "Bearer planted"}
    )
    shard_dataset(settings)
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(b"planted" in body for body in written)
    assert "planted" not in json.dumps(settings.model_dump(mode="json"))


@pytest.mark.parametrize("name", ["Authorization", "Range", "Accept-Encoding"])
def test_a_header_that_cannot_be_sent_is_refused_without_its_value(site, name):
    value = "Bearer planted\n" if name == "Authorization" else "planted"
    with pytest.raises(errors.ConfigurationError, match=f"The header '{name}'") as refused:
        open_files(StoreSpec(url=site.url, options={name: SecretStr(value)}))
    assert "planted" not in str(refused.value)


def test_the_source_is_read_where_the_settings_say_and_not_where_the_plan_says(
    site, other, tmp_path
):
    for place in (site, other):
        place.files["/data/a.jsonl"] = make_jsonl(make_texts(10))
    settings = make_settings(site, tmp_path, paths=["a.jsonl"])
    keys = DatasetKeys("words")
    plan, divided = make_plan(
        keys, settings.source, settings.source.open_files(), settings.sharding
    )
    commit_plan(open_store(settings.store), keys, plan, divided.objects)
    site.requests.clear()
    moved = make_settings(other, tmp_path, paths=["a.jsonl"])
    assert shard_dataset(moved).samples == 10
    assert site.requests == []


def test_an_answer_without_bytes_is_given_up(site):
    site.files["/data/a.jsonl"] = b"0123456789"
    files = open_site(site, retry=0.0)
    span = {"Content-Range": "bytes 0-9/10", "ETag": '"1"'}
    site.statuses = [(206, span)] * 50
    file = FileRef(path="a.jsonl", size=10, etag='"1"')
    with pytest.raises(errors.UnavailableError, match="it sent no bytes"):
        list(files.iterate_blocks(file, 0, 10))


def test_the_time_of_the_caller_is_no_time_without_an_answer(site, monkeypatch):
    body = bytes(100)
    site.files["/data/a.jsonl"] = body
    files = open_site(site, retry=5.0)
    now = [0.0]
    monkeypatch.setattr(http_files.time, "monotonic", lambda: now[0])
    site.cut_after = [30]
    read = b""
    for block in files.iterate_blocks(FileRef(path="a.jsonl", size=100, etag=""), 0, 100, block=10):
        read += block
        now[0] += 60.0  # the caller is busy for longer than the time for retries
    assert read == body


def test_a_folder_is_not_taken_for_a_file(site):
    files = open_files(StoreSpec(url=site.url + "/data/"), allow_private=True)
    with pytest.raises(errors.ConfigurationError, match="cannot be listed"):
        files.collect(Patterns())


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("127.0.0.1", False), ("0.0.0.0", False), ("10.1.2.3", False), ("169.254.1.1", False),
        ("100.64.0.1", False), ("::1", False), ("::ffff:127.0.0.1", False), ("fc00::1", False),
        ("64:ff9b::7f00:1", False), ("64:ff9b:1::a00:1", False), ("2002:7f00:1::", False),
        ("::7f00:1", False), ("1.1.1.1", True), ("2606:4700::1111", True),
        ("64:ff9b::101:101", True),
    ],
)  # fmt: skip
def test_an_address_is_public_only_if_the_one_within_it_is(address, is_public):
    found = http_files._list_addresses(ipaddress.ip_address(address))
    assert all(one.is_global for one in found) == is_public
