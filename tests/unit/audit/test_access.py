"""Verdicts of an audit on answers that a server gives only by chance."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from millrace import errors
from millrace.audit import (
    AccessVerdict,
    AuditedRole,
    AuditReport,
    AuditSettings,
    Operation,
    RequestOutcome,
    audit,
)
from millrace.storage import Credentials, Right, Store, StoreSpec
from millrace.storage.clients import make_full_key

ALL = frozenset({"put", "get", "head", "delete", "list"})


@dataclass
class Answers:
    """Objects in buckets, and what each key may do there.

    Attributes:
        rights: Bucket, prefix and allowed requests, by the id of the key.
        silent: Buckets that do not answer.
        lost: Buckets that write the first object, and then do not answer any more.
        objects: Objects by bucket and key.
    """

    rights: dict[str, list[tuple[str, str, frozenset[str]]]]
    silent: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    objects: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def find(self, store: Store, key: str, request: str) -> tuple[str, str]:
        assert store.is_s3_compatible
        assert store.spec.credentials is not None
        bucket, full = store.location.bucket, make_full_key(store, key)
        if bucket in self.silent:
            raise errors.UnavailableError(f"{bucket} does not answer")
        for where, prefix, allowed in self.rights[store.spec.credentials.access_key_id]:
            if where == bucket and full.startswith(prefix) and request in allowed:
                return bucket, full
        raise errors.DeniedError(f"{request} of {bucket}/{full} is denied")

    def put(self, store: Store, key: str, data: bytes) -> None:
        self.objects[self.find(store, key, "put")] = data
        if store.location.bucket in self.lost:
            self.silent.add(store.location.bucket)
            raise errors.UnavailableError("the answer is lost")

    def create(self, store: Store, key: str, data: bytes) -> None:
        if self.find(store, key, "put") in self.objects:
            raise errors.ExistsError(key)
        self.put(store, key, data)

    def read(self, store: Store, key: str, *, max_size: int) -> bytes:
        del max_size
        return self.objects[self.find(store, key, "get")]

    def head(self, store: Store, key: str) -> None:
        self.find(store, key, "head")

    def exists(self, store: Store, key: str) -> bool:
        return self.find(store, key, "head") in self.objects

    def delete_one(self, store: Store, key: str) -> None:
        self.objects.pop(self.find(store, key, "delete"), None)

    def list_objects(self, store: Store, prefix: str) -> Iterator[object]:
        self.find(store, prefix, "list")
        return iter(())

    def upload(self, store: Store, key: str) -> None:
        self.put(store, key, b"parts")

    def abort(self, store: Store, write_store: Store | None, key: str) -> None:
        del write_store
        self.find(store, key, "put")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    found = Answers({})
    for name in ("put", "create", "read", "head", "exists", "delete_one", "list_objects"):
        monkeypatch.setattr(f"millrace.audit.access.{name}", getattr(found, name))
    monkeypatch.setattr("millrace.audit.access._upload_multipart", found.upload)
    monkeypatch.setattr("millrace.audit.access._abort_upload", found.abort)
    return found


def make_pair(key: str) -> Credentials:
    return Credentials(access_key_id=key, secret_access_key=SecretStr("secret"))


def make_role(
    url: str, *, reader: str | None = None, writer: str | None = None, prefix: str = ""
) -> AuditedRole:
    return AuditedRole(
        store=StoreSpec(url=url),
        prefix=prefix,
        read_credentials=make_pair(reader) if reader else None,
        write_credentials=make_pair(writer) if writer else None,
    )


def find(report: AuditReport, operation: Operation, right: Right = Right.WRITE) -> RequestOutcome:
    (outcome,) = (
        one.actual
        for one in report.findings
        if (one.role, one.right, one.operation) == ("one", right, operation)
    )
    return outcome


@pytest.mark.parametrize("others", [["denying", "silent"], ["silent", "denying"]])
def test_one_denial_does_not_prove_that_other_buckets_are_denied(
    answers: Answers, others: list[str]
) -> None:
    answers.rights = {"writer": [("own", "", ALL), ("silent", "", ALL)]}
    answers.silent = {"silent"}
    roles = {"one": make_role("s3://own", writer="writer")}
    roles |= {name: make_role(f"s3://{name}") for name in others}
    report = audit(AuditSettings(roles=roles))
    assert find(report, Operation.OTHER_BUCKET) is RequestOutcome.UNREACHABLE
    assert not report.is_proven


@pytest.mark.parametrize("url", ["gs://other", "FOLDER"])
def test_a_store_that_takes_no_key_pair_is_not_tried(
    answers: Answers, url: str, tmp_path: Path
) -> None:
    answers.rights = {"writer": [("own", "", ALL)]}
    roles = {
        "one": make_role("s3://own", writer="writer"),
        "two": make_role(url.replace("FOLDER", (tmp_path / "folder").as_uri())),
    }
    report = audit(AuditSettings(roles=roles))
    assert report.is_proven, report.failures
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("url", ["gs://own", "file:///own", "/own"])
def test_credentials_of_a_store_that_takes_no_key_pair_are_refused(url: str) -> None:
    for one in ({"reader": "reader"}, {"writer": "writer"}):
        with pytest.raises(ValidationError, match="only key pairs of s3:// and r2:// are audited"):
            make_role(url, **one)


def test_a_prefix_may_end_with_a_slash(answers: Answers) -> None:
    answers.rights = {"writer": [("own", "mine/", ALL)]}
    role = make_role("s3://own", writer="writer", prefix="mine/")
    assert role.prefix == "mine"
    report = audit(AuditSettings(roles={"one": role}))
    assert report.is_proven, report.failures


@pytest.mark.parametrize("prefix", ["runs", "runs#a", "runs?a", "50%", "a b", "ä", "a%23b/c"])
def test_a_key_of_the_whole_bucket_is_excessive_whatever_the_prefix_of_its_role(
    answers: Answers, prefix: str
) -> None:
    role = make_role("s3://own", writer="writer")
    role = role.model_copy(update={"store": role.store.with_prefix(prefix)})
    answers.rights = {"writer": [("own", "", ALL)]}
    report = audit(AuditSettings(roles={"one": role}))
    assert find(report, Operation.OUTSIDE) is RequestOutcome.ALLOWED
    assert not report.is_proven
    answers.rights = {"writer": [("own", f"{prefix}/", ALL)]}
    report = audit(AuditSettings(roles={"one": role}))
    assert report.is_proven, report.failures


def test_a_role_within_the_prefix_of_another_is_no_other_bucket_whatever_its_url(
    answers: Answers,
) -> None:
    account = "0123456789abcdef0123456789abcdef"
    answers.rights = {"writer": [("own", "mine/", ALL)]}
    within = StoreSpec(
        url="s3://own/mine/too", endpoint=f"https://{account}.r2.cloudflarestorage.com/"
    )
    roles = {
        "one": make_role(f"r2://{account}/own", writer="writer", prefix="mine"),
        "two": AuditedRole(store=within),
    }
    report = audit(AuditSettings(roles=roles))
    assert report.is_proven, report.failures
    assert find(report, Operation.OUTSIDE) is RequestOutcome.DENIED


def test_an_end_without_a_time_zone_is_refused() -> None:
    pair = {"access_key_id": "id", "secret_access_key": "s", "expires_at": "2026-12-01 00:00:00"}
    with pytest.raises(ValidationError, match="needs a time zone"):
        AuditedRole.model_validate({"store": {"url": "s3://own"}, "read_credentials": pair})


@pytest.mark.parametrize(
    ("reads", "outcome", "verdict"),
    [
        ({"list", "get", "head", "delete"}, RequestOutcome.ALLOWED, AccessVerdict.EXCESSIVE),
        ({"list", "get", "delete"}, RequestOutcome.UNKNOWN, AccessVerdict.UNPROVEN),
        ({"list", "get", "head"}, RequestOutcome.DENIED, AccessVerdict.CORRECT),
    ],
)
def test_a_deletion_by_a_reader_is_judged_by_the_answer_to_the_deletion(
    answers: Answers, reads: set[str], outcome: RequestOutcome, verdict: AccessVerdict
) -> None:
    answers.rights = {
        "reader": [("own", "", frozenset(reads))],
        "writer": [("own", "", frozenset({"put", "delete"}))],
    }
    report = audit(
        AuditSettings(roles={"one": make_role("s3://own", reader="reader", writer="writer")})
    )
    (found,) = (
        one
        for one in report.findings
        if (one.right, one.operation) == (Right.READ, Operation.DELETE)
    )
    assert (found.actual, found.verdict) == (outcome, verdict)
    assert not answers.objects


def test_an_object_whose_answer_was_lost_is_named(answers: Answers) -> None:
    answers.rights = {"writer": [("own", "", ALL)]}
    answers.lost = {"own"}
    report = audit(
        AuditSettings(
            roles={"one": make_role("s3://own", writer="writer")},
            expiry_warning=timedelta(0),
        )
    )
    ((bucket, key),) = answers.objects
    assert any(f"s3://{bucket}/{key} may remain" in note for note in report.notes), report.notes
