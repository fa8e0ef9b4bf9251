"""Rights of each credential on real servers, and no object left behind."""

import json
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import SecretStr, ValidationError

from millrace.audit import (
    AccessVerdict,
    AuditedRole,
    AuditReport,
    AuditSettings,
    Operation,
    RequestOutcome,
    access,
    audit,
)
from millrace.cli import main
from millrace.storage import (
    Credentials,
    Right,
    Store,
    StoreSpec,
    list_objects,
    open_scoped_store,
    open_store,
    put,
)
from millrace.storage.scoped import make_session_policy
from millrace.testing.credentials import make_credentials
from millrace.testing.faults import Fault
from millrace.testing.key import Key
from millrace.testing.process import find_free_ports
from tests.stores import make_spec

QUICK = timedelta(seconds=0.5)
WRITING = set(Operation) - {Operation.OTHER_BUCKET, Operation.OUTSIDE}


def seen(found: AuditReport, role: str, right: Right) -> dict[Operation, RequestOutcome]:
    return {
        one.operation: one.actual
        for one in found.findings
        if (one.role, one.right) == (role, right)
    }


def verdicts(found: AuditReport) -> set[AccessVerdict]:
    return {one.verdict for one in found.findings}


def run(roles: dict[str, AuditedRole]) -> AuditReport:
    return audit(AuditSettings(roles=roles, retry_timeout=QUICK))


@pytest.fixture
def place(rgw, request) -> StoreSpec:
    return make_spec("rgw", request).model_copy(update={"credentials": None})


@pytest.fixture
def clean(place, rgw) -> Callable[[], None]:
    owner = open_store(place.model_copy(update={"credentials": make_credentials(rgw.full)}))

    def check() -> None:
        root = open_store(owner.spec.model_copy(update={"url": f"s3://{owner.location.bucket}"}))
        assert not list(list_objects(root, ""))

    return check


@pytest.mark.parametrize("kind", ["rgw", "r2"])
def test_keys_that_do_what_they_must_are_proven_and_nothing_stays(kind, rgw, request, clean):
    spec = make_spec(kind, request)
    below = spec.model_copy(update={"url": spec.url.removesuffix("/below/here")})
    role = AuditedRole(
        store=below,
        read_credentials=make_credentials(rgw.read_only),
        write_credentials=make_credentials(rgw.full),
    )
    found = audit(AuditSettings(roles={"gradients": role}))
    assert found.is_proven, [
        one for one in found.findings if one.verdict is not AccessVerdict.CORRECT
    ]
    assert found.exit_code == 0
    assert set(seen(found, "gradients", Right.WRITE)) == WRITING
    reads = seen(found, "gradients", Right.READ)
    assert {one for one, answer in reads.items() if answer is RequestOutcome.ALLOWED} == {
        Operation.LIST,
        Operation.GET,
        Operation.HEAD,
    }
    assert all(one.message == "" for one in found.findings)
    (check,) = found.notes
    assert check.startswith("gradients: The store checks a ")
    clean()


@pytest.mark.parametrize(
    ("rules", "checksum"),
    [
        ({}, "CRC-64/NVME"),
        ({"checks_crc": False}, "signed SHA-256"),
        ({"accepts_unsigned": False}, "signed SHA-256"),
    ],
)
def test_the_checksum_that_a_store_checks_is_said(
    rules, checksum, r2, request, tmp_path, monkeypatch
):
    monkeypatch.setattr("millrace.storage.signed._crc_checks", {})
    r2.set_rules(**rules)
    spec = make_spec("r2", request)
    credentials = spec.reveal_secrets()["credentials"]
    store = spec.model_copy(update={"credentials": None}).model_dump(mode="json")
    settings = {"roles": {"gradients": {"store": store, "write_credentials": credentials}}}
    path = tmp_path / "audit.yaml"
    path.write_text(json.dumps(settings))
    said = f"gradients: The store checks a {checksum} of each upload."
    text = CliRunner().invoke(main, ["bucket", "audit", str(path)])
    assert said in text.output.splitlines()
    found = CliRunner().invoke(main, ["bucket", "audit", str(path), "--json"])
    assert said in json.loads(found.stdout)["notes"]


def test_no_checksum_is_said_of_a_store_where_nothing_may_be_written(place, rgw, clean):
    below = place.model_copy(update={"url": place.url.removesuffix("/below/here")})
    keys = {
        "read_credentials": make_credentials(rgw.full),
        "write_credentials": make_credentials(rgw.read_only),
    }
    found = run({"gradients": AuditedRole(store=below, **keys)})
    assert not any("checks a" in note for note in found.notes)
    clean()


def test_each_key_is_told_apart(place, rgw, r2, request, clean):
    below = place.model_copy(update={"url": place.url.removesuffix("/below/here")})
    (port,) = find_free_ports(1)
    failing = make_spec("r2", request)
    places = {
        "read only": AuditedRole(store=below, write_credentials=make_credentials(rgw.read_only)),
        "wrong": AuditedRole(
            store=below, write_credentials=make_credentials(Key(rgw.full.access_key_id, "wrong"))
        ),
        "another's": AuditedRole(store=below, write_credentials=make_credentials(rgw.other)),
        "too much": AuditedRole(store=below, read_credentials=make_credentials(rgw.full)),
        "nowhere": AuditedRole(
            store=below.model_copy(update={"url": f"s3://none-{secrets.token_hex(4)}"}),
            write_credentials=make_credentials(rgw.full),
        ),
        "dead": AuditedRole(
            store=below.model_copy(update={"endpoint": f"http://127.0.0.1:{port}"}),
            write_credentials=make_credentials(rgw.full),
        ),
    }
    found = {name: run({name: role}) for name, role in places.items()}
    r2.fail_next(Fault.ERROR503, 1000)
    url = failing.url.removesuffix("/below/here")
    slow = AuditedRole(
        store=failing.model_copy(update={"url": url}), write_credentials=failing.credentials
    )
    found["throttled"] = run({"throttled": slow})
    r2.reset()
    assert {name: one.exit_code for name, one in found.items()} == {
        "read only": 23,
        "wrong": 22,
        "another's": 22,
        "too much": 20,
        "nowhere": 24,
        "dead": 25,
        "throttled": 26,
    }
    for name, answer in (
        ("wrong", RequestOutcome.DENIED),
        ("nowhere", RequestOutcome.NOT_FOUND),
        ("dead", RequestOutcome.UNREACHABLE),
        ("throttled", RequestOutcome.THROTTLED),
    ):
        assert seen(found[name], name, Right.WRITE)[Operation.LIST] is answer
        assert RequestOutcome.ALLOWED not in seen(found[name], name, Right.WRITE).values()
    assert {
        operation
        for operation, answer in seen(found["read only"], "read only", Right.WRITE).items()
        if answer is RequestOutcome.ALLOWED
    } == {Operation.LIST}  # there was nothing of its own that it could have read
    assert verdicts(found["dead"]) == {AccessVerdict.UNPROVEN}
    wrong = [one for each in found.values() for one in each.findings]
    assert all(bool(one.message) is (one.verdict is not AccessVerdict.CORRECT) for one in wrong)
    clean()


def test_a_key_for_a_prefix_is_proven_to_reach_no_other(place, rgw, clean):
    """And is not enough for whoever needs all of the bucket."""
    below = place.model_copy(update={"url": place.url.removesuffix("/below/here")})
    whole = open_store(below.model_copy(update={"credentials": make_credentials(rgw.full)}))
    role = rgw.create_role(f"audit-{secrets.token_hex(4)}")
    key = open_scoped_store(
        whole, "mine/", timedelta(minutes=15), access=Right.WRITE, role_arn=role
    )
    its = AuditedRole(store=below, prefix="mine", write_credentials=key.spec.credentials)
    found = run({"worker": its})
    answers = seen(found, "worker", Right.WRITE)
    assert answers.pop(Operation.OUTSIDE) is RequestOutcome.DENIED
    assert set(answers.values()) == {RequestOutcome.ALLOWED}
    assert found.is_proven
    assert any("to write end at" in note for note in found.notes)

    sibling = run({"worker": its.model_copy(update={"prefix": "minerva"})})
    assert sibling.exit_code == 22
    wider = run(
        {
            "worker": AuditedRole(
                store=below, prefix="mine", write_credentials=make_credentials(rgw.full)
            )
        }
    )
    assert wider.exit_code == 20
    (excess,) = (one for one in wider.findings if one.verdict is AccessVerdict.EXCESSIVE)
    assert excess.operation is Operation.OUTSIDE
    assert excess.message == f"The credentials reach {whole.url}."
    clean()


@pytest.mark.parametrize(
    "excess",
    [
        None,
        "s3:PutObject",
        pytest.param("s3:ListBucket", marks=pytest.mark.soak),
        pytest.param("s3:DeleteObject", marks=pytest.mark.soak),
        pytest.param("s3:GetObject", marks=pytest.mark.soak),
    ],
)
def test_a_key_that_reaches_the_prefix_of_another_role_is_excessive(place, rgw, clean, excess):
    bucket = open_store(place).location.bucket
    role = rgw.create_role(f"audit-{secrets.token_hex(4)}")
    keys: dict[str, Credentials] = {}
    for name in ("gradients", "dataset"):
        statements = make_session_policy(bucket, [f"{name}/"], Right.WRITE)["Statement"]
        if excess and name == "gradients":
            at = "" if excess == "s3:ListBucket" else "/dataset/*"
            condition = {"StringLike": {"s3:prefix": ["dataset/*"]}}
            statements.append(
                {"Effect": "Allow", "Action": [excess], "Resource": [f"arn:aws:s3:::{bucket}{at}"]}
                | ({} if at else {"Condition": condition})
            )
        keys[name] = make_credentials(rgw.assume_role(role, *statements))
    root = place.model_copy(update={"url": f"s3://{bucket}"})
    in_url = place.model_copy(update={"url": f"s3://{bucket}/dataset"})
    found = run(
        {
            "gradients": AuditedRole(
                store=root, prefix="gradients", write_credentials=keys["gradients"]
            ),
            "dataset": AuditedRole(store=in_url, write_credentials=keys["dataset"]),
        }
    )
    assert [(one.role, one.operation, one.message) for one in found.failures] == (
        [("gradients", Operation.OUTSIDE, f"The credentials reach {in_url.url}.")] if excess else []
    )
    assert found.exit_code == (20 if excess else 0)
    clean()


def test_a_key_may_reach_a_role_within_its_own_prefix(place, rgw, clean):
    bucket = open_store(place).location.bucket
    assumed = rgw.create_role(f"audit-{secrets.token_hex(4)}")
    roles: dict[str, AuditedRole] = {}
    for name in ("project", "project/gradients"):
        policy = make_session_policy(bucket, [f"{name}/"], Right.WRITE)
        roles[name] = AuditedRole(
            store=place.model_copy(update={"url": f"s3://{bucket}/{name}"}),
            write_credentials=make_credentials(rgw.assume_role(assumed, *policy["Statement"])),
        )
    found = run(roles)
    assert found.is_proven, found.failures
    clean()


def test_a_key_that_reaches_the_bucket_of_another_role_is_said(place, rgw, clean):
    other = StoreSpec(
        url=f"s3://{rgw.create_bucket(f'bucket-{secrets.token_hex(6)}')}", endpoint=rgw.endpoint
    )
    both = {
        "write_credentials": make_credentials(rgw.full),
        "read_credentials": make_credentials(rgw.full),
    }
    found = run(
        {"gradients": AuditedRole(store=place, **both), "dataset": AuditedRole(store=other)}
    )
    assert found.exit_code == 20
    reached = [one for one in found.findings if one.operation is Operation.OTHER_BUCKET]
    assert [one.message for one in reached] == [f"The credentials reach {other.url}."] * 2
    assert found.notes == (
        "gradients: the credentials to read and to write are one key.",
        "gradients: The store checks a signed SHA-256 of each upload.",
        "dataset: there are no credentials to read.",
        "dataset: there are no credentials to write.",
    )
    clean()


def test_a_key_does_not_reach_the_bucket_of_another_role_that_does_not_exist(place, rgw, clean):
    """S3 deletes a missing object with success, and so does `delete_one` without a bucket."""
    below = place.model_copy(update={"url": place.url.removesuffix("/below/here")})
    missing = below.model_copy(update={"url": f"s3://none-{secrets.token_hex(4)}"})
    found = run(
        {
            "one": AuditedRole(store=below, write_credentials=make_credentials(rgw.full)),
            "two": AuditedRole(store=missing),
        }
    )
    assert seen(found, "one", Right.WRITE)[Operation.OTHER_BUCKET] is RequestOutcome.NOT_FOUND
    assert {one.verdict for one in found.failures} == {AccessVerdict.UNPROVEN}
    assert found.exit_code == 24
    clean()


def test_a_store_that_does_not_keep_its_word_is_told(place, rgw, monkeypatch, clean):
    def put_instead(store: Store, key: str, data: bytes) -> None:
        put(store, key, data)

    monkeypatch.setattr("millrace.audit.access.create", put_instead)
    below = place.model_copy(update={"url": place.url.removesuffix("/below/here")})
    found = run(
        {"gradients": AuditedRole(store=below, write_credentials=make_credentials(rgw.full))}
    )
    assert found.exit_code == 21
    (wrong,) = (one for one in found.findings if one.verdict is not AccessVerdict.CORRECT)
    assert (wrong.operation, wrong.actual) == (Operation.CREATE, RequestOutcome.WRONG)
    clean()


@pytest.mark.parametrize(
    ("method", "name"), [("create_multipart_upload", "UploadId"), ("upload_part", "ETag")]
)
def test_an_answer_to_an_upload_that_lacks_a_value_is_told(
    place, rgw, monkeypatch, clean, method, name
):
    def call(store: Store, key: str, called: str, **more: object) -> dict[str, object]:
        answer = dict(original(store, key, called, **more))
        if called == method:
            uploads.append(answer.pop(name))
        return answer

    uploads: list[object] = []
    original = access._call_object_method
    monkeypatch.setattr(access, "_call_object_method", call)
    below = place.model_copy(update={"url": place.url.removesuffix("/below/here")})
    role = AuditedRole(store=below, write_credentials=make_credentials(rgw.full))
    found = run({"gradients": role})
    wrong = {one.operation for one in found.findings if one.actual is RequestOutcome.WRONG}
    assert Operation.MULTIPART in wrong
    assert any(f"without {name}: it is not compatible" in one.message for one in found.findings)
    if name == "UploadId":  # nobody knows the uploads by their ids
        client = rgw.make_client(rgw.full)
        bucket = open_store(below).location.bucket
        for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
            client.abort_multipart_upload(
                Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
    clean()


def test_credentials_that_have_ended_or_are_about_to_are_said():
    now = datetime.now(UTC)
    near = Credentials(
        access_key_id="a", secret_access_key="s", expires_at=now + timedelta(hours=1)
    )
    past = Credentials(
        access_key_id="b", secret_access_key="s", expires_at=now - timedelta(hours=1)
    )
    (port,) = find_free_ports(1)
    store = StoreSpec(url="s3://bucket", endpoint=f"http://127.0.0.1:{port}")
    found = run(
        {"dataset": AuditedRole(store=store, read_credentials=near, write_credentials=past)}
    )
    assert "to read end at" in found.notes[0]
    assert "to write ended at" in found.notes[1]


def test_an_audit_of_nothing_is_no_proof(place):
    with pytest.raises(ValidationError, match="no role has credentials"):
        run({"gradients": AuditedRole(store=place)})
    assert not AuditReport(findings=(), notes=()).is_proven


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, place, rgw):
    below = place.url.removesuffix("/below/here")
    key = rgw.read_only
    (tmp_path / "audit.yaml").write_text(
        json.dumps(
            {
                "roles": {
                    "gradients": {
                        "store": {"url": below, "endpoint": place.endpoint},
                        "read_credentials": {
                            "access_key_id": key.access_key_id,
                            "secret_access_key": key.secret_access_key,
                        },
                    }
                }
            }
        )
    )
    done = CliRunner().invoke(main, ["bucket", "audit", str(tmp_path / "audit.yaml"), "--json"])
    assert done.exit_code == 27, done.output  # there was nothing that it could have read
    lines = [line.split() for line in done.stderr.splitlines()]
    assert ["operation", "gradients", "read"] in lines
    assert ["list", "allowed"] in lines
    assert ["put", "denied"] in lines
    assert ["get", "UNPROVEN"] in lines
    assert "There is no object to try the operation on: none could be written." in done.stderr
    assert done.stderr.count("There is no object to try the operation on") == 1
    assert done.stderr.splitlines()[-1].endswith(
        "of 9 operations are as they should be, 4 unproven."
    )
    found = AuditReport.model_validate_json(done.stdout)
    assert found.exit_code == 27
    assert key.secret_access_key not in done.output


def test_a_dead_endpoint_is_one_sentence_within_seconds(tmp_path: Path):
    (port,) = find_free_ports(1)
    pair = {"access_key_id": "a", "secret_access_key": "s"}
    roles = {
        name: {
            "store": {"url": f"s3://{name}", "endpoint": f"http://127.0.0.1:{port}"},
            "read_credentials": pair,
            "write_credentials": pair,
        }
        for name in ("gradients", "dataset", "aggregator")
    }
    (tmp_path / "audit.yaml").write_text(json.dumps({"roles": roles}))
    done = CliRunner().invoke(main, ["bucket", "audit", str(tmp_path / "audit.yaml")])
    assert done.exit_code == 25, done.output
    assert done.output.count(f"http://127.0.0.1:{port} does not answer") == 1
    assert "0 of 60 operations are as they should be, 60 unproven." in done.output


def test_one_endpoint_is_asked_once_whether_it_answers(monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []
    (port,) = find_free_ports(1)
    real = list_objects

    def counted(store: Store, prefix: str) -> object:
        asked.append(store.spec.retry_timeout.total_seconds())
        return real(store, prefix)

    monkeypatch.setattr("millrace.audit.access.list_objects", counted)
    pair = Credentials(access_key_id="a", secret_access_key=SecretStr("s"))
    found = run(
        {
            name: AuditedRole(
                store=StoreSpec(url=f"s3://{name}", endpoint=f"http://127.0.0.1:{port}"),
                read_credentials=pair,
                write_credentials=pair,
            )
            for name in ("one", "two")
        }
    )
    assert asked == [QUICK.total_seconds()]
    assert verdicts(found) == {AccessVerdict.UNPROVEN}
    assert len({one.message for one in found.findings}) == 1
