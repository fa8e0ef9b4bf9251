"""Each rule of R2 is held, and each fault fires, in the proxy in front of RGW."""

import base64
import hashlib
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import boto3
import obstore
import pytest
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    ConnectionError,  # noqa: A004
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)
from obstore.store import S3Store

from millrace.testing.faults import Fault, FaultBox, Faults, NextFault
from millrace.testing.key import Key
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW

MIB = 1 << 20
CLOSED = (ConnectionError, HTTPClientError)
CUT_SHORT = (IncompleteReadError, ResponseStreamingError)


@pytest.fixture
def s3(r2: R2Proxy, rgw: RGW) -> Any:
    return r2.make_client(rgw.full)


@pytest.fixture
def behind(rgw: RGW) -> Any:
    """The upstream itself, to see what is really there."""
    return rgw.make_client(rgw.full)


def refused(call: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(ClientError) as error:
        call()
    answer: Any = error.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def keys(client: Any, bucket: str) -> list[str]:
    return [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


# What passes


def test_what_is_signed_goes_through_unchanged(s3, behind, bucket):
    name = "a/b c+é%.bin"
    s3.put_object(Bucket=bucket, Key=name, Body=b"0123456789", Metadata={"who": "me"})
    assert behind.get_object(Bucket=bucket, Key=name)["Body"].read() == b"0123456789"
    part = s3.get_object(Bucket=bucket, Key=name, Range="bytes=2-4")
    assert part["Body"].read() == b"234"
    assert part["Metadata"] == {"who": "me"}
    assert s3.head_object(Bucket=bucket, Key=name)["ContentLength"] == 10
    assert s3.list_objects_v2(Bucket=bucket, Prefix="a/b c+")["KeyCount"] == 1
    s3.delete_object(Bucket=bucket, Key=name)
    assert keys(behind, bucket) == []


def test_obstore_speaks_to_it_over_tls_with_nothing_but_the_authority(r2, rgw, behind, bucket):
    assert r2.ca_file is not None
    store = S3Store(
        bucket,
        endpoint=r2.endpoint,
        region="auto",
        access_key_id=rgw.full.access_key_id,
        secret_access_key=rgw.full.secret_access_key,
        client_options={"root_certificate": r2.ca_file.read_bytes()},
    )
    data = bytes(range(256)) * (11 * MIB // 256)
    obstore.put(store, "large", data, chunk_size=5 * MIB)
    assert bytes(obstore.get(store, "large").bytes()) == data
    assert behind.head_object(Bucket=bucket, Key="large")["ContentLength"] == len(data)


def test_the_upstream_judges_the_signature_and_the_permissions(r2, rgw, s3, bucket):
    s3.put_object(Bucket=bucket, Key="a", Body=b"a")
    wrong = r2.make_client(Key(rgw.full.access_key_id, "wrong"))
    assert refused(lambda: wrong.get_object(Bucket=bucket, Key="a"))[0] == 403
    reader = r2.make_client(rgw.read_only)
    assert reader.get_object(Bucket=bucket, Key="a")["Body"].read() == b"a"
    assert refused(lambda: reader.put_object(Bucket=bucket, Key="b", Body=b""))[0] == 403
    other = r2.make_client(rgw.other)
    assert refused(lambda: other.get_object(Bucket=bucket, Key="a"))[0] == 403


def test_create_if_absent_reaches_the_upstream(s3, r2, bucket):
    r2.set_rules(write_interval=0)
    s3.put_object(Bucket=bucket, Key="once", Body=b"1", IfNoneMatch="*")
    again = refused(lambda: s3.put_object(Bucket=bucket, Key="once", Body=b"2", IfNoneMatch="*"))
    assert again == (412, "PreconditionFailed")


def test_without_tls_it_is_plain_http(rgw, bucket, tmp_path):
    with R2Proxy.start(rgw.endpoint, {}, tmp_path, tls=False) as plain:
        assert plain.endpoint.startswith("http://")
        client = plain.make_client(rgw.full)
        client.put_object(Bucket=bucket, Key="a", Body=b"a")
        assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"a"
        assert plain.log.read_text() == ""


def test_an_upstream_that_is_not_there_is_a_bad_gateway(rgw, tmp_path):
    with R2Proxy.start("http://127.0.0.1:9", {}, tmp_path, tls=False) as lonely:
        client = lonely.make_client(rgw.full)
        assert refused(lambda: client.list_objects_v2(Bucket="bucket"))[0] == 502
        assert lonely.count_refusals() == {"BadGateway": 1}


# What R2 refuses


def multipart(client: Any, bucket: str, sizes: list[int], key: str = "large") -> Any:
    where = {"Bucket": bucket, "Key": key}
    where["UploadId"] = client.create_multipart_upload(**where)["UploadId"]
    parts = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(**where, PartNumber=number, Body=bytes(size))["ETag"],
        }
        for number, size in enumerate(sizes, 1)
    ]
    return client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})


def test_equal_parts_with_a_smaller_last_one_are_taken(s3, bucket):
    multipart(s3, bucket, [5 * MIB, 5 * MIB, 1])
    assert s3.head_object(Bucket=bucket, Key="large")["ContentLength"] == 10 * MIB + 1


@pytest.mark.parametrize("sizes", [[5 * MIB, 6 * MIB, 1], [5 * MIB, 5 * MIB + 1]])
def test_parts_that_differ_or_a_larger_last_one_are_refused(s3, behind, bucket, sizes):
    with pytest.raises(ClientError, match="All non-trailing parts must have the same length"):
        multipart(s3, bucket, sizes)
    assert keys(behind, bucket) == []


def test_parts_that_are_too_small_are_refused(r2, s3, bucket):
    assert refused(lambda: multipart(s3, bucket, [1, 1])) == (400, "EntityTooSmall")
    r2.set_rules(min_part=6 * MIB)
    too_small = refused(lambda: multipart(s3, bucket, [5 * MIB, 1], "other"))
    assert too_small == (400, "EntityTooSmall")
    assert r2.count_refusals() == {"EntityTooSmall": 2}


def test_a_trailing_checksum_as_boto3_sends_it_by_default_is_refused(r2, rgw, bucket):
    eager = boto3.client(
        "s3",
        endpoint_url=r2.endpoint,
        region_name="auto",
        aws_access_key_id=rgw.full.access_key_id,
        aws_secret_access_key=rgw.full.secret_access_key,
        verify=str(r2.ca_file),
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )
    put = refused(lambda: eager.put_object(Bucket=bucket, Key="a", Body=b"a"))
    assert put == (501, "NotImplemented")


def test_a_second_write_to_a_key_within_the_interval_is_refused(r2, s3, bucket):
    r2.set_rules(write_interval=3600)
    s3.put_object(Bucket=bucket, Key="a", Body=b"1")
    s3.put_object(Bucket=bucket, Key="b", Body=b"1")
    s3.delete_object(Bucket=bucket, Key="a")
    again = refused(lambda: s3.put_object(Bucket=bucket, Key="a", Body=b"2"))
    copied = refused(lambda: s3.copy_object(Bucket=bucket, Key="a", CopySource=f"{bucket}/b"))
    assert again == copied == (429, "TooManyRequests")
    r2.set_rules(write_interval=0)
    s3.put_object(Bucket=bucket, Key="a", Body=b"2")


def test_the_end_of_a_multipart_upload_is_the_write_that_counts(r2, s3, bucket):
    r2.set_rules(write_interval=3600)
    multipart(s3, bucket, [5 * MIB, 5 * MIB])
    assert refused(lambda: multipart(s3, bucket, [1])) == (429, "TooManyRequests")


def test_a_write_that_the_upstream_never_had_does_not_count(r2, s3, bucket):
    r2.set_rules(write_interval=3600)
    r2.fail_next(Fault.CUT, method="PUT")
    with pytest.raises(CLOSED):
        s3.put_object(Bucket=bucket, Key="a", Body=b"12")
    s3.put_object(Bucket=bucket, Key="a", Body=b"12")


@pytest.mark.parametrize(
    "extra",
    [
        {"ACL": "private"},
        {"GrantRead": "id=someone"},
        {"Tagging": "a=b"},
        {"ServerSideEncryption": "aws:kms"},
        {"SSEKMSKeyId": "key"},
        {"ObjectLockLegalHoldStatus": "ON"},
    ],
)
def test_headers_that_r2_lacks_are_refused(s3, bucket, extra):
    if "ObjectLockLegalHoldStatus" in extra:
        extra = {**extra, "ContentMD5": base64.b64encode(hashlib.md5(b"").digest()).decode()}
    put = refused(lambda: s3.put_object(Bucket=bucket, Key="a", Body=b"", **extra))
    assert put == (501, "NotImplemented")


def test_operations_that_r2_lacks_are_refused(s3, bucket):
    for call in (
        lambda: s3.get_bucket_acl(Bucket=bucket),
        lambda: s3.get_bucket_policy(Bucket=bucket),
        lambda: s3.get_bucket_versioning(Bucket=bucket),
        lambda: s3.get_object_tagging(Bucket=bucket, Key="a"),
    ):
        assert refused(call) == (501, "NotImplemented")


def test_another_region_and_an_unsigned_request_are_refused(r2, rgw, bucket):
    abroad = boto3.client(
        "s3",
        endpoint_url=r2.endpoint,
        region_name="eu-west-1",
        aws_access_key_id=rgw.full.access_key_id,
        aws_secret_access_key=rgw.full.secret_access_key,
        verify=str(r2.ca_file),
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )
    assert refused(lambda: abroad.list_objects_v2(Bucket=bucket)) == (400, "InvalidRegionName")
    assert fetch(r2, f"{r2.endpoint}/{bucket}/a") == 401


@pytest.mark.parametrize("size", [0, 10, 9 * MIB])
def test_a_body_that_is_not_what_its_checksum_says_is_refused_and_not_kept(
    s3, behind, bucket, size
):
    body = bytes(size)
    put = refused(
        lambda: s3.put_object(Bucket=bucket, Key="a", Body=body, ChecksumSHA256=sha256(b"else"))
    )
    assert put == (400, "BadDigest")
    assert keys(behind, bucket) == []
    s3.put_object(Bucket=bucket, Key="a", Body=body, ChecksumSHA256=sha256(body))
    assert behind.head_object(Bucket=bucket, Key="a")["ContentLength"] == size


# Temporary credentials


@pytest.fixture
def two_prefixes(behind: Any, bucket: str) -> str:
    for name in ("mine/a", "yours/a"):
        behind.put_object(Bucket=bucket, Key=name, Body=name.encode())
    return bucket


def denied(call: Callable[[], object]) -> bool:
    return refused(call)[0] == 403


def test_a_token_reaches_its_prefix_and_nothing_else(r2, rgw, two_prefixes):
    bucket = two_prefixes
    mine = r2.make_client(r2.make_temporary_key(rgw.full, bucket, prefixes=["mine/"]))
    assert mine.get_object(Bucket=bucket, Key="mine/a")["Body"].read() == b"mine/a"
    mine.put_object(Bucket=bucket, Key="mine/b", Body=b"b", IfNoneMatch="*")
    multipart(mine, bucket, [5 * MIB, 1], "mine/large")
    assert mine.list_objects_v2(Bucket=bucket, Prefix="mine/")["KeyCount"] == 3
    mine.copy_object(Bucket=bucket, Key="mine/c", CopySource=f"{bucket}/mine/b")
    gone = {"Objects": [{"Key": "mine/b"}, {"Key": "mine/c"}]}
    assert len(mine.delete_objects(Bucket=bucket, Delete=gone)["Deleted"]) == 2
    mixed = {"Objects": [{"Key": "mine/a"}, {"Key": "yours/a"}]}
    for beyond in (
        lambda: mine.get_object(Bucket=bucket, Key="yours/a"),
        lambda: mine.head_object(Bucket=bucket, Key="yours/a"),
        lambda: mine.put_object(Bucket=bucket, Key="yours/b", Body=b""),
        lambda: mine.put_object(Bucket=bucket, Key="mine", Body=b""),
        lambda: mine.delete_object(Bucket=bucket, Key="yours/a"),
        lambda: mine.delete_objects(Bucket=bucket, Delete=mixed),
        lambda: mine.copy_object(Bucket=bucket, Key="mine/c", CopySource=f"{bucket}/yours/a"),
        lambda: mine.create_multipart_upload(Bucket=bucket, Key="yours/b"),
        lambda: mine.list_objects_v2(Bucket=bucket, Prefix="yours/"),
        lambda: mine.list_objects_v2(Bucket=bucket, Prefix="mi"),
        lambda: mine.list_objects_v2(Bucket=bucket),
        mine.list_buckets,
    ):
        assert denied(beyond)


def test_a_token_may_name_single_objects(r2, rgw, two_prefixes):
    one = r2.make_client(r2.make_temporary_key(rgw.full, two_prefixes, objects=["yours/a"]))
    assert one.get_object(Bucket=two_prefixes, Key="yours/a")["Body"].read() == b"yours/a"
    assert denied(lambda: one.get_object(Bucket=two_prefixes, Key="yours/ab"))
    assert denied(lambda: one.list_objects_v2(Bucket=two_prefixes))


def test_a_token_is_for_one_bucket(r2, rgw, two_prefixes):
    elsewhere = r2.make_client(r2.make_temporary_key(rgw.full, "elsewhere"))
    assert denied(lambda: elsewhere.get_object(Bucket=two_prefixes, Key="mine/a"))


def test_a_read_only_token_writes_nothing(r2, rgw, two_prefixes):
    bucket = two_prefixes
    reader = r2.make_client(r2.make_temporary_key(rgw.full, bucket, scope="object-read-only"))
    assert reader.get_object(Bucket=bucket, Key="mine/a")["Body"].read() == b"mine/a"
    assert reader.list_objects_v2(Bucket=bucket)["KeyCount"] == 2
    gone = {"Objects": [{"Key": "mine/a"}]}
    for write in (
        lambda: reader.put_object(Bucket=bucket, Key="mine/b", Body=b""),
        lambda: reader.delete_object(Bucket=bucket, Key="mine/a"),
        lambda: reader.delete_objects(Bucket=bucket, Delete=gone),
        lambda: reader.create_multipart_upload(Bucket=bucket, Key="mine/b"),
    ):
        assert denied(write)


def test_actions_narrow_a_token(r2, rgw, two_prefixes):
    getter = r2.make_client(r2.make_temporary_key(rgw.full, two_prefixes, actions=["GetObject"]))
    assert getter.get_object(Bucket=two_prefixes, Key="mine/a")["Body"].read() == b"mine/a"
    assert denied(lambda: getter.list_objects_v2(Bucket=two_prefixes))


def test_a_token_cannot_exceed_its_parent(r2, rgw, two_prefixes):
    writer = r2.make_client(
        r2.make_temporary_key(rgw.read_only, two_prefixes, scope="object-read-write")
    )
    assert writer.get_object(Bucket=two_prefixes, Key="mine/a")["Body"].read() == b"mine/a"
    assert denied(lambda: writer.put_object(Bucket=two_prefixes, Key="mine/b", Body=b""))


def test_an_expired_token_is_refused_as_such(r2, rgw, two_prefixes):
    late = r2.make_client(r2.make_temporary_key(rgw.full, two_prefixes, issued=1e9, lifetime=900))
    get = refused(lambda: late.get_object(Bucket=two_prefixes, Key="mine/a"))
    assert get == (403, "ExpiredToken")


@pytest.mark.parametrize(
    "wrong",
    [
        {"aud": "elsewhere.r2.cloudflarestorage.com"},
        {"iss": "someone"},
        {"sub": ""},
        {"exp": 1e12},
        {"iat": 1e10, "exp": 1e10 + 900},
        {"exp": "tomorrow"},
    ],
)
def test_a_token_with_wrong_claims_is_refused(r2, rgw, two_prefixes, wrong):
    client = r2.make_client(r2.make_temporary_key(rgw.full, two_prefixes, **wrong))
    get = refused(lambda: client.get_object(Bucket=two_prefixes, Key="mine/a"))
    assert get == (401, "Unauthorized")


def test_a_forged_token_and_a_wrong_secret_are_refused(r2, rgw, two_prefixes):
    good = r2.make_temporary_key(rgw.full, two_prefixes)
    forged = r2.make_temporary_key(Key(rgw.full.access_key_id, "guessed"), two_prefixes)
    other_secret = Key(good.access_key_id, forged.secret_access_key, good.session_token)
    parents_secret = Key(good.access_key_id, rgw.full.secret_access_key, good.session_token)
    get = {"Bucket": two_prefixes, "Key": "mine/a"}
    assert refused(lambda: r2.make_client(forged).get_object(**get))[0] == 401
    for key in (other_secret, parents_secret):
        refusal = refused(lambda key=key: r2.make_client(key).get_object(**get))
        assert refusal == (403, "SignatureDoesNotMatch")


def test_a_url_presigned_with_a_token_works_until_it_is_changed(r2, rgw, two_prefixes):
    mine = r2.make_client(r2.make_temporary_key(rgw.full, two_prefixes, prefixes=["mine/"]))
    url = mine.generate_presigned_url("get_object", {"Bucket": two_prefixes, "Key": "mine/a"})
    assert fetch(r2, url) == 200
    assert fetch(r2, url.replace("mine/a", "mine/b")) == 403


def fetch(r2: R2Proxy, url: str) -> int:
    context = ssl.create_default_context(cafile=r2.ca_file)
    try:
        with urlopen(url, context=context) as answer:
            answer.read()
            return answer.status
    except HTTPError as error:
        with error:
            return error.code


# Faults


@pytest.fixture
def stored(behind: Any, bucket: str) -> str:
    behind.put_object(Bucket=bucket, Key="there", Body=bytes(1000))
    return bucket


def fired(r2: R2Proxy) -> dict[str, int]:
    return {kind: count for kind, count in r2.count_fired().items() if count}


@pytest.mark.parametrize(
    ("kind", "status"), [(Fault.ERROR500, 500), (Fault.ERROR503, 503), (Fault.ERROR429, 429)]
)
def test_an_error_is_answered_once_and_nothing_done(r2, s3, behind, bucket, kind, status):
    r2.fail_next(kind, method="PUT", retry_after=3)
    with pytest.raises(ClientError) as error:
        s3.put_object(Bucket=bucket, Key="a", Body=bytes(9 * MIB))
    answer: Any = error.value.response.get("ResponseMetadata")
    assert answer["HTTPStatusCode"] == status
    assert answer["HTTPHeaders"].get("retry-after") == (None if status == 500 else "3")
    assert keys(behind, bucket) == []
    s3.put_object(Bucket=bucket, Key="a", Body=b"a")
    assert fired(r2) == {kind: 1}


def test_a_cut_get_ends_midway(r2, s3, stored):
    r2.fail_next(Fault.CUT, method="GET")
    body = s3.get_object(Bucket=stored, Key="there")["Body"]
    with pytest.raises(CUT_SHORT):
        body.read()
    assert r2.list_requests()[-1]["sent"] == 500
    assert fired(r2) == {"cut": 1}
    assert s3.get_object(Bucket=stored, Key="there")["Body"].read() == bytes(1000)


@pytest.mark.parametrize("size", [1, 1000, 9 * MIB])
def test_a_cut_put_is_not_done(r2, s3, behind, bucket, size):
    r2.fail_next(Fault.CUT, method="PUT")
    with pytest.raises(CLOSED):
        s3.put_object(Bucket=bucket, Key="a", Body=bytes(size))
    assert keys(behind, bucket) == []
    assert fired(r2) == {"cut": 1}


def test_a_lost_put_is_done_though_nobody_said_so(r2, s3, behind, bucket):
    r2.fail_next(Fault.LOST, method="PUT")
    with pytest.raises(CLOSED):
        s3.put_object(Bucket=bucket, Key="a", Body=b"1")
    assert keys(behind, bucket) == ["a"]
    assert fired(r2) == {"lost": 1}
    assert r2.list_requests()[-1]["status"] is None


def test_a_lost_multipart_completion_is_done(r2, s3, behind, bucket):
    r2.fail_next(Fault.LOST, operation="CompleteMultipartUpload")
    with pytest.raises(CLOSED):
        multipart(s3, bucket, [5 * MIB, 1])
    assert keys(behind, bucket) == ["large"]


def test_a_stall_says_nothing_and_closes(r2, s3, behind, bucket):
    r2.fail_next(Fault.STALL, stall_seconds=0.01)
    with pytest.raises(CLOSED):
        s3.put_object(Bucket=bucket, Key="a", Body=b"1")
    assert keys(behind, bucket) == []
    assert fired(r2) == {"stall": 1}


def test_a_fault_that_cannot_befall_a_request_waits_for_another(r2, s3, stored):
    r2.fail_next(Fault.CUT)
    s3.head_object(Bucket=stored, Key="there")
    assert refused(lambda: s3.get_object(Bucket=stored, Key="missing"))[0] == 404
    assert (fired(r2), r2.count_pending()) == ({}, 1)
    with pytest.raises(CUT_SHORT):
        s3.get_object(Bucket=stored, Key="there")["Body"].read()
    assert (fired(r2), r2.count_pending()) == ({"cut": 1}, 0)


def test_faults_can_be_kept_to_a_method_and_a_key(r2, s3, stored):
    r2.set_faults(Faults(error500=1, methods=("PUT",), key_contains="some"))
    s3.get_object(Bucket=stored, Key="there")["Body"].read()
    s3.put_object(Bucket=stored, Key="another", Body=b"")
    assert refused(lambda: s3.put_object(Bucket=stored, Key="some", Body=b""))[0] == 500


def test_the_same_seed_brings_the_same_faults(r2, s3, stored):
    def statuses(seed: int) -> list[int | None]:
        r2.reset()
        r2.set_faults(Faults(error500=0.3, error503=0.2, seed=seed))
        for _ in range(30):
            with suppress(ClientError):
                s3.head_object(Bucket=stored, Key="there")
        seen = [one["status"] for one in r2.list_requests()]
        assert fired(r2) == {"error500": seen.count(500), "error503": seen.count(503)}
        return seen

    assert statuses(1) == statuses(1) != statuses(2)


def test_each_kind_befalls_requests_as_often_as_was_asked():
    faults = Faults(**{kind.value: 0.1 for kind in Fault}, seed=3)
    box = FaultBox()
    box.use(faults)
    plans = [box.choose("GET", "GetObject", "bucket/key", Fault) for _ in range(10_000)]
    for kind in Fault:
        assert 900 < sum(plan is not None and plan.kind is kind for plan in plans) < 1100
    with pytest.raises(ValueError, match="probabilities"):
        Faults(cut=0.7, lost=0.7)


def test_a_fault_that_was_asked_for_comes_before_chance():
    box = FaultBox()
    box.use(Faults(error500=1))
    box.fail_next(NextFault(Fault.LOST, 2, method="PUT"))
    kinds = [box.choose(method, "Any", "b/k", Fault) for method in ("GET", "PUT", "PUT", "PUT")]
    assert [plan and plan.kind for plan in kinds] == [
        Fault.ERROR500,
        Fault.LOST,
        Fault.LOST,
        Fault.ERROR500,
    ]


def test_each_request_is_remembered_in_order_with_its_bytes(r2, s3, stored):
    s3.put_object(Bucket=stored, Key="new", Body=b"12")
    s3.get_object(Bucket=stored, Key="there")["Body"].read()
    seen = r2.list_requests()
    assert [(one["operation"], one["status"], one["received"], one["sent"]) for one in seen] == [
        ("PutObject", 200, 2, 0),
        ("GetObject", 200, 0, 1000),
    ]
    assert seen[0]["arrived"] < seen[1]["arrived"]
    r2.reset()
    assert r2.list_requests() == []


@pytest.fixture(scope="module", autouse=True)
def _nothing_goes_wrong_inside(r2: R2Proxy) -> Iterator[None]:
    yield
    assert r2.log.read_text() == ""
