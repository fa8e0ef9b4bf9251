"""Check of each upload by the store: a CRC-64/NVME over TLS, otherwise a signed SHA-256."""

import base64
import hashlib
import itertools
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import awscrt.checksums
import pytest

from millrace import errors
from millrace.storage import (
    Store,
    create,
    exists,
    list_objects,
    list_uploads,
    matches_stored_checksum,
    open_store,
    open_writer,
    put,
    read,
    signed,
)
from millrace.storage.signed import describe_body_check, has_crc_check
from millrace.testing.crc64 import Crc64
from millrace.testing.faults import Fault
from millrace.testing.r2 import R2Proxy
from tests.stores import make_spec

pytestmark = pytest.mark.contract

MIB = 1 << 20
UNSIGNED = "UNSIGNED-PAYLOAD"
CRC = "CRC-64/NVME"
SHA256 = "signed SHA-256"


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed, "_crc_checks", {})
    monkeypatch.setattr(signed, "_refused_trials", set())


@pytest.fixture
def store(r2: R2Proxy, request: pytest.FixtureRequest) -> Store:
    return open_store(make_spec("r2", request))


@pytest.fixture
def data() -> bytes:
    return secrets.token_bytes(3 * MIB + 7)


@pytest.fixture(params=[create, put], ids=["create", "put"])
def write(request: pytest.FixtureRequest) -> Callable[[Store, str, bytes], None]:
    return request.param


def payloads(r2: R2Proxy, operation: str = "PutObject") -> list[str]:
    """Return how each body was signed, in order."""
    return [one["payload"] for one in r2.list_requests() if one["operation"] == operation]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_crc_is_that_of_the_specification_whatever_the_pieces() -> None:
    known = Crc64()
    known.update(b"123456789")
    assert known.compute() == 0xAE8B14860A799888
    for size in (0, 1, 7, 8, 9, 256, 257, 4095, 4096, 262_143, 262_144, 262_145, 2 * MIB + 300):
        data = secrets.token_bytes(size)
        for step in (1 << 30, 100_001, 9973):
            pieces = Crc64()
            for at in range(0, size, step):
                pieces.update(data[at : at + step])
            assert pieces.compute() == awscrt.checksums.crc64nvme(data), (size, step)


def test_over_tls_no_sha256_of_a_body_is_computed(store, r2, data, write, monkeypatch):
    hashed: list[int] = []
    hashes: Any = Mock(wraps=hashlib)
    hashes.sha256 = lambda given=b"": hashed.append(len(given)) or hashlib.sha256(given)
    monkeypatch.setattr(signed, "hashlib", hashes)
    for number in range(3):
        write(store, f"a{number}", data)
    assert payloads(r2) == [UNSIGNED] * 3
    assert max(hashed) < 10_000  # those of the signatures
    assert has_crc_check(store)
    assert describe_body_check(store) == f"The store checks a {CRC} of each upload."
    assert read(store, "a2") == data


def test_a_body_that_changed_on_its_way_is_refused_and_sent_again(store, r2, data, write):
    for key in ("first", "second"):
        r2.fail_next(Fault.DAMAGE, method="PUT")
        write(store, key, data)
        assert read(store, key) == data
    assert payloads(r2) == [UNSIGNED] * 4
    assert r2.count_refusals() == {"BadDigest": 2}
    assert has_crc_check(store)


def test_a_signed_body_that_changed_on_its_way_is_refused_and_sent_again(
    request, rgw, r2, data, write, tmp_path
):
    with R2Proxy.start(rgw.endpoint, {}, tmp_path, tls=False) as plain:
        spec = make_spec("r2", request).model_copy(update={"endpoint": plain.endpoint})
        store = open_store(spec.model_copy(update={"ca_file": None}))
        for size in (100, len(data)):  # by obstore, and by us
            plain.fail_next(Fault.DAMAGE, method="PUT")
            write(store, f"{size}", data[:size])
            assert read(store, f"{size}") == data[:size]
        assert payloads(plain) == [sha256(data[:100])] * 2 + [sha256(data)] * 2
        assert plain.count_refusals() == {"BadDigest": 2}
        assert not has_crc_check(store)
        assert describe_body_check(store) == f"The store checks a {SHA256} of each upload."


def test_rgw_itself_refuses_a_signed_body_that_changed(request, r2, rgw, data, monkeypatch):
    """The signature alone is enough, without a checksum beside it."""
    r2.set_rules(checks_crc=False, write_interval=0)
    store = open_store(make_spec("r2", request))
    put(store, "first", data)
    monkeypatch.setattr(signed, "_SHA256_HEADER", "x-amz-meta-unused")
    r2.fail_next(Fault.DAMAGE, method="PUT")
    create(store, "second", data)
    assert [one["status"] for one in r2.list_requests() if one["method"] == "PUT"] == [
        200,
        400,
        200,
    ]
    assert read(store, "second") == data


def test_damage_that_does_not_end_is_raised(store, r2, data, write):
    r2.fail_next(Fault.DAMAGE, 1000, method="PUT")
    hurried = store.with_retry_timeout(timedelta(seconds=1))
    with pytest.raises(errors.UnavailableError, match="BadDigest"):
        write(hurried, "damaged", data)
    r2.reset()
    assert not exists(store, "damaged")


def test_a_store_that_ignores_the_crc_gets_signed_bodies_from_the_second_on(store, r2, data, write):
    r2.set_rules(checks_crc=False)
    for number in range(3):
        write(store, f"a{number}", data)
    assert payloads(r2) == [UNSIGNED, sha256(data), sha256(data)]
    assert not has_crc_check(store)
    assert describe_body_check(store) == f"The store checks a {SHA256} of each upload."
    r2.fail_next(Fault.DAMAGE, method="PUT")
    write(store, "damaged", data)
    assert read(store, "damaged") == data


def test_a_store_that_refuses_unsigned_bodies_gets_one_more_request(store, r2, data, write):
    r2.set_rules(accepts_unsigned=False)
    for number in range(3):
        write(store, f"a{number}", data)
    assert payloads(r2) == [UNSIGNED, *[sha256(data)] * 3]
    assert r2.count_refusals() == {"AccessDenied": 1}
    assert not has_crc_check(store)
    assert read(store, "a0") == data


def test_a_stopped_upload_leaves_nothing(store, r2, data):
    for rules in ({}, {"accepts_unsigned": False}):
        r2.set_rules(**rules)
        asked = itertools.count()
        with pytest.raises(errors.StoppedError):
            create(store, "stopped", data, is_stopped=lambda asked=asked: next(asked) > 2)
    assert not exists(store, "stopped")
    assert list(list_uploads(store)) == []
    create(store, "stopped", data)
    assert read(store, "stopped") == data


def test_an_object_that_is_there_stays_whatever_is_checked(store, r2, data):
    for number, rules in enumerate([{}, {"checks_crc": False}, {"accepts_unsigned": False}]):
        r2.reset()
        r2.set_rules(write_interval=0, **rules)
        signed._crc_checks.clear()
        create(store, f"a{number}", data)
        for _ in range(2):
            with pytest.raises(errors.ExistsError, match=f"a{number}"):
                create(store, f"a{number}", bytes(len(data)))
        assert read(store, f"a{number}") == data


def test_a_lost_answer_teaches_nothing_and_the_object_is_there(store, r2, data):
    r2.fail_next(Fault.LOST, method="PUT")
    r2.set_rules(write_interval=0)
    with pytest.raises(errors.ExistsError):
        create(store, "lost", data)
    assert not has_crc_check(store)
    create(store, "next", data)
    assert has_crc_check(store)
    assert read(store, "lost") == data


@pytest.mark.soak
def test_credentials_without_the_right_do_not_switch_the_crc_off(request, store, r2, data, write):
    reader = open_store(make_spec("r2", request, "read_only"))
    for known in (False, True):
        with pytest.raises(errors.DeniedError, match="may list this bucket, but not write here"):
            write(reader, "denied", data)
        assert has_crc_check(store) == known
        assert signed._refused_trials == set()
        write(store, f"{known}", data)
        assert has_crc_check(store)
    assert not exists(store, "denied")


def test_a_bucket_teaches_nothing_about_another(request, store, r2, rgw, data):
    create(store, "a", data)
    other = rgw.create_bucket(f"bucket-{secrets.token_hex(6)}")
    spec = store.spec.model_copy(update={"url": store.url.replace(store.location.bucket, other)})
    assert has_crc_check(store)
    assert not has_crc_check(open_store(spec))


def test_the_stored_checksum_shows_whether_the_bytes_are_these(store, r2, data, write):
    assert not matches_stored_checksum(store, "a", data)  # no object
    write(store, "a", data)
    assert matches_stored_checksum(store, "a", data)
    assert matches_stored_checksum(store, "a", memoryview(bytearray(data)))
    assert not matches_stored_checksum(store, "a", data[:-1])
    assert not matches_stored_checksum(store, "a", bytes(len(data)))
    with open_writer(store, "a", part_size=5 * MIB) as writer:  # without a checksum of the whole
        writer.write(data * 4)
    assert not matches_stored_checksum(store, "a", data * 4)


def test_a_store_that_keeps_no_checksum_matches_nothing(store, request, r2, data):
    r2.set_rules(checks_crc=False)
    put(store, "a", data)
    plain = open_store(make_spec("rgw", request))
    put(plain, "b", data)
    assert not matches_stored_checksum(store, "a", data)
    assert not matches_stored_checksum(plain, "b", data)


def test_a_writer_uses_the_crc_once_it_is_known_to_be_checked(store, r2, data):
    def write_parts(key: str) -> list[str]:
        r2.reset()
        with open_writer(store, key, part_size=5 * MIB) as writer:
            writer.write(data * 4)
        assert read(store, key) == data * 4
        return payloads(r2, "UploadPart")

    assert UNSIGNED not in write_parts("before")
    create(store, "a", data)
    assert write_parts("after") == [UNSIGNED] * 3
    r2.fail_next(Fault.DAMAGE, operation="UploadPart")
    with open_writer(store, "damaged", part_size=5 * MIB) as writer:
        writer.write(data * 4)
    assert read(store, "damaged") == data * 4
    assert r2.count_refusals() == {"BadDigest": 1}
    assert list(list_uploads(store)) == []


def test_a_part_whose_damage_does_not_end_is_raised(store, r2, data):
    r2.fail_next(Fault.DAMAGE, 1000, operation="UploadPart")
    hurried = store.with_retry_timeout(timedelta(seconds=1))
    with (
        pytest.raises(errors.UnavailableError, match=r"SHA256Mismatch|BadDigest"),
        open_writer(hurried, "bad", part_size=5 * MIB) as writer,
    ):
        writer.write(data * 4)
    r2.reset()
    assert [stat.key for stat in list_objects(store)] == []
    assert list(list_uploads(store)) == []


def test_small_bodies_are_signed(store, r2, data):
    create(store, "a", data)
    for write, size in itertools.product((create, put), (0, 1, 1000)):
        r2.reset()
        write(store, f"{write.__name__} {size}", data[:size])
        assert payloads(r2) == [sha256(data[:size])]


def test_the_stand_in_keeps_the_crc_and_checks_the_one_of_others(r2, rgw, bucket, data):
    """The stand-in is asked by boto3, without Millrace."""
    s3 = r2.make_client(rgw.full)
    r2.set_rules(write_interval=0)
    crc = base64.b64encode(awscrt.checksums.crc64nvme(data).to_bytes(8, "big")).decode()
    answer = s3.put_object(Bucket=bucket, Key="a", Body=data, ChecksumCRC64NVME=crc)
    assert (answer["ChecksumCRC64NVME"], answer["ChecksumType"]) == (crc, "FULL_OBJECT")
    kept = s3.head_object(Bucket=bucket, Key="a", ChecksumMode="ENABLED")
    assert (kept["ChecksumCRC64NVME"], kept["ChecksumType"]) == (crc, "FULL_OBJECT")
    assert "ChecksumCRC64NVME" not in s3.head_object(Bucket=bucket, Key="a")
    with pytest.raises(s3.exceptions.ClientError, match="BadDigest"):
        s3.put_object(Bucket=bucket, Key="b", Body=data + b"1", ChecksumCRC64NVME=crc)
    s3.put_object(Bucket=bucket, Key="a", Body=b"other")
    assert "ChecksumCRC64NVME" not in s3.head_object(Bucket=bucket, Key="a", ChecksumMode="ENABLED")
