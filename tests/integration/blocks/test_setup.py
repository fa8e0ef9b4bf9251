"""``millrace setup``, on a real server."""

import json
from collections.abc import Mapping

import pytest
from click.testing import CliRunner, Result

from blocks import Bucket, BucketRole
from millrace.cli import main
from millrace.storage import put, read
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer
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

    swapped = {name.replace("WRITE", "SPARE"): value for name, value in environment.items()}
    swapped = {n.replace("READ", "WRITE").replace("SPARE", "READ"): v for n, v in swapped.items()}
    refused = set_up("--role", "aggregator", "--check", environment=swapped)
    assert refused.exit_code == 1
    assert "does not let these credentials create objects" in refused.stderr


def test_every_missing_variable_is_named(prefect_server: PrefectServer) -> None:
    refused = prefect_server.run("millrace", "setup")
    assert refused.returncode == 1
    assert all(name in refused.stderr for name in variables(*BucketRole))


def test_a_server_that_does_not_answer_is_a_sentence(prefect_server: PrefectServer) -> None:
    for url, says in (("http://127.0.0.1:9/api", "No Prefect server answers"), ("", "names no")):
        refused = prefect_server.run(
            "millrace", "setup", "--without-buckets", environment={"PREFECT_API_URL": url}
        )
        assert refused.returncode == 1
        assert says in refused.stderr
        assert "Traceback" not in refused.stderr
