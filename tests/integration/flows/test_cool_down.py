"""The flows cooldown and save-checkpoint, on a bucket with credentials from a block."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize, SecretStr

from blocks import HuggingFaceCredentials
from flows.cooldown import run_cooldown
from flows.save_checkpoint import save_checkpoint
from millrace.checkpoints import (
    HubSpec,
    Saver,
    SaveSettings,
    load,
    open_destination,
    read_checkpoint,
    verify,
)
from millrace.checkpoints.cooldown.checkpointers import order_checkpointers
from millrace.keys.checkpoints import CheckpointKeys
from millrace.records import fetch
from millrace.schemas.checkpoint import Checkpoint, EpochRecord
from millrace.storage import Credentials, Store, StoreSpec, open_store
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.process import REPOSITORY
from millrace.testing.rgw import RGW
from tasks.formatting import format_size
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import MakeBlock

NAMES = [f"m{number}" for number in range(6)]
SEED = 11
Start = Callable[..., list[subprocess.Popen[str]]]


def saved(url: str, step: int = 40) -> Checkpoint:
    """A checkpoint on a disk, in 17 files."""
    dice = torch.Generator().manual_seed(1)
    state = {f"w{number}": torch.randn(2000, generator=dice) for number in range(16)}
    with Saver(open_store(url), "trained", SaveSettings(part_bytes=ByteSize(8192))) as saver:
        return saver.save(state, step=step, position={"sample": 123}).result()


@pytest.fixture
def spec(rgw: RGW, bucket: str) -> StoreSpec:
    pair = {
        "access_key_id": rgw.full.access_key_id,
        "secret_access_key": rgw.full.secret_access_key,
    }
    return StoreSpec(
        url=f"s3://{bucket}",
        endpoint=rgw.endpoint,
        credentials=Credentials.model_validate(pair),
    )


@pytest.fixture
def store(spec: StoreSpec) -> Store:
    return open_store(spec)


@pytest.fixture
def start(spec: StoreSpec, tmp_path: Path) -> Iterator[Start]:
    """Start members as processes, which die at an event if one is given for them."""
    saved((tmp_path / "disk").as_uri())
    settings = {
        "store": spec.reveal_secrets(),
        "job": "job",
        "epoch": 0,
        "source": {"url": (tmp_path / "disk").as_uri(), "job": "trained"},
        "members": len(NAMES),
        "lease_timeout": "PT3S",
        "seed": SEED,
    }

    with ExitStack() as stack:

        def members(deadly: dict[str, str]) -> list[subprocess.Popen[str]]:
            path = tmp_path / "settings.yaml"
            path.write_text(json.dumps(settings))  # JSON is YAML too
            command = [sys.executable, "-m", "tests.support.checkpoints.member", str(path)]
            started = [
                subprocess.Popen(
                    [*command, name, *filter(None, [deadly.get(name)])],
                    cwd=REPOSITORY,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for name in NAMES
            ]
            for process in started:
                stack.callback(process.communicate)
                stack.callback(process.kill)
            return started

        yield members


def go(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Let a member upload."""
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None  # so that nobody closes it again
    return process


def test_two_of_six_members_are_killed_in_the_race_and_the_epoch_has_a_checkpoint(
    prefect_api: PrefectServer,
    rgw: RGW,
    bucket: str,
    block: MakeBlock,
    store: Store,
    start: Start,
) -> None:
    first, second = order_checkpointers(NAMES, SEED)[:2]
    members = start(dict.fromkeys((first, second), "checkpoint.part"))

    running = prefect_api.begin(
        run_cooldown,
        bucket=block(bucket, write=rgw.full),
        job="job",
        epoch=0,
        timeout="PT3M",
    )
    by_name = dict(zip(NAMES, members, strict=True))
    for name in (first, second):  # nobody else uploads before both are dead
        assert go(by_name.pop(name)).wait(120) == -signal.SIGKILL
    for process in [go(process) for process in by_name.values()]:
        assert process.wait(120) == 0
    done = running.wait_for_result()

    assert done.code == 0, done.output
    epoch = fetch(store, CheckpointKeys("job").make_epoch_key(0), EpochRecord)
    found = read_checkpoint(store, "job", 40)
    assert epoch.root == found.root
    assert not verify(store, found)
    assert found.position == {"sample": 123}
    artifacts = prefect_api.read_artifacts(running.run)
    assert artifacts["progress-cooldown"] == 100.0
    report = artifacts["cooldown"]
    whole = f"{format_size(found.size)} in 17 files, committed by `{epoch.member}`"
    assert f"ended with **step 40**: {whole}" in report
    assert f"| `{epoch.member}` | **committed** |" in report
    assert f"| `{first}` | dead |" in report
    assert f"| `{second}` | dead |" in report
    assert report.count("| lost the race |") + report.count("| not chosen |") == 3


@pytest.mark.soak
def test_all_checkpointers_die_once(
    prefect_api: PrefectServer,
    rgw: RGW,
    bucket: str,
    block: MakeBlock,
    store: Store,
    start: Start,
) -> None:
    running = prefect_api.begin(
        run_cooldown,
        bucket=block(bucket, write=rgw.full),
        job="job",
        epoch=0,
        timeout="PT5M",
    )
    for process in start(dict.fromkeys(NAMES, "cooldown.racing")):
        assert process.wait(120) == -signal.SIGKILL  # one after the other stands in, and dies
    for process in [go(process) for process in start({})]:
        assert process.wait(120) == 0
    done = running.wait_for_result()
    assert done.code == 0, done.output
    epoch = fetch(store, CheckpointKeys("job").make_epoch_key(0), EpochRecord)
    assert not verify(store, read_checkpoint(store, "job", epoch.step))
    assert (
        f"| `{epoch.member}` | **committed** |"
        in prefect_api.read_artifacts(running.run)["cooldown"]
    )


def test_a_checkpoint_on_a_disk_is_brought_into_a_bucket(
    prefect_api: PrefectServer,
    rgw: RGW,
    bucket: str,
    block: MakeBlock,
    store: Store,
    tmp_path: Path,
) -> None:
    here = saved((tmp_path / "disk").as_uri())
    asked: dict[str, Any] = {
        "source": {"url": (tmp_path / "disk").as_uri(), "job": "trained"},
        "bucket": block(bucket, write=rgw.full),
        "job": "job",
    }

    done = prefect_api.call(save_checkpoint, **asked)
    assert done.code == 0, done.output
    found = read_checkpoint(store, "job", 40)
    assert (found.root, found.position) == (here.root, here.position)
    assert not verify(store, found)
    before = load(open_store((tmp_path / "disk").as_uri()), "trained").state
    assert torch.equal(load(store, "job").state["w3"], before["w3"])
    report = prefect_api.read_artifacts(done.run)["saved-checkpoint"]
    assert "**Step 40** of `job`" in report
    assert f"This run sent {format_size(found.size)}" in report

    again = prefect_api.call(save_checkpoint, **asked)
    assert again.code == 0, again.output
    assert "This run sent 0 bytes" in prefect_api.read_artifacts(again.run)["saved-checkpoint"]


def test_a_checkpoint_is_brought_to_the_hub_with_a_token_from_a_block(
    prefect_api: PrefectServer,
    hub: HubServer,
    tmp_path: Path,
) -> None:
    here = saved((tmp_path / "disk").as_uri())
    repo = hub.make_repo()

    def asked(token: str) -> dict[str, Any]:
        name = token.replace("_", "-")
        HuggingFaceCredentials(token=SecretStr(token), endpoint=hub.endpoint).save(name)
        block = {"$ref": {"block_document_slug": f"hugging-face-credentials/{name}"}}
        return {
            "source": {"url": (tmp_path / "disk").as_uri(), "job": "trained"},
            "job": "job",
            "hub": {"repo": repo, "credentials": block},
        }

    refused = prefect_api.call(save_checkpoint, **asked(READER))
    assert refused.code == 1
    state = prefect_api.read_flow_run(refused.run).state
    assert state is not None
    assert "read only: hf://" in (state.message or "")
    assert hub.count_commits(repo) == 1

    done = prefect_api.call(save_checkpoint, **asked(WRITER))
    assert done.code == 0, done.output
    spec = HubSpec(repo=repo, token=SecretStr(READER), endpoint=hub.endpoint)
    found = open_destination(spec).read_checkpoint("job", 40)
    assert found.root == here.root
    assert hub.count_commits(repo) == 2
    report = prefect_api.read_artifacts(done.run)["saved-checkpoint"]
    assert f"/{repo}/tree/main): " in report  # a link to the page of the repository
