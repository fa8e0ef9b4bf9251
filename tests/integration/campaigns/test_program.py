"""Settings and credentials of workers, on a real store."""

import base64
import json
import secrets

import pytest
from botocore.exceptions import ClientError

from millrace.campaigns.worker import render_worker_settings
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.rentals import derive_node_key
from millrace.rentals.machine_environment import make_environment
from millrace.storage import StoreSpec, open_store
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW, Key
from tests.support.rentals.parts import HOUR, START, make_attempt
from tests.unit.campaigns.test_program import SETTINGS, rent


def test_the_file_of_a_worker_has_no_secret(rgw: RGW) -> None:
    pair = make_credentials(rgw.full)
    store = StoreSpec(url="s3://bucket", endpoint=rgw.endpoint, credentials=pair)
    text = render_worker_settings(SETTINGS, store, store, 2)
    assert rgw.full.secret_access_key not in text
    assert rgw.full.access_key_id not in text


def test_a_machine_writes_its_own_gradients_and_never_the_chain(rgw: RGW, bucket: str) -> None:
    role = rgw.create_role(f"worker-{secrets.token_hex(4)}")
    full = StoreSpec(
        url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full)
    )
    settings = rent(full, role_arn=role)
    attempt = make_attempt(slot=1, deadline=START + HOUR)  # as long as the role allows
    found = make_environment(open_store(full), settings, attempt, vast_url="https://x")
    config = json.loads(base64.b64decode(found["MILLRACE_CONFIG"]))
    given = config["write_store"]["credentials"]
    pair = Key(given["access_key_id"], given["secret_access_key"], given["session_token"])
    client = rgw.make_client(pair)
    own = CooldownKeys("c/model", 3)
    for key in (
        "c/run/worker-1/gradient", "c/model/lease/members/worker-1/000000.json",
        own.make_vote_key("worker-1"), own.make_late_vote_key("worker-1"),
        own.make_result_key("worker-1"), own.make_draft_key("worker-1"),
        own.make_part_key("worker-1", "a" * 64),
    ):  # fmt: skip
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    checkpoints = CheckpointKeys("c/model")
    for key in (
        "c/run/worker-0/gradient", "c/run/worker-10/gradient", "c/run/gathers/1/chain/000000001",
        "c/campaign/warming.json", "c/lease/campaign/0", "text/manifest.json", "_rentals/c/x",
        "c/model/lease/members/worker-0/000000.json", "c/campaign/training.json",
        "c/model/lease/clock/x", "c/model/lease/members/worker-10/000000.json", "c/model/x", "x",
        own.roster, own.make_vote_key("worker-0"), own.make_vote_key("worker-10"),
        own.make_late_vote_key("worker-2"),
        own.make_result_key("worker-2"), own.make_draft_key("worker-0"),
        own.make_part_key("worker-0", "a" * 64),
        checkpoints.make_epoch_key(3), checkpoints.make_metadata_key(3),
        checkpoints.make_part_key(3, "a" * 64),
        checkpoints.make_pin_key(3), checkpoints.make_share_key(3, "a", 1, 0),
    ):  # fmt: skip
        with pytest.raises(ClientError, match=r"AccessDenied|403"):
            client.put_object(Bucket=bucket, Key=key, Body=b"x")
    assert config["node_key"] == derive_node_key(settings.account, "c", 0).get_secret_value()
    assert "account" not in json.dumps(found)
