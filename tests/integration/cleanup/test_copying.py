"""Copies of buckets: by the store, through this process, into folders; killed, and continued."""

import json
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import SecretStr

from millrace import errors
from millrace.cleanup import (
    CopyOutcome,
    CopyResult,
    ObjectFilter,
    compare_objects,
    copy_objects,
    copying,
    object_copier,
)
from millrace.cli import main
from millrace.storage import (
    Credentials,
    Store,
    StoreSpec,
    abort_upload,
    list_objects,
    list_uploads,
    multipart,
    open_store,
    put,
    read,
)
from millrace.testing.credentials import make_credentials
from millrace.testing.key import Key
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.stores import make_spec
from tests.support.fork_server import get_fork_server

MIB = 1 << 20
PARTS = (6 * MIB, 6 * MIB, 6 * MIB, 5 * MIB)
OWN_PARTS = 16 * MIB
"""Bytes of a part of an object whose source has no parts that a store tells."""


class Bucket:
    """A bucket, by boto3, with what others have written."""

    def __init__(self, rgw: RGW, name: str, owner: Key | None = None) -> None:
        self._rgw, self._owner = rgw, owner or rgw.full
        self.client, self.name = rgw.make_client(self._owner), name
        self._dice = random.Random(name)

    def open(self, key: Key | None = None) -> Store:
        """Open the bucket, by the owner's key or by another one."""
        key = key or self._owner
        spec = StoreSpec(
            url=f"s3://{self.name}", endpoint=self._rgw.endpoint, credentials=make_credentials(key)
        )
        return open_store(spec)

    def put(self, key: str, size: int = 0, **attributes: Any) -> bytes:
        """Write an object with random bytes."""
        body = self._dice.randbytes(size)
        self.client.put_object(Bucket=self.name, Key=key, Body=body, **attributes)
        return body

    def put_parts(self, key: str, *sizes: int, **attributes: Any) -> bytes:
        """Write an object in parts of some sizes."""
        names: dict[str, Any] = {"Bucket": self.name, "Key": key}
        upload = self.client.create_multipart_upload(**names, **attributes)["UploadId"]
        bodies = [self._dice.randbytes(size) for size in sizes]
        parts = [
            {
                "PartNumber": number,
                "ETag": self.client.upload_part(
                    **names, UploadId=upload, PartNumber=number, Body=body
                )["ETag"],
            }
            for number, body in enumerate(bodies, start=1)
        ]
        self.client.complete_multipart_upload(
            **names, UploadId=upload, MultipartUpload={"Parts": parts}
        )
        return b"".join(bodies)

    def read(self, key: str) -> bytes:
        """Return the bytes of an object."""
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def list_etags(self) -> dict[str, str]:
        """Return the ETag of each object."""
        listed = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return {one["Key"]: one["ETag"] for one in listed}

    def count_parts(self) -> Counter[int]:
        """Return how often each part was sent to the bucket, by the store's log."""
        found = Counter[int]()
        for line in self._rgw.list_requests():
            if f'"PUT /{self.name}/' in line and "partNumber=" in line and " 200 " in line:
                found[int(line.partition("partNumber=")[2].split("&")[0].split()[0])] += 1
        return found


@pytest.fixture
def source(rgw: RGW, bucket: str) -> Bucket:
    return Bucket(rgw, bucket)


@pytest.fixture
def target(rgw: RGW, bucket: str) -> Bucket:
    return Bucket(rgw, rgw.create_bucket(f"{bucket}-copy"))


@pytest.fixture
def foreign(rgw: RGW, bucket: str) -> Bucket:
    """A bucket of another account, which cannot read the source: all bytes go through a process."""
    name = f"{bucket}-foreign"
    rgw.make_client(rgw.other).create_bucket(Bucket=name)
    return Bucket(rgw, name, rgw.other)


def fill(bucket: Bucket) -> dict[str, bytes]:
    """Write objects of all shapes; return their bytes."""
    attributes = {"ContentType": "text/x-odd", "CacheControl": "no-store", "Metadata": {"by": "me"}}
    return {
        "a/small": bucket.put("a/small", 1000, **attributes),
        "a/empty": bucket.put("a/empty"),
        "a/whole": bucket.put("a/whole", 40 * MIB, **attributes),
        "b parts ü+%20": bucket.put_parts("b parts ü+%20", 5 * MIB, 3 * MIB, **attributes),
        "c/odd parts": bucket.put_parts("c/odd parts", *PARTS, **attributes),
        "one part": bucket.put_parts("one part", 2000),
    }


def count(result: CopyResult) -> dict[CopyOutcome, int]:
    assert result.failures == []
    return {outcome: number for outcome, number in result.objects.items() if number}


@pytest.mark.parametrize("by_store", [True, False])
def test_copies_have_the_bytes_and_the_attributes(
    source: Bucket, target: Bucket, foreign: Bucket, by_store: bool
) -> None:
    bodies = fill(source)
    here, there = source.open(), target if by_store else foreign
    done = copy_objects(here, there.open())
    assert count(done) == {CopyOutcome.COPIED: len(bodies)}
    # Ceph cannot copy the parts of an object whose name has a percent sign.
    by_process = len(bodies["b parts ü+%20"])
    assert done.by_store == (sum(map(len, bodies.values())) - by_process if by_store else 0)
    assert {key: there.read(key) for key in there.list_etags()} == bodies
    assert list(list_uploads(there.open())) == []
    for key in ("a/small", "a/whole", "c/odd parts"):
        described = there.client.head_object(Bucket=there.name, Key=key)
        assert (described["ContentType"], described["CacheControl"]) == ("text/x-odd", "no-store")
        assert described["Metadata"]["by"] == "me"
    # Objects that were uploaded whole, and in parts of a usual size, have the same ETags.
    same = {"a/small", "a/empty", "one part"} | ({"a/whole"} if by_store else set())
    mine, theirs = source.list_etags(), there.list_etags()
    assert {key for key in mine if mine[key] == theirs[key]} >= same
    again = copy_objects(here, there.open())
    assert count(again) == {CopyOutcome.EQUAL: len(bodies)}


def test_equal_objects_are_compared_without_reading_them(
    rgw: RGW, source: Bucket, foreign: Bucket
) -> None:
    fill(source)
    copy_objects(source.open(), foreign.open())
    before = len(rgw.list_requests())
    copy_objects(source.open(), foreign.open())
    asked = [line for line in rgw.list_requests()[before:] if source.name in line]
    assert [line for line in asked if '"GET /' in line and "list-type" not in line] == []


def test_only_objects_that_differ_are_asked_for_the_kind_of_their_etag(
    rgw: RGW, source: Bucket, target: Bucket
) -> None:
    for key in ("equal", "differs"):
        source.put(key, 100)
    copy_objects(source.open(), target.open())
    target.put("differs", 100)
    before = len(rgw.list_requests())
    assert copy_objects(source.open(), target.open()).conflicts == ["differs"]
    requests = [line for line in rgw.list_requests()[before:] if f" /{source.name}" in line]
    asked = [line for line in requests if "list-type" not in line]
    assert len(asked) == 2
    assert all('"HEAD /' in line and "/differs" in line for line in asked)


@pytest.mark.parametrize("by_store", [True, False])
def test_keys_that_clients_refuse_are_copied_between_buckets_and_named_by_folders(
    source: Bucket, target: Bucket, foreign: Bucket, tmp_path: Path, by_store: bool
) -> None:
    odd = ("folder/", "a//b", "./c", "\ttab", "line\nline")
    bodies = {key: source.put(key, 100) for key in (*odd, "plain")}
    bodies |= {key: source.put_parts(key, *PARTS) for key in ("large//key", "large\tkey")}
    there = target if by_store else foreign
    done = copy_objects(source.open(), there.open())
    assert done.failures == []
    assert count(done) == {CopyOutcome.COPIED: len(bodies)}
    assert {key: there.read(key) for key in there.list_etags()} == bodies
    done = copy_objects(source.open(), open_store((tmp_path / "out").as_uri()))
    assert (done.objects[CopyOutcome.COPIED], done.failed) == (1, len(bodies) - 1)
    for one in done.failures:
        fault = "a control character" if not one.key.isprintable() else "an empty or a relative"
        assert f"{one.key!r}: it has {fault}" in one.reason
    assert (tmp_path / "out/plain").read_bytes() == bodies["plain"]


def test_objects_that_differ_stay_until_they_may_be_replaced(
    source: Bucket, target: Bucket
) -> None:
    wanted = {key: source.put(key, 100) for key in ("a", "b", "c")}
    kept = {"a": target.put("a", 100), "b": target.put("b", 99), "d": target.put("d", 5)}
    target.put_parts("c", 100)
    done = copy_objects(source.open(), target.open())
    assert count(done) == {CopyOutcome.CONFLICT: 3}
    assert done.conflicts == ["a", "b", "c"]
    assert {key: target.read(key) for key in kept} == kept
    dry = compare_objects(source.open(), target.open().spec, overwrite=True)
    assert count(dry) == {CopyOutcome.MISSING: 3}
    assert target.read("a") == kept["a"]
    done = copy_objects(source.open(), target.open(), overwrite=True)
    assert count(done) == {CopyOutcome.COPIED: 3}
    assert {key: target.read(key) for key in (*wanted, "d")} == {**wanted, "d": kept["d"]}


@pytest.mark.parametrize("kind", ["local", "memory", "gcs", "rgw", "r2"])
def test_every_store_is_copied_into_every_other(
    request: pytest.FixtureRequest,
    source: Bucket,
    target: Bucket,
    rgw: RGW,
    tmp_path: Path,
    kind: str,
) -> None:
    bodies = fill(source) | {"c/odd parts": source.put_parts("c/odd parts", 8 * MIB, MIB)}
    bodies = {key: body for key, body in bodies.items() if "%" not in key}
    objects = ObjectFilter(pattern="[!b]*")  # obstore decodes `%20` in a key of a folder
    spec = make_spec(kind, request)
    if kind in {"local", "rgw"}:  # beside the source and the last copy
        spec = spec.model_copy(
            update={"url": target.open().url if kind == "rgw" else (tmp_path / "middle").as_uri()}
        )
    middle, back = open_store(spec), open_store((tmp_path / "back").as_uri())
    for here, there in ((source.open(rgw.read_only), middle), (middle, back)):
        assert count(copy_objects(here, there, objects)) == {CopyOutcome.COPIED: len(bodies)}
        assert count(copy_objects(here, there, objects)) == {CopyOutcome.EQUAL: len(bodies)}
    assert {key: read(back, key) for key in bodies} == bodies


KILLED = """
import os, signal, sys
from millrace.cleanup import copy_objects
from millrace.storage import StoreSpec, multipart, open_store

source, target, after = sys.argv[1:]
sent = 0
send = multipart.PartUpload._send

def send_and_count(self, *arguments):
    global sent
    etag = send(self, *arguments)
    sent += 1
    if sent == int(after):
        os.kill(os.getpid(), signal.SIGKILL)
    return etag

multipart.PartUpload._send = send_and_count
multipart.PartUpload._complete = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
here, there = (open_store(StoreSpec.model_validate_json(one)) for one in (source, target))
import millrace.cleanup.object_copier as object_copier
object_copier._PART_CONCURRENCY = 1
copy_objects(here, there)
"""


@pytest.mark.parametrize("after", [1, 2, 99])
def test_a_killed_copy_continues_within_a_large_object(
    source: Bucket, foreign: Bucket, after: int
) -> None:
    """The last boundary is before the object appears. No part is sent twice."""
    body = source.put("large", 2 * OWN_PARTS + MIB)
    here = source.open()
    child = get_fork_server("millrace.cleanup").start(
        KILLED,
        *(json.dumps(one.spec.reveal_secrets()) for one in (here, foreign.open())),
        f"{after}",
    )
    with child:
        assert child.wait() == -signal.SIGKILL
    assert foreign.list_etags() == {}
    sent = min(after, 3)
    assert foreign.count_parts().total() == sent
    done = copy_objects(here, foreign.open())
    assert count(done) == {CopyOutcome.COPIED: 1}
    assert done.reused == min(sent * OWN_PARTS, len(body))
    assert foreign.read("large") == body
    assert foreign.count_parts() == {1: 1, 2: 1, 3: 1}
    assert list(list_uploads(foreign.open())) == []


@pytest.mark.parametrize(
    ("size", "most"),
    [(2 * OWN_PARTS + MIB, 1), pytest.param(1 << 30, 8, marks=pytest.mark.soak)],
)
def test_a_copy_of_a_file_that_is_killed_again_and_again_sends_no_part_twice(
    foreign: Bucket, tmp_path: Path, size: int, most: int
) -> None:
    """Each process is killed after up to `most` parts."""
    dice = random.Random(size)
    body = dice.randbytes(OWN_PARTS - 1) * (1 + size // (OWN_PARTS - 1))
    body = body[:size]  # each part has other bytes
    (tmp_path / "large").write_bytes(body)
    here = open_store(tmp_path.as_uri())
    stores = [json.dumps(one.spec.reveal_secrets()) for one in (here, foreign.open())]
    parts = -(-size // OWN_PARTS)
    sent = 0
    while sent < parts:
        after = dice.randint(1, most)
        sent = min(parts, sent + after)
        child = get_fork_server("millrace.cleanup").start(KILLED, *stores, f"{after}")
        with child:
            assert child.wait() == -signal.SIGKILL
        assert foreign.count_parts() == dict.fromkeys(range(1, sent + 1), 1)
    assert foreign.list_etags() == {}
    done = copy_objects(here, foreign.open())
    assert (count(done), done.reused) == ({CopyOutcome.COPIED: 1}, size)
    assert foreign.count_parts() == dict.fromkeys(range(1, parts + 1), 1)
    assert foreign.read("large") == body
    assert list(list_uploads(foreign.open())) == []


KILLED_STREAM = """
import json, os, signal, sys, time
from millrace.cleanup import copy_objects, object_copier
from millrace.storage import StoreSpec, list_uploads, measure_upload, open_store

here, there = (open_store(StoreSpec.model_validate(json.loads(one))) for one in sys.argv[1:])
stream = object_copier.stream

def stream_and_kill(*arguments, **options):
    for number, block in enumerate(stream(*arguments, **options)):
        yield block
        if number == 2:
            while not any(measure_upload(there, one) for one in list_uploads(there)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

object_copier.stream = stream_and_kill
copy_objects(here, there)
"""


def test_a_killed_copy_of_an_object_with_parts_continues(source: Bucket, foreign: Bucket) -> None:
    """No part that has arrived is sent twice."""
    body = source.put_parts("large", *[8 * MIB] * 4, MIB)
    here = source.open()
    stores = (json.dumps(one.spec.reveal_secrets()) for one in (here, foreign.open()))
    child = get_fork_server("millrace.cleanup").start(KILLED_STREAM, *stores)
    with child:
        assert child.wait() == -signal.SIGKILL
    assert foreign.list_etags() == {}
    assert foreign.count_parts().total() > 0
    done = copy_objects(here, foreign.open())
    assert count(done) == {CopyOutcome.COPIED: 1}
    assert done.reused > 0
    assert foreign.list_etags() == source.list_etags()
    assert foreign.read("large") == body
    assert foreign.count_parts() == dict.fromkeys(range(1, 6), 1)


@pytest.mark.parametrize("parts", [True, False])
def test_parts_of_another_content_are_not_used(
    source: Bucket, foreign: Bucket, parts: bool
) -> None:
    if parts:
        body = source.put_parts("large", 8 * MIB, MIB)
    else:
        body = source.put("large", 2 * OWN_PARTS + MIB)
    names: dict[str, Any] = {"Bucket": foreign.name, "Key": "large"}
    upload = foreign.client.create_multipart_upload(**names)["UploadId"]
    size = 8 * MIB if parts else OWN_PARTS
    foreign.client.upload_part(**names, UploadId=upload, PartNumber=1, Body=bytes(size))
    done = copy_objects(source.open(), foreign.open())
    assert (count(done), done.reused) == ({CopyOutcome.COPIED: 1}, 0)
    assert foreign.read("large") == body


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("PutObject", "damage"),
        ("PutObject", "lost"),
        ("UploadPart", "damage"),
        ("UploadPart", "cut"),
        ("UploadPart", "lost"),
        ("CompleteMultipartUpload", "error503"),
        ("CompleteMultipartUpload", "lost"),
        ("CreateMultipartUpload", "error500"),
    ],
)
def test_faults_of_the_destination_change_nothing(
    request: pytest.FixtureRequest,
    source: Bucket,
    rgw: RGW,
    r2: R2Proxy,
    operation: str,
    kind: str,
) -> None:
    bodies = {"small": source.put("small", 1000), "large": source.put("large", 2 * OWN_PARTS + 1)}
    there = open_store(make_spec("r2", request))
    r2.fail_next(kind, 2 if kind != "damage" else 1, operation=operation)
    done = copy_objects(source.open(rgw.read_only), there)
    assert count(done) == {CopyOutcome.COPIED: 2}
    assert {key: read(there, key) for key in bodies} == bodies
    assert r2.count_pending() == 0


def test_an_object_that_was_replaced_after_the_listing_is_named(
    source: Bucket, foreign: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.put("a", 100)
    source.put("b", 3 * OWN_PARTS)
    pair = copying._pair

    def replace_then_pair(*arguments: Any) -> Any:
        pairs = list(pair(*arguments))
        source.put("a", 100)
        source.put("b", 3 * OWN_PARTS)
        return pairs

    monkeypatch.setattr(copying, "_pair", replace_then_pair)
    done = copy_objects(source.open(), foreign.open())
    assert [one.key for one in done.failures] == ["a", "b"]
    assert foreign.list_etags() == {}


@pytest.mark.parametrize("by_store", [True, False])
def test_objects_that_were_written_after_the_listing_stay(
    source: Bucket,
    target: Bucket,
    foreign: Bucket,
    by_store: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = ("folder/", "large", "small")
    for key in keys:
        source.put(key, 3 * OWN_PARTS if key == "large" else 100)
    same = source.put("same", 100)
    there, kept = target if by_store else foreign, dict[str, bytes]()
    pair = copying._pair

    def pair_then_write(*arguments: Any) -> Any:
        pairs = list(pair(*arguments))
        kept.update({key: there.put(key, 50) for key in keys})
        there.client.put_object(Bucket=there.name, Key="same", Body=same)
        return pairs

    monkeypatch.setattr(copying, "_pair", pair_then_write)
    done = copy_objects(source.open(), there.open())
    assert count(done) == {CopyOutcome.CONFLICT: 3, CopyOutcome.COPIED: 1}
    assert done.conflicts == list(keys)
    assert {key: there.read(key) for key in there.list_etags()} == {**kept, "same": same}
    assert list(list_uploads(there.open())) == []


@pytest.mark.parametrize("has_parts", [True, False])
@pytest.mark.parametrize("outcome", ["completed", "aborted"])
def test_copies_that_share_the_upload_of_an_object_both_succeed(
    source: Bucket,
    foreign: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    has_parts: bool,
    outcome: str,
) -> None:
    """The other copy uses the parts that this one has sent."""
    sizes = (8 * MIB, 8 * MIB, 8 * MIB, 8 * MIB, MIB)
    body = source.put_parts("large", *sizes) if has_parts else source.put("large", sum(sizes))
    target, name = (
        (object_copier.ObjectCopier, "_check_absent")
        if has_parts
        else (multipart.PartUpload, "_send")
    )
    original, first = getattr(target, name), threading.Lock()

    def go_on_then_end_upload(*arguments: Any) -> Any:
        found = original(*arguments)
        if first.acquire(blocking=False):
            monkeypatch.setattr(target, name, original)
            if outcome == "completed":
                copy_objects(source.open(), foreign.open(), overwrite=True)
            else:
                for upload in list_uploads(foreign.open()):
                    abort_upload(foreign.open(), upload)
        return found

    monkeypatch.setattr(target, name, go_on_then_end_upload)
    monkeypatch.setattr(object_copier, "_PART_CONCURRENCY", 1)
    done = copy_objects(source.open(), foreign.open(), overwrite=True)
    assert first.locked()
    assert count(done) == {CopyOutcome.COPIED: 1}
    assert foreign.read("large") == body
    assert list(list_uploads(foreign.open())) == []


@pytest.mark.parametrize("kind", ["memory", "gcs"])
def test_objects_that_appear_during_a_copy_into_other_stores_stay(
    request: pytest.FixtureRequest,
    source: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    there = open_store(make_spec(kind, request))
    source.put("large", 3 * OWN_PARTS)
    source.put("small", 100)
    stream = object_copier.stream

    def stream_then_write(store: Store, key: str, **options: Any) -> Any:
        yield from stream(store, key, **options)
        put(there, key, b"precious")

    monkeypatch.setattr(object_copier, "stream", stream_then_write)
    done = copy_objects(source.open(), there)
    assert done.conflicts == ["large", "small"]
    assert {key: read(there, key) for key in done.conflicts} == dict.fromkeys(
        ("large", "small"), b"precious"
    )


def test_credentials_and_buckets_that_are_wrong_are_a_sentence(
    rgw: RGW, source: Bucket, target: Bucket
) -> None:
    source.put("a", 100)
    with pytest.raises(errors.DeniedError, match=target.name):
        copy_objects(source.open(), target.open(rgw.read_only))
    missing = Bucket(rgw, "no-such-bucket")
    with pytest.raises(errors.NotFoundError, match="no-such-bucket"):
        copy_objects(source.open(), missing.open())
    with pytest.raises(errors.ConfigurationError, match="overlap"):
        copy_objects(source.open(), open_store(source.open().spec.model_copy(
            update={"url": f"s3://{source.name}/backup"})))  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"), [("b", "b"), ("b", "b/backup"), ("b/runs/a", "b/runs"), ("b/%3F", "b/%3F/a")]
)
def test_stores_that_name_one_bucket_differently_overlap(one: str, other: str) -> None:
    account = "0123456789abcdef0123456789abcdef"
    key = Credentials(access_key_id="id", secret_access_key=SecretStr("secret"))
    r2 = StoreSpec(url=f"r2://{account}/{one}", credentials=key)
    s3 = StoreSpec(
        url=f"s3://{other}",
        endpoint=f"https://{account}.r2.cloudflarestorage.com/",
        credentials=key,
    )
    for source, destination in ((r2, s3), (s3, r2)):
        with pytest.raises(errors.ConfigurationError, match="overlap"):
            copy_objects(open_store(source), open_store(destination))


def test_the_command_copies_and_says_what_differs(
    rgw: RGW, source: Bucket, target: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", rgw.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rgw.full.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rgw.full.secret_access_key)
    for number in range(3):
        source.put(f"runs/{number}.pt", 10)
    source.put("other", 10)
    urls = [f"s3://{source.name}", f"s3://{target.name}"]

    def run(*options: str, answer: str = "") -> tuple[int, str]:
        done = CliRunner().invoke(main, ["bucket", "copy", *urls, *options], input=answer)
        return done.exit_code, done.output

    assert run("--dry-run", "--prefix", "runs/")[0] == 0
    assert target.list_etags() == {}
    code, shown = run("--prefix", "runs/", "--suffix", ".pt")
    assert (code, set(target.list_etags())) == (0, {f"runs/{number}.pt" for number in range(3)})
    assert "Copied 3 objects, 30 bytes, 30 bytes of them by the store itself" in shown
    target.put("runs/1.pt", 10)
    code, shown = run()
    assert code == 1
    assert "runs/1.pt differs: --overwrite replaces it." in shown
    assert run("--overwrite", answer="n\n")[0] == 1
    assert target.read("runs/1.pt") != source.read("runs/1.pt")
    assert run("--overwrite", answer="y\n")[0] == 0
    assert {key: target.read(key) for key in target.list_etags()} == {
        key: source.read(key) for key in source.list_etags()
    }


def test_a_half_file_of_a_killed_copy_is_not_taken_for_the_object(
    source: Bucket, tmp_path: Path
) -> None:
    body = source.put("large", OWN_PARTS)
    there = open_store(tmp_path.as_uri())
    put(there, "large", body[:100])
    assert count(copy_objects(source.open(), there)) == {CopyOutcome.CONFLICT: 1}
    assert count(copy_objects(source.open(), there, overwrite=True)) == {CopyOutcome.COPIED: 1}
    assert read(there, "large") == body


def test_a_folder_that_is_not_there_is_made_unless_it_is_a_dry_run(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/a.bin").write_bytes(b"abc")
    words = ["bucket", "copy", str(tmp_path / "here"), str(tmp_path / "new/there")]
    done = CliRunner().invoke(main, [*words, "--dry-run"])
    assert (done.exit_code, (tmp_path / "new").exists()) == (0, False)
    assert "Would copy 1 object, 3 bytes" in done.output
    told = json.loads(CliRunner().invoke(main, [*words, "--dry-run", "--json"]).stdout)
    assert told["destination"] == (tmp_path / "new/there").as_uri()
    assert CliRunner().invoke(main, words).exit_code == 0
    assert (tmp_path / "new/there/a.bin").read_bytes() == b"abc"
    absent = CliRunner().invoke(main, ["bucket", "copy", words[2], str(tmp_path / "s.yaml")])
    assert (absent.exit_code, "no settings file" in absent.output) == (2, True)


def test_identities_of_installations_are_named_and_not_copied(tmp_path: Path) -> None:
    """The reaper of the copy would release the machines of the source."""
    keys = ("_rentals/installation.json", "a/b/_rentals/installation.json")
    others = (
        "_rentals/fleet/attempts/000000-intent.json",
        "_machines/x/_rentals/installation.json",
    )
    store = open_store((tmp_path / "here").as_uri())
    for key in (*keys, *others):
        put(store, key, b"{}")
    arguments = ["bucket", "copy", str(tmp_path / "here"), str(tmp_path / "there")]
    for extra in (["--dry-run"], [], ["--overwrite", "--yes"]):
        done = CliRunner().invoke(main, [*arguments, *extra])
        assert done.exit_code == 0
        assert all(f"{key} is not copied: it is the identity" in done.output for key in keys)
    copied = open_store((tmp_path / "there").as_uri())
    assert sorted(stat.key for stat in list_objects(copied)) == sorted(others)
