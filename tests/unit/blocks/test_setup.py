"""Changes of `millrace setup` to a block that is on the server already."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from prefect.blocks.core import Block
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_aws import AwsCredentials
from pydantic import SecretStr

from blocks import Bucket, BucketRole, HuggingFaceCredentials, VastCredentials, setup
from blocks.environment import BUCKET_LIST_VARIABLE, BucketSettings, read_buckets
from blocks.setup import SetupOutcome
from millrace.cli import main
from millrace.errors import ConfigurationError
from millrace.storage import Right
from tests.unit.blocks.test_environment import ACCOUNT, OTHER, PAIR, RIGHTS, variables

Saved = dict[tuple[type[Block], str], Block]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Saved:
    """Return the blocks of a server, by kind and name, which load and save use."""
    blocks: Saved = {}

    def load(kind: type[Block], name: str) -> Block:
        if (kind, name) not in blocks:
            raise ValueError(name)
        return blocks[kind, name]

    def save(block: Block, name: str, *, overwrite: bool) -> None:
        assert overwrite
        blocks[type(block), name] = block

    for kind in (Bucket, AwsCredentials, HuggingFaceCredentials):
        monkeypatch.setattr(kind, "load", classmethod(load))
        monkeypatch.setattr(kind, "save", save)
    return blocks


def read_dataset(right: Right | None = None, **changed: str) -> list[BucketSettings]:
    environment = variables(BucketRole.DATASET) | changed
    return read_buckets(environment, [BucketRole.DATASET], [right] if right else RIGHTS)


def save(buckets: list[BucketSettings]) -> dict[str, SetupOutcome]:
    return dict(one for bucket in buckets for one in setup._save_bucket(bucket, dry_run=False))


def get_bucket(saved: Saved) -> Bucket:
    block = saved[Bucket, "dataset"]
    assert isinstance(block, Bucket)
    return block


def test_setup_of_one_right_keeps_the_credentials_of_the_other(saved: Saved) -> None:
    save(read_dataset())
    again = save(read_dataset(Right.READ))
    assert set(again.values()) == {SetupOutcome.UNCHANGED}
    save(read_dataset(Right.READ, R2_DATASET_READ_ACCESS_KEY_ID="rotated"))
    keys = {}
    for right in Right:
        credentials = get_bucket(saved).make_spec(right).credentials
        assert credentials is not None
        keys[right] = credentials.access_key_id
    assert keys == {Right.READ: "rotated", Right.WRITE: "dataset-write"}


def test_setup_of_another_bucket_does_not_keep_credentials_of_the_earlier_one(
    saved: Saved,
) -> None:
    save(read_dataset())
    save(read_dataset(Right.READ, R2_DATASET_BUCKET_NAME="moved"))
    assert get_bucket(saved).url == f"r2://{ACCOUNT}/moved"
    assert get_bucket(saved).write_credentials is None


@pytest.mark.parametrize("url", [f"r2://{ACCOUNT}/dataset/team-a", "r2://dataset/team-a"])
def test_setup_keeps_the_prefix_of_a_block(saved: Saved, url: str) -> None:
    save(read_dataset())
    saved[Bucket, "dataset"] = get_bucket(saved).model_copy(update={"url": url})
    again = save(read_dataset())
    assert set(again.values()) == {SetupOutcome.UNCHANGED}
    assert get_bucket(saved).url == url


def test_setup_writes_a_new_order_of_mirrors(saved: Saved) -> None:
    save(read_dataset(**{BUCKET_LIST_VARIABLE: "s3://far, s3://near"}))
    again = save(read_dataset(**{BUCKET_LIST_VARIABLE: "s3://near, s3://far"}))
    assert again["block millrace-bucket/dataset"] is SetupOutcome.UPDATED
    assert get_bucket(saved).mirrors == ["s3://near", "s3://far"]


def test_setup_keeps_mirrors_of_the_form_if_the_environment_names_none(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    save(read_dataset())
    mirrors = ["s3://mirror/x", "other"]
    saved[Bucket, "dataset"] = get_bucket(saved).model_copy(update={"mirrors": mirrors})
    save(read_dataset(R2_DATASET_READ_ACCESS_KEY_ID="rotated"))
    assert get_bucket(saved).mirrors == mirrors
    assert capsys.readouterr().err == ""

    save(read_dataset(**{BUCKET_LIST_VARIABLE: "s3://mirror/x, s3://new"}))
    assert get_bucket(saved).mirrors == ["s3://mirror/x", "s3://new"]
    assert "dataset: without its mirrors other, which" in capsys.readouterr().err
    save(read_dataset(R2_DATASET_BUCKET_NAME="moved"))
    assert get_bucket(saved).mirrors == []
    assert "without its mirrors s3://mirror/x, s3://new," in capsys.readouterr().err


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Right]]:
    """Return the URL and the right of each check, which sends nothing."""
    calls: list[tuple[str, Right]] = []
    monkeypatch.setattr(
        Bucket, "check", lambda block, right: calls.append((block.make_spec(right).url, right))
    )
    return calls


@pytest.mark.usefixtures("saved")
def test_a_mirror_without_write_credentials_is_checked_for_reading(
    checked: list[tuple[str, Right]],
) -> None:
    mirror = {"account_id": OTHER, "name": "mirror", "credentials": {"read": PAIR}}
    setup._check_credentials(read_dataset(**{BUCKET_LIST_VARIABLE: json.dumps([mirror])}), RIGHTS)
    assert checked == [
        (f"r2://{OTHER}/mirror", Right.READ),
        (f"r2://{ACCOUNT}/dataset", Right.READ),
        (f"r2://{ACCOUNT}/dataset", Right.WRITE),
    ]


@pytest.mark.usefixtures("saved", "checked")
def test_a_bucket_without_write_credentials_fails_the_check() -> None:
    entry = {"account_id": ACCOUNT, "name": "first", "credentials": {"read": PAIR}}
    buckets = read_buckets(
        {BUCKET_LIST_VARIABLE: json.dumps([entry])}, [BucketRole.DATASET], RIGHTS
    )
    with pytest.raises(ConfigurationError, match="write credentials are needed"):
        setup._check_credentials(buckets, RIGHTS)


def test_the_check_is_below_the_prefix_of_the_block(
    saved: Saved, checked: list[tuple[str, Right]]
) -> None:
    save(read_dataset())
    url = f"r2://{ACCOUNT}/dataset/team-a"
    saved[Bucket, "dataset"] = get_bucket(saved).model_copy(update={"url": url})
    setup._check_credentials(read_dataset(), [Right.READ])
    assert checked == [(url, Right.READ)]


def test_a_webhook_without_its_scheme_is_refused_before_anything_is_made() -> None:
    """An automation would call it in vain, and nobody would hear of a failure."""
    environment = {"MILLRACE_NOTIFY_URL": "hooks.example.com/services/a-secret"}
    done = CliRunner().invoke(main, ["setup", "--without-buckets"], env=environment)
    assert done.exit_code == 2
    assert "MILLRACE_NOTIFY_URL is no URL: it begins with https:// or http://." in done.output
    assert "a-secret" not in done.output


def test_white_space_around_a_key_is_no_part_of_it() -> None:
    """A .env file whose lines end in carriage returns leaves them at the keys."""
    ((block, name),) = setup._read_account_blocks({"VAST_API_KEY": "a key\r", "HF_TOKEN": "\r"})
    assert name == "vast"
    assert isinstance(block, VastCredentials)
    assert block.api_key.get_secret_value() == "a key"


@pytest.mark.parametrize("command", ["setup", "deploy"])
def test_ctrl_c_ends_a_command_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("read_buckets", "check_server"):
        monkeypatch.setattr(setup, name, interrupt)
    done = CliRunner().invoke(main, [command])
    assert (done.exit_code, "Stopped. Run it again" in done.output) == (130, True)


def test_setup_keeps_the_fields_of_an_account_that_the_environment_does_not_name(
    saved: Saved,
) -> None:
    hub = HuggingFaceCredentials(token=SecretStr("old"), endpoint="https://hub.example.com")
    saved[HuggingFaceCredentials, "hugging-face"] = hub
    ((wanted, name),) = setup._read_account_blocks({"HF_TOKEN": "new"})
    _, outcome = setup._save_block(wanted, name, dry_run=False, keeps_fields=True)
    found = saved[HuggingFaceCredentials, "hugging-face"]
    assert isinstance(found, HuggingFaceCredentials)
    assert (found.token.get_secret_value(), found.endpoint) == ("new", "https://hub.example.com")
    assert outcome is SetupOutcome.UPDATED
    again = setup._save_block(wanted, name, dry_run=False, keeps_fields=True)[1]
    assert again is SetupOutcome.UNCHANGED


class _OtherServer(BaseHTTPRequestHandler):
    """A server whose answer is the first part of the path: `/404/api/health` answers 404."""

    def do_GET(self) -> None:
        code = int(self.path.split("/")[1])
        self.send_response(200 if code in {401, 403} and self.path.endswith("/health") else code)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other_server() -> Iterator[str]:
    """Return the URL of a web server that is no Prefect server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _OtherServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ("200", 2, "is not the API of a Prefect server, and may be its UI"),
        ("404", 2, "is not the API of a Prefect server, and may be its UI"),
        ("401", 1, "The Prefect server wants a password: set PREFECT_API_AUTH_STRING"),
        ("", 1, "No Prefect server answers at http://127.0.0.1:9"),
    ],
)
@pytest.mark.parametrize("command", ["setup --without-buckets", "deploy", "campaign run PLAN"])
def test_a_wrong_address_of_the_server_is_a_sentence(
    other_server: str, tmp_path: Path, command: str, answer: str, code: int, said: str
) -> None:
    plan = tmp_path / "campaign.yaml"
    plan.write_text(f"name: small\nbucket: {tmp_path.as_uri()}\n")
    words = command.replace("PLAN", str(plan)).split()
    url = f"{other_server}/{answer}" if answer else "http://127.0.0.1:9"
    with temporary_settings({PREFECT_API_URL: f"{url}/api"}):
        done = CliRunner().invoke(main, words)
    assert (done.exit_code, said in done.output) == (code, True), done.output
