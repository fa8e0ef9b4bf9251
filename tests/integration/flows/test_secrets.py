"""No secret in anything that a run leaves behind."""

import base64
import json
import logging
import secrets
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.logging.handlers import APILogHandler
from pydantic import BaseModel, SecretStr

from blocks import Bucket, BucketRole, HuggingFaceCredentials, VastCredentials
from millrace.errors import ConfigurationError, DeniedError
from millrace.testing.key import Key
from millrace.testing.rgw import RGW
from tests.oracle import S3Bucket
from tests.prefect_server import PrefectServer, Worker, until
from tests.support.flows.fixtures import CUT, RUN, SHARD, MakeBlock, aws_credentials, jsonl, texts


def forms(secret: str) -> dict[str, str]:
    """How a secret may stand in a text: each form by its name."""
    found = {
        "plain": secret,
        "URL-encoded": quote(secret, safe=""),
        "URL-encoded, slashes kept": quote(secret),
        "form-encoded": quote_plus(secret),
        "JSON": json.dumps(secret)[1:-1],
    }
    for before in range(3):
        # Whatever stands before it in the encoded text, one of three alignments holds.
        padded = b"\0" * before + secret.encode()
        whole = len(padded) // 3 * 3
        first = (before + 2) // 3 * 4
        found[f"base64 at {before}"] = base64.b64encode(padded[:whole]).decode()[first:]
        found[f"base64url at {before}"] = base64.urlsafe_b64encode(padded[:whole]).decode()[first:]
    return found


def leaks(places: Mapping[str, str], planted: Mapping[str, str]) -> list[str]:
    """Where a planted secret stands, in any form: a line each, without the secret itself."""
    return [
        f"{name} in {place}, {form}"
        for name, secret in planted.items()
        for form, text in forms(secret).items()
        for place, content in places.items()
        if text in content
    ]


def server_leaves(server: PrefectServer) -> Iterator[tuple[str, str]]:
    """Everything that the server keeps, but for its table of blocks, which is encrypted."""
    for number, (table, value) in enumerate(server.tables()):
        if table != "block_document":
            yield f"table {table} #{number}", value
    yield "the server's own log", server.log.read_text(errors="replace")


def run_leaves(server: PrefectServer, run: Any) -> Iterator[tuple[str, str]]:
    """What the API says of a run."""
    found = server.flow_run(run)
    yield "the run", found.model_dump_json()
    yield "its parameters", json.dumps(found.parameters)
    yield "its log", server.logs(run)
    yield "its artifacts", json.dumps(server.artifacts(run), default=str)


@dataclass
class Planted:
    """Keys that really open RGW, and the names of their secrets."""

    source: Key
    destination: Key
    wrong: Key

    @property
    def secrets(self) -> dict[str, str]:
        return {
            "the source's secret": self.source.secret_access_key,
            "the destination's secret": self.destination.secret_access_key,
            "a secret that is refused": self.wrong.secret_access_key,
        }


@pytest.fixture(scope="module")
def planted(rgw: RGW) -> Planted:
    """Keys whose secrets change when they are encoded, and one that is refused."""
    keys = [
        Key(name, f"pl/nt+ed={secrets.token_urlsafe(16)}&%\"'")
        for name in ("planted-source", "planted-destination")
    ]
    for key in keys:
        rgw._admin(
            "key", "create", "--uid=full", "--key-type=s3",
            f"--access-key={key.access_key_id}", f"--secret-key={key.secret_access_key}",
        )  # fmt: skip
    wrong = Key(keys[1].access_key_id, "wr/ong+" + secrets.token_urlsafe(24))
    return Planted(*keys, wrong)


def test_a_run_leaves_no_secret_anywhere(
    deployed: PrefectServer, worker: Worker, rgw: RGW, bucket: str, block: MakeBlock,
    planted: Planted,
) -> None:  # fmt: skip
    source = rgw.create_bucket(f"{bucket}-source")
    client = rgw.client(rgw.full)
    client.put_object(Bucket=source, Key="rows.jsonl", Body=jsonl(texts()) + b"no row\n")
    source_block = {"bucket": block(source, read=planted.source), "columns": {"txt": "text"}}
    before = len(rgw.requests())

    good = deployed.command(
        SHARD, dataset="words", source=source_block, cut=CUT, run=RUN,
        destination=block(bucket, write=planted.destination),
    )  # fmt: skip
    refused = deployed.command(
        SHARD, dataset="others", source=source_block,
        destination=block(bucket, write=planted.wrong),
    )  # fmt: skip
    # A fault while it runs, with credentials in hand: the same name, cut in another way.
    failed = deployed.command(
        SHARD, dataset="words", source=source_block, cut=CUT | {"seed": 7},
        destination=block(bucket, write=planted.destination),
    )  # fmt: skip
    # Parameters that the server takes and the flow does not, with blocks among them.
    wrong = deployed.command(
        SHARD, dataset="words", source=source_block | {"url": "file:///x"},
        destination=block(bucket, write=planted.destination),
    )  # fmt: skip
    runs = (good, refused, failed, wrong)
    for started in (good, refused, failed):  # the last one never came to log
        until(lambda run=started.run: "Finished in state" in deployed.logs(run), "the last line")
    worker.stop()

    assert [started.code for started in runs] == [0, 1, 1, 1], good.output
    served = [line for line in rgw.requests()[before:] if " 200 " in line or " 206 " in line]
    assert any(f"GET /{source}/rows.jsonl" in line for line in served), "the source's key opened it"
    assert any(f"PUT /{bucket}/words/" in line for line in served), "so did the destination's"
    places = dict(server_leaves(deployed))
    for started in runs:
        places |= {
            f"{what} {started.run}": text for what, text in run_leaves(deployed, started.run)
        }
        places[f"the terminal of {started.run}"] = started.output
    places["the worker's output"] = worker.log.read_text(errors="replace")
    for path in deployed.home.rglob("*"):
        if path.is_file() and not path.name.startswith("prefect.db"):
            places[f"file {path.name}"] = path.read_text(errors="replace")
    kept = S3Bucket(client, bucket, "words")
    places |= {f"object {name}": kept.read(name).decode("latin-1") for name in kept.names()}
    assert len(places) > 1000
    assert leaks(places, planted.secrets) == []


def test_blocks_and_what_they_raise_show_no_secret(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, planted: Planted,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    one = Bucket(
        role=BucketRole.DATASET,
        url=f"s3://{bucket}",
        read_credentials=aws_credentials(planted.source, rgw.endpoint),
        write_credentials=aws_credentials(planted.wrong, rgw.endpoint),
    )
    one.check("read")
    with pytest.raises(DeniedError) as refusal:
        one.check("write")
    one.save("planted", overwrite=True)
    loaded = Bucket.load("planted")
    assert loaded.spec("read") == one.spec("read"), "hidden, not lost"
    tokens = [
        VastCredentials(api_key=SecretStr("va/st+key")),
        HuggingFaceCredentials(token=SecretStr("hf/tok+en")),
    ]
    places = shown(one, loaded, one.spec("read"), one.spec("write"), one.open("read"), *tokens)
    places["the exception"] = "".join(traceback.format_exception(refusal.value))
    places["logs"] = caplog.text
    planted_too = {"Vast's key": "va/st+key", "the Hub's token": "hf/tok+en"}
    assert leaks(places, planted.secrets | planted_too) == []


def test_a_session_token_is_refused_and_not_shown(rgw: RGW, bucket: str) -> None:
    """prefect-aws keeps it in plain text, and Prefect puts it into an event when it is saved."""
    key = rgw.assume_role(rgw.create_role("temporary"))
    assert key.session_token is not None
    one = Bucket(
        role=BucketRole.DATASET,
        url=f"s3://{bucket}",
        read_credentials=aws_credentials(key, rgw.endpoint),
    )
    with pytest.raises(ConfigurationError, match="have a session token") as refusal:
        one.open("read")
    places = shown(one) | {"the exception": "".join(traceback.format_exception(refusal.value))}
    assert leaks(places, {"token": key.session_token, "secret": key.secret_access_key}) == []


def shown(*things: Any) -> dict[str, str]:
    """How blocks and specs show themselves."""
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
    found = leaks(dict(run_leaves(prefect_api, run)), planted.secrets)
    assert "the destination's secret in its log, plain" in found
    assert "the destination's secret in its parameters, URL-encoded" in found
    for number in range(3):
        assert f"the destination's secret in its artifacts, base64 at {number}" in found
    in_tables = leaks(dict(server_leaves(prefect_api)), planted.secrets)
    tables = {line.split(" in table ")[1].split()[0] for line in in_tables}
    assert {"flow_run", "artifact", "log"} <= tables
