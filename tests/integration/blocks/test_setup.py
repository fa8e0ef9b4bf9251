"""``millrace setup``, on a real server."""

import json
from collections.abc import Mapping
from contextlib import suppress
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks import Bucket, BucketRole, setup
from blocks.loading import find_block
from blocks.setup import SetupOutcome, connect
from millrace.cli import main
from millrace.storage import put, read
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer
from tests.support.blocks import save_document
from tests.unit.blocks.test_environment import ACCOUNT, PAIR, variables


def set_up(*options: str, environment: Mapping[str, str]) -> Result:
    """Run the command in this process, which is a client of the server."""
    return CliRunner().invoke(main, ["setup", *options], env=environment)


def outcomes(output: str) -> dict[str, str]:
    """Results of a setup, by what was set up."""
    return dict(line.split(": ", 1) for line in output.splitlines() if not line.startswith("Next"))


@pytest.mark.soak
def test_setup_twice_changes_nothing(prefect_api: PrefectServer) -> None:
    mirror = {"account_id": ACCOUNT, "name": "mirror", "credentials": {"read": PAIR}}
    environment = {
        **variables(*BucketRole),
        "R2_DATASET_BUCKET_LIST": json.dumps(["s3://plain", mirror]),
        "VAST_API_KEY": "a key",
        "HF_TOKEN": "a token",
    }
    shown = set_up("--dry-run", environment=environment)
    assert shown.exit_code == 0, shown.stderr
    assert outcomes(shown.stdout)["block millrace-bucket/dataset"] == "would be created"

    first = set_up(environment=environment)
    assert first.exit_code == 0, first.stderr
    made = {what for what, outcome in outcomes(first.stdout).items() if outcome == "created"}
    assert made >= {
        "block aws-credentials/gradients-read", "block aws-credentials/aggregator-write",
        "block aws-credentials/dataset-mirror-2-read", "block millrace-bucket/dataset-mirror-2",
        "block millrace-bucket/gradients", "block millrace-bucket/dataset",
        "block millrace-bucket/aggregator", "block vast-credentials/vast",
        "block hugging-face-credentials/hugging-face",
    }  # fmt: skip
    assert set(outcomes(first.stdout)) == set(outcomes(shown.stdout))

    second = set_up(environment=environment)
    assert set(outcomes(second.stdout).values()) == {"unchanged"}, second.stdout
    with prefect_api.make_client() as client:
        assert len(client.read_automations_by_name("millrace-zombies")) == 1
        assert client.read_work_pool("millrace").type == "process"

    changed = set_up(environment=environment | {"HF_TOKEN": "another token"})
    different = {w for w, outcome in outcomes(changed.stdout).items() if outcome != "unchanged"}
    assert different == {"block hugging-face-credentials/hugging-face"}
    specs = Bucket.load("dataset").make_mirror_specs()
    assert [spec.url for spec in specs] == ["s3://plain", f"r2://{ACCOUNT}/mirror"]


@pytest.mark.usefixtures("prefect_api")
def test_what_setup_makes_opens_the_bucket(rgw: RGW, bucket: str) -> None:
    environment = {
        **variables(BucketRole.AGGREGATOR),
        "R2_AGGREGATOR_BUCKET_NAME": bucket,
        "R2_AGGREGATOR_READ_ACCESS_KEY_ID": rgw.read_only.access_key_id,
        "R2_AGGREGATOR_READ_SECRET_ACCESS_KEY": rgw.read_only.secret_access_key,
        "R2_AGGREGATOR_WRITE_ACCESS_KEY_ID": rgw.full.access_key_id,
        "R2_AGGREGATOR_WRITE_SECRET_ACCESS_KEY": rgw.full.secret_access_key,
        "R2_ENDPOINT": rgw.endpoint,
    }
    done = set_up("--role", "aggregator", "--check", environment=environment)
    assert done.exit_code == 0, done.stderr
    assert "aggregator: the write credentials do what they are for" in done.stdout
    block = Bucket.load("aggregator")
    put(block.open("write"), "key", b"bytes")
    assert read(block.open("read"), "key") == b"bytes"
    again = set_up("--role", "aggregator", "--dry-run", "--json", environment=environment)
    found = json.loads(again.stdout)
    assert found["objects"]["block millrace-bucket/aggregator"] == "unchanged"
    assert found["dry_run"]

    swapped = {name.replace("WRITE", "SPARE"): value for name, value in environment.items()}
    swapped = {n.replace("READ", "WRITE").replace("SPARE", "READ"): v for n, v in swapped.items()}
    refused = set_up("--role", "aggregator", "--check", environment=swapped)
    assert refused.exit_code == 1
    assert "does not let these credentials create objects" in refused.stderr


def test_every_missing_variable_is_named(prefect_server: PrefectServer) -> None:
    refused = prefect_server.run("millrace", "setup")
    assert refused.returncode == 2
    assert all(name in refused.stderr for name in variables(*BucketRole))


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("http://me:hunter2@127.0.0.1:9/api", 1, "No Prefect server answers at http://127.0.0.1:9"),
        ("", 2, "names no"),
    ],
)
def test_a_server_that_does_not_answer_is_a_sentence(
    prefect_server: PrefectServer, url: str, code: int, says: str
) -> None:
    refused = prefect_server.run(
        "millrace", "setup", "--without-buckets", environment={"PREFECT_API_URL": url}
    )
    assert refused.returncode == code
    assert says in refused.stderr
    assert "hunter2" not in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_server_is_asked_as_prefect_asks_it(prefect_api: PrefectServer) -> None:
    with temporary_settings({PREFECT_API_URL: f"{prefect_api.url}/"}), connect() as client:
        assert client.api_healthcheck() is None


@pytest.mark.parametrize("slots", [0, 5])
def test_setup_leaves_the_limit_on_uploads_as_it_is(
    prefect_api: PrefectServer, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    name = f"uploads-{slots}"
    monkeypatch.setattr(setup, "UPLOAD_LIMIT", name)
    with prefect_api.make_client() as client:
        client.create_global_concurrency_limit(
            GlobalConcurrencyLimitCreate(name=name, limit=slots, active=True)
        )
        for uploads, outcome, after in (
            (None, SetupOutcome.UNCHANGED, slots), (7, SetupOutcome.UPDATED, 7),
        ):  # fmt: skip
            assert setup._set_upload_limit(client, uploads, dry_run=False) is outcome
            assert client.read_global_concurrency_limit_by_name(name).limit == after


def test_setup_replaces_a_block_that_was_filled_in_wrongly(prefect_api: PrefectServer) -> None:
    environment = {
        **variables(BucketRole.GRADIENTS),
        "R2_GRADIENTS_BUCKET_NAME": f"wrong-{uuid4().hex[:8]}",
    }
    url = f"r2://{ACCOUNT}/{environment['R2_GRADIENTS_BUCKET_NAME']}/team-a"
    with suppress(ValueError):
        Bucket.delete("gradients")
    data = {"role": "Gradients", "url": url, "mirrors": ""}
    save_document(prefect_api, Bucket, data, "gradients")
    done = set_up("--role", "gradients", environment=environment)
    assert done.exit_code == 0, done.stderr
    assert outcomes(done.stdout)["block millrace-bucket/gradients"] == "updated"
    assert "block 'gradients' is not valid. role: " in done.stderr
    assert "It is replaced." in done.stderr
    block = find_block(Bucket, "gradients")
    assert block is not None
    assert block.url == url  # with its prefix
    credentials = block.make_spec("write").credentials
    assert credentials is not None
    assert credentials.access_key_id == "gradients-write"
    Bucket.delete("gradients")
