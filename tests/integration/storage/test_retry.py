import gzip
import os
from datetime import timedelta

import pytest
from obstore.exceptions import GenericError
from pydantic import SecretStr

from millrace import errors
from millrace.retry_after import parse_retry_after
from millrace.storage import (
    Credentials,
    create,
    delete,
    head,
    list_objects,
    open_store,
    open_writer,
    put,
    read,
    read_range,
    stream,
)
from millrace.storage.retry import translate_error
from millrace.testing.faults import Fault
from millrace.testing.process import find_free_ports
from tests.stores import make_spec


@pytest.fixture
def store(request):
    return open_store(make_spec("r2", request))


@pytest.mark.parametrize("kind", [Fault.ERROR500, Fault.ERROR503, Fault.CUT, Fault.LOST])
def test_a_fault_that_passes_is_not_seen(kind, store, r2):
    data = bytes(range(256)) * 5000
    r2.fail_next(kind, 1, method="PUT")
    put(store, "a", data)
    r2.fail_next(kind, 2, method="GET")
    assert b"".join(stream(store, "a", block_size=300_000)) == data
    assert r2.count_fired()[kind] == 3
    assert r2.count_pending() == 0


def test_retry_after_is_honoured_by_every_later_request(store, r2):
    put(store, "a", b"data")
    r2.reset()
    # The HEAD after the first refusal reads the header that the refusal itself does not show.
    r2.fail_next(Fault.ERROR503, 1, method="GET", retry_after=2)
    r2.fail_next(Fault.ERROR503, 1, method="HEAD", retry_after=2)
    assert read(store, "a") == b"data"
    seen = [(r["method"], r["status"], r["arrived"]) for r in r2.list_requests()]
    assert [(method, status) for method, status, _ in seen] == [
        ("GET", 503),
        ("HEAD", 503),
        ("GET", 200),
    ]
    assert seen[2][2] - seen[1][2] >= 2


def test_a_store_that_keeps_failing_is_given_up_when_the_budget_is_spent(request, r2):
    store = open_store(make_spec("r2", request), retry_timeout=timedelta(milliseconds=300))
    r2.fail_next(Fault.ERROR500, 1000)
    with pytest.raises(errors.UnavailableError, match=r"given up after \d+ tries"):
        read(store, "a")
    assert r2.count_fired()[Fault.ERROR500] > 1


def test_a_dead_endpoint_is_named_at_once_and_tried_until_the_budget_is_spent(caplog):
    (port,) = find_free_ports(1)
    store = open_store(
        "s3://bucket",
        endpoint=f"http://127.0.0.1:{port}",
        credentials=Credentials(access_key_id="id", secret_access_key=SecretStr("secret")),
        retry_timeout=timedelta(seconds=2),
    )
    with pytest.raises(errors.UnavailableError, match=r"given up after \d+ tries"):
        list(list_objects(store))
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("mill")]
    where = f"http://127.0.0.1:{port}"
    assert said == f"{where} does not answer (Connection refused). Trying again for 2 s."


def _denied(store, call, *arguments):
    with pytest.raises(errors.DeniedError) as refused:
        call(store, *arguments)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["rgw", "r2"])
def test_a_key_that_may_only_read_is_told_apart_from_a_wrong_one(kind, request, r2):
    reader = open_store(make_spec(kind, request, "read_only"))
    assert "They may list this bucket, but not write here" in _denied(reader, put, "a", b"x")
    spec = make_spec(kind, request)
    wrong = spec.credentials.model_copy(update={"secret_access_key": SecretStr("x" * 32)})
    store = open_store(spec.model_copy(update={"credentials": wrong}))
    for call in ((put, "a", b"x"), (read, "a")):
        assert "the key is right" not in _denied(store, *call)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("InvalidAccessKeyId", "does not know the access key id"),
        ("SignatureDoesNotMatch", "secret does not belong to the access key id"),
        ("RequestTimeTooSkewed", "clock of this machine is wrong"),
    ],
)
def test_why_a_store_refuses_a_key_is_said_where_it_says_so(code, why):
    # As obstore hands on what S3 and R2 answer; Ceph says AccessDenied of all of them.
    answer = GenericError(
        "Generic S3 error: Error performing GET http://127.0.0.1:9/b/a in 1ms - Server returned "
        f"non-2xx status code: 403 Forbidden: <Error><Code>{code}</Code></Error>"
    )
    assert why in str(translate_error(answer, open_store("s3://b"), "a"))


def test_no_key_at_all_is_told_apart_from_a_wrong_one(rgw, bucket, monkeypatch):
    before = open_store(f"s3://{bucket}", endpoint=rgw.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rgw.full.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rgw.full.secret_access_key)
    assert delete(before, ["a/"]) == []  # by boto3, which keeps the key of its first session
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    # Nobody listens there: as the metadata service of EC2 on any other machine.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store(f"s3://{bucket}", endpoint=rgw.endpoint)
    for call in ((read, "a"), (put, "a", b"x")):
        said = _denied(store, *call)
        assert "there are no credentials" in said
        assert "AWS_ACCESS_KEY_ID" in said
    assert "there are no credentials" in delete(store, ["a"])[0].reason


def test_nothing_is_tried_again_that_cannot_pass(store, r2):
    with pytest.raises(errors.NotFoundError):
        read(store, "none")
    assert len(r2.list_requests()) == 1


def test_a_create_whose_answer_was_lost_is_met_again(store, r2):
    r2.fail_next(Fault.LOST, 1, method="PUT")
    with pytest.raises(errors.ExistsError):
        create(store, "a", b"mine")
    assert read(store, "a") == b"mine"


def test_two_writes_a_second_to_one_key_are_waited_for(store, r2):
    for i in range(3):
        put(store, "hot", str(i).encode())
    assert read(store, "hot") == b"2"
    assert r2.count_refusals()


def test_an_object_that_google_decompresses_is_named_at_once(request, gcs):
    store, body = open_store(make_spec("gcs", request)), gzip.compress(b"a" * 50)
    for key, about in (("a", {}), ("b", {"Cache-Control": "no-transform"})):
        with open_writer(store, key, attributes={"Content-Encoding": "gzip", **about}) as writer:
            writer.write(body)
    before = len(gcs.list_requests())
    for act in (read, head, lambda store, key: read_range(store, key, 3, 7)):
        with pytest.raises(errors.MillraceError, match=r"/a: .*Content-Encoding: gzip") as refusal:
            act(store, "a")
        assert not isinstance(refusal.value, errors.UnavailableError)
    assert len(gcs.list_requests()) == before + 3
    assert read(store, "b") == body
    assert head(store, "b").size == len(body)
    assert read_range(store, "b", 3, 7) == body[3:7]


def test_retry_after_is_a_number_or_a_date():
    assert parse_retry_after("7") == 7
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert parse_retry_after("soon") == 0
    assert parse_retry_after(f"Mon, 01 Jan {'9' * 20} 00:00:00 GMT") == 0
    assert parse_retry_after("") == 0
