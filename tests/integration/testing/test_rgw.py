"""Behaviour of a real Ceph RGW that other tests rely on."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from millrace.testing.rgw import RGW


def refusal(error: pytest.ExceptionInfo[ClientError]) -> int:
    answer: Any = error.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"]


@pytest.fixture
def s3(rgw: RGW) -> Any:
    return rgw.make_client(rgw.full)


def allow(actions: list[str], *resources: str, **condition: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": resources, **condition}


def test_an_object_comes_back_whole_and_by_range(s3, bucket):
    s3.put_object(Bucket=bucket, Key="a/b", Body=b"0123456789")
    assert s3.get_object(Bucket=bucket, Key="a/b")["Body"].read() == b"0123456789"
    part = s3.get_object(Bucket=bucket, Key="a/b", Range="bytes=2-4")
    assert part["ContentRange"] == "bytes 2-4/10"
    assert part["Body"].read() == b"234"


def test_create_if_absent_has_exactly_one_winner(s3, bucket):
    def put(number: int) -> int:
        with suppress(ClientError):
            s3.put_object(Bucket=bucket, Key="once", Body=b"%d" % number, IfNoneMatch="*")
            return 1
        return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(put, range(8))) == 1


def test_a_wrong_secret_and_an_unknown_key_are_refused(rgw, bucket):
    wrong = type(rgw.full)(rgw.full.access_key_id, "wrong")
    unknown = type(rgw.full)("unknown", rgw.full.secret_access_key)
    for key in (wrong, unknown):
        with pytest.raises(ClientError) as error:
            rgw.make_client(key).list_objects_v2(Bucket=bucket)
        assert refusal(error) == 403


def test_the_read_only_key_reads_and_writes_nothing(rgw, s3, bucket):
    s3.put_object(Bucket=bucket, Key="a", Body=b"a")
    reader = rgw.make_client(rgw.read_only)
    assert reader.get_object(Bucket=bucket, Key="a")["Body"].read() == b"a"
    assert reader.list_objects_v2(Bucket=bucket)["KeyCount"] == 1
    for write in (
        lambda: reader.put_object(Bucket=bucket, Key="b", Body=b""),
        lambda: reader.delete_object(Bucket=bucket, Key="a"),
        lambda: reader.create_multipart_upload(Bucket=bucket, Key="b"),
    ):
        with pytest.raises(ClientError) as error:
            write()
        assert refusal(error) == 403


def test_the_other_user_reaches_nothing_of_ours(rgw, s3, bucket):
    s3.put_object(Bucket=bucket, Key="a", Body=b"a")
    other = rgw.make_client(rgw.other)
    for reach in (
        lambda: other.get_object(Bucket=bucket, Key="a"),
        lambda: other.list_objects_v2(Bucket=bucket),
        lambda: other.put_object(Bucket=bucket, Key="b", Body=b""),
    ):
        with pytest.raises(ClientError) as error:
            reach()
        assert refusal(error) == 403


def test_the_access_log_has_each_request_that_was_answered(rgw, s3, bucket):
    before = len(rgw.list_requests())
    s3.put_object(Bucket=bucket, Key="logged", Body=b"123")
    s3.get_object(Bucket=bucket, Key="logged")["Body"].read()
    lines = [line for line in rgw.list_requests()[before:] if bucket in line]
    assert [line.split('"')[1] for line in lines] == [
        f"PUT /{bucket}/logged HTTP/1.1",
        f"GET /{bucket}/logged HTTP/1.1",
    ]


@pytest.fixture(scope="session")
def role(rgw: RGW) -> str:
    return rgw.create_role("worker")


def test_a_session_policy_holds_credentials_to_a_prefix(rgw, s3, bucket, role):
    for name in ("mine/a", "yours/a"):
        s3.put_object(Bucket=bucket, Key=name, Body=b"a")
    arn = f"arn:aws:s3:::{bucket}"
    session = rgw.make_client(
        rgw.assume_role(
            role,
            allow(["s3:GetObject", "s3:PutObject", "s3:DeleteObject"], f"{arn}/mine/*"),
            allow(
                ["s3:ListBucket"],
                arn,
                Condition={"StringLike": {"s3:prefix": ["mine/*"]}},
            ),
        )
    )
    assert session.get_object(Bucket=bucket, Key="mine/a")["Body"].read() == b"a"
    session.put_object(Bucket=bucket, Key="mine/b", Body=b"b", IfNoneMatch="*")
    assert session.list_objects_v2(Bucket=bucket, Prefix="mine/")["KeyCount"] == 2
    session.delete_object(Bucket=bucket, Key="mine/b")
    for beyond in (
        lambda: session.get_object(Bucket=bucket, Key="yours/a"),
        lambda: session.put_object(Bucket=bucket, Key="yours/b", Body=b""),
        lambda: session.delete_object(Bucket=bucket, Key="yours/a"),
        lambda: session.copy_object(Bucket=bucket, Key="mine/c", CopySource=f"{bucket}/yours/a"),
        lambda: session.list_objects_v2(Bucket=bucket, Prefix="yours/"),
        lambda: session.list_objects_v2(Bucket=bucket),
    ):
        with pytest.raises(ClientError) as error:
            beyond()
        assert refusal(error) == 403


def test_a_session_policy_never_allows_a_multi_object_delete(rgw, s3, bucket, role):
    s3.put_object(Bucket=bucket, Key="mine/a", Body=b"a")
    everywhere = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    session = rgw.make_client(rgw.assume_role(role, allow(["s3:DeleteObject"], *everywhere)))
    done = session.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "mine/a"}]})
    assert done["Errors"][0]["Code"] == "AccessDenied"
    session.delete_object(Bucket=bucket, Key="mine/a")
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_missing_packages_are_named_with_the_line_that_installs_them(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"apt-get install .*radosgw"):
        RGW.start(tmp_path / "rgw")


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path):
    (tmp_path / "letter.txt").write_text("dear diary")
    with pytest.raises(RuntimeError, match="use another folder"):
        RGW.start(tmp_path)
