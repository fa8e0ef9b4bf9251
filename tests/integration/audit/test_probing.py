"""Verdicts of a probe, for each reason why a job could not save."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from millrace.audit import ProbeResult, ProbeVerdict
from millrace.audit import probe as probe_destination
from millrace.audit.permissions import query_permissions
from millrace.checkpoints import StoreDestination
from millrace.cli import main
from millrace.errors import ConfigurationError, CorruptError
from millrace.keys.probes import make_write_probe_key
from millrace.storage import Store, StoreSpec, list_objects, open_store, put
from millrace.testing.credentials import make_credentials
from millrace.testing.faults import Fault
from millrace.testing.key import Key
from millrace.testing.process import find_free_ports
from tests.stores import make_spec

SHORT = timedelta(seconds=0.5)


def probe(store: Store, job: str, **options: Any) -> ProbeResult:
    return probe_destination(StoreDestination(store), job, **options)


@pytest.mark.parametrize("kind", ["local", "memory", "rgw", "r2", "gcs"])
def test_a_place_that_is_ready_is_left_as_it_was(kind, request) -> None:
    store = open_store(make_spec(kind, request))
    found = probe(store, "runs/one", size=1 << 20, within=timedelta(hours=1))
    assert (found.verdict, found.verdict.exit_code) == (ProbeVerdict.READY, 0)
    assert found.rate > 0
    assert not list(list_objects(store, ""))


def other(spec: StoreSpec, **changes: object) -> Store:
    return open_store(spec.model_copy(update=changes))


def test_each_refusal_is_told_apart(rgw, r2, request) -> None:
    spec = make_spec("rgw", request)
    r2.reset()
    failing = open_store(make_spec("r2", request))
    r2.fail_next(Fault.ERROR503, 1000)
    (port,) = find_free_ports(1)
    wrong = Key(rgw.full.access_key_id, "wrong")
    places = {
        ProbeVerdict.READY: other(spec),
        ProbeVerdict.READ_ONLY: open_store(make_spec("rgw", request, "read_only")),
        ProbeVerdict.DENIED: other(spec, credentials=make_credentials(wrong)),
        ProbeVerdict.NOT_FOUND: other(spec, url="s3://no-such-bucket-anywhere"),
        ProbeVerdict.THROTTLED: failing,
        ProbeVerdict.UNREACHABLE: other(spec, endpoint=f"http://127.0.0.1:{port}"),
    }
    found = {verdict: probe(store, "job", timeout=SHORT) for verdict, store in places.items()}
    r2.reset()
    assert {verdict: one.verdict for verdict, one in found.items()} == {v: v for v in places}
    assert len({one.verdict.exit_code for one in found.values()}) == len(places)
    assert all(one.reason.endswith(".") for one in found.values())


@pytest.fixture
def denying(gcs):
    yield gcs
    gcs.deny()


@pytest.mark.parametrize(
    ("permission", "verdict"),
    [
        ("storage.objects.list", ProbeVerdict.DENIED),
        ("storage.objects.create", ProbeVerdict.READ_ONLY),
        ("storage.objects.delete", ProbeVerdict.READ_ONLY),
        ("storage.multipartUploads.create", ProbeVerdict.READ_ONLY),
        ("storage.multipartUploads.abort", ProbeVerdict.READ_ONLY),
    ],
)
def test_google_says_which_permission_is_missing(permission, verdict, denying, request) -> None:
    store = open_store(make_spec("gcs", request))
    denying.deny(permission)
    found = probe(store, "job", timeout=SHORT)
    assert found.verdict is verdict
    assert f"lack {permission}: grant" in found.reason


def test_a_grant_on_a_prefix_is_proven_by_the_trial_alone(denying, request, monkeypatch) -> None:
    store = open_store(make_spec("gcs", request))
    name = "millrace.audit.permissions.query_permissions"
    monkeypatch.setattr(name, lambda _: frozenset[str]())
    assert probe(store, "job", timeout=SHORT).is_ready


def test_google_credentials_that_are_missing_are_no_yes(gcs, tmp_path, monkeypatch) -> None:
    store = open_store(StoreSpec(url="gs://bucket", endpoint=gcs.endpoint))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(
        ConfigurationError, match=r"Google's credentials cannot be read .*none\.json"
    ):
        query_permissions(store)


def test_room_and_time_are_looked_at(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    assert probe(store, "job", size=1 << 60).verdict is ProbeVerdict.NO_SPACE
    slow = probe(store, "job", size=1 << 20, within=timedelta(0))
    assert slow.verdict is ProbeVerdict.TOO_SLOW
    assert slow.expected > 0


def test_a_store_that_returns_other_bytes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path.as_uri())
    monkeypatch.setattr("secrets.token_hex", lambda _: "0" * 16)
    key = make_write_probe_key("job", "0" * 16)
    put(store, key, b"other bytes")  # taken for the object of the probe, whose answer was lost
    found = probe(store, "job")
    assert found.verdict is ProbeVerdict.WRONG
    assert key in found.reason
    with pytest.raises(CorruptError, match="wrong: "):
        found.check(store.url)


def test_a_folder_in_which_the_job_cannot_be_is_no_yes(tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(b"a file")
    found = probe(open_store(tmp_path.as_uri()), "job")
    assert found.verdict is ProbeVerdict.UNKNOWN
    run = CliRunner().invoke(main, ["checkpoint", "probe", tmp_path.as_uri(), "job"])
    assert run.exit_code == 19, run.output


def test_the_exit_codes_are_those_of_the_guide() -> None:
    assert {verdict: verdict.exit_code for verdict in ProbeVerdict} == {
        ProbeVerdict.READY: 0,
        ProbeVerdict.READ_ONLY: 11,
        ProbeVerdict.DENIED: 12,
        ProbeVerdict.NOT_FOUND: 13,
        ProbeVerdict.THROTTLED: 14,
        ProbeVerdict.UNREACHABLE: 15,
        ProbeVerdict.WRONG: 16,
        ProbeVerdict.NO_SPACE: 17,
        ProbeVerdict.TOO_SLOW: 18,
        ProbeVerdict.UNKNOWN: 19,
    }


def test_the_command_says_it_by_its_exit_code(tmp_path: Path) -> None:
    words = ["checkpoint", "probe", tmp_path.as_uri(), "job", "--size"]
    run = CliRunner().invoke(main, [*words, "1MB"])
    assert run.exit_code == 0, run.output
    assert run.output.startswith("ready: ")
    assert "The store checks" not in run.output
    run = CliRunner().invoke(main, [*words, "1EB"])
    assert run.exit_code == ProbeVerdict.NO_SPACE.exit_code == 17
    run = CliRunner().invoke(main, [*words, "much"])
    assert run.exit_code == 2
    assert "write 80GB" in run.output


def test_the_command_probes_a_bucket_at_the_endpoint_of_the_environment(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec("rgw", request)
    assert spec.credentials is not None
    key, secret = spec.credentials.access_key_id, spec.credentials.secret_access_key
    assert secret is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(spec.endpoint))  # http://
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(key))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret.get_secret_value())
    run = CliRunner().invoke(main, ["checkpoint", "probe", spec.url, "job", "--size", "1MB"])
    assert run.exit_code == 0, run.output
    assert run.output.startswith("ready: ")
    assert "The store checks a signed SHA-256 of each upload." in run.output


@pytest.mark.parametrize(
    ("rules", "checksum"),
    [
        ({}, "CRC-64/NVME"),
        ({"checks_crc": False}, "signed SHA-256"),
        ({"accepts_unsigned": False}, "signed SHA-256"),
    ],
)
def test_the_probe_says_what_the_store_checks(rules, checksum, r2, request, monkeypatch) -> None:
    monkeypatch.setattr("millrace.storage.signed._crc_checks", {})
    r2.set_rules(**rules)
    found = probe(open_store(make_spec("r2", request)), "job")
    assert found.body_check == f"The store checks a {checksum} of each upload."
