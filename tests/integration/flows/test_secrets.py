"""No secret in anything that a run leaves behind."""

import base64
import json
import logging
import traceback
from typing import Any
from urllib.parse import quote

import pytest
from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.logging.handlers import APILogHandler
from pydantic import BaseModel, SecretStr

from blocks import Bucket, BucketRole, HuggingFaceCredentials, VastCredentials
from millrace.errors import ConfigurationError, DeniedError
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import make_aws_credentials
from tests.support.flows.planted import Planted, find_leaks, read_run_leaves, read_server_leaves


def test_blocks_and_what_they_raise_show_no_secret(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, planted: Planted,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    one = Bucket(
        role=BucketRole.DATASET,
        url=f"s3://{bucket}",
        read_credentials=make_aws_credentials(planted.source, rgw.endpoint),
        write_credentials=make_aws_credentials(planted.wrong, rgw.endpoint),
    )
    one.check("read")
    with pytest.raises(DeniedError) as refusal:
        one.check("write")
    one.save("planted", overwrite=True)
    loaded = Bucket.load("planted")
    assert loaded.make_spec("read") == one.make_spec("read"), "hidden, not lost"
    tokens = [
        VastCredentials(api_key=SecretStr("va/st+key")),
        HuggingFaceCredentials(token=SecretStr("hf/tok+en")),
    ]
    places = shown(
        one, loaded, one.make_spec("read"), one.make_spec("write"), one.open("read"), *tokens
    )
    places["the exception"] = "".join(traceback.format_exception(refusal.value))
    places["logs"] = caplog.text
    planted_too = {"Vast's key": "va/st+key", "the Hub's token": "hf/tok+en"}
    assert find_leaks(places, planted.secrets | planted_too) == []


def test_a_session_token_is_refused_and_not_shown(rgw: RGW, bucket: str) -> None:
    """prefect-aws keeps it in plain text, and Prefect puts it into an event when it is saved."""
    key = rgw.assume_role(rgw.create_role("temporary"))
    assert key.session_token is not None
    one = Bucket(
        role=BucketRole.DATASET,
        url=f"s3://{bucket}",
        read_credentials=make_aws_credentials(key, rgw.endpoint),
    )
    with pytest.raises(ConfigurationError, match="have a session token") as refusal:
        one.open("read")
    places = shown(one) | {"the exception": "".join(traceback.format_exception(refusal.value))}
    assert find_leaks(places, {"token": key.session_token, "secret": key.secret_access_key}) == []


def shown(*things: Any) -> dict[str, str]:
    """Return the texts in which blocks and specs are shown."""
    return {
        "reprs": "\n".join(repr(thing) for thing in things),
        "strings": "\n".join(str(thing) for thing in things),
        "JSON": "\n".join(t.model_dump_json() for t in things if isinstance(t, BaseModel)),
        "Python": "\n".join(repr(t.model_dump()) for t in things if isinstance(t, BaseModel)),
        "parameters": json.dumps(
            [
                _takes_a_bucket.serialize_parameters({"bucket": thing})
                for thing in things
                if isinstance(thing, Bucket)
            ]
        ),
    }


@flow
def _takes_a_bucket(bucket: Bucket) -> None: ...


def test_the_scan_finds_a_deliberate_leak(prefect_api: PrefectServer, planted: Planted) -> None:
    secret = planted.destination.secret_access_key

    @flow(name="leaky")
    def leaky(place: str) -> None:
        get_run_logger().info("signed in with %s", secret)
        for number in range(3):
            text = base64.b64encode(b"x" * number + secret.encode()).decode()
            create_markdown_artifact(f"see {text}", key=f"leak-{number}")

    state = leaky(f"s3://key:{quote(secret, safe='')}@bucket", return_state=True)
    APILogHandler().flush()

    run = state.state_details.flow_run_id
    found = find_leaks(dict(read_run_leaves(prefect_api, run)), planted.secrets)
    assert "the destination's secret in its log, plain" in found
    assert "the destination's secret in its parameters, URL-encoded" in found
    for number in range(3):
        assert f"the destination's secret in its artifacts, base64 at {number}" in found
    in_tables = find_leaks(dict(read_server_leaves(prefect_api)), planted.secrets)
    tables = {line.split(" in table ")[1].split()[0] for line in in_tables}
    assert {"flow_run", "artifact", "log"} <= tables
