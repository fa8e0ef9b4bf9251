"""Ends of epochs whose checkpoint goes to another destination than the members' bucket."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace import errors
from millrace.checkpoints import (
    CooldownOutcome,
    CooldownSettings,
    Destination,
    EpochSaver,
    HubSpec,
    MemberSettings,
    Membership,
    OnTimeout,
    Saver,
    SaveSettings,
    end_epoch,
    open_destination,
    watch_epoch_end,
)
from millrace.checkpoints.contents import PartContent
from millrace.checkpoints.cooldown.checkpointers import order_checkpointers
from millrace.checkpoints.cooldown.cooldown import cool_down
from millrace.checkpoints.progress_events import EpochEndedWithoutCheckpoint
from millrace.checkpoints.snapshot import SnapshotBuffers, StateShards
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Event
from millrace.records import commit_once, fetch
from millrace.schemas.checkpoint import EpochRecord
from millrace.storage import Store, list_objects, open_store
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.process import REPOSITORY
from tests.stores import make_spec

pytestmark = pytest.mark.contract

JOB = "runs/one"
SEED = 7
NAMES = ["a", "b", "c", "d"]
SMALL = SaveSettings(part_bytes=4096, uploads=1)

KILLED = """
import json, os, signal, sys
from millrace.checkpoints import MemberSettings, end_epoch
from millrace.checkpoints.progress_events import PartStored

def die(event):
    if isinstance(event, PartStored):
        os.kill(os.getpid(), signal.SIGKILL)

end_epoch(MemberSettings(**json.loads(sys.argv[1])), sys.argv[2], progress=die)
"""
"""A member that is killed after the upload of its first file."""


@dataclass(frozen=True)
class Elsewhere:
    """A destination, and its settings as they are in a file."""

    settings: dict[str, Any]
    opened: Destination


@pytest.fixture(params=["gcs", "hub"])
def elsewhere(request: pytest.FixtureRequest) -> Elsewhere:
    if request.param == "gcs":
        spec = make_spec("gcs", request)
        return Elsewhere(spec.reveal_secrets(), open_destination(spec))
    hub: HubServer = request.getfixturevalue("hub")
    settings = {"repo": hub.make_repo(), "token": WRITER, "endpoint": hub.endpoint}
    return Elsewhere(settings, open_destination(HubSpec.model_validate(settings)))


@pytest.fixture
def bucket(tmp_path: Path) -> Store:
    return open_store((tmp_path / "bucket").as_uri())


@pytest.fixture
def make_settings(tmp_path: Path, bucket: Store) -> Callable[..., dict[str, Any]]:
    """Settings of members that have saved the same checkpoint on their disks."""
    dice = torch.Generator().manual_seed(0)
    state = {f"w{number}": torch.randn(900, generator=dice) for number in range(6)}
    disk = open_store((tmp_path / "disk").as_uri())
    with Saver(disk, "mine", SMALL) as saver:
        saver.save(state, step=5, position={"sample": 9}).result()

    def make(destination: dict[str, Any], members: int = 4) -> dict[str, Any]:
        return {
            "store": {"url": bucket.url},
            "destination": destination,
            "job": JOB,
            "epoch": 0,
            "source": {"url": disk.url, "job": "mine"},
            "members": members,
            "seed": SEED,
            "cooldown": {"save": {"part_bytes": 4096, "uploads": 1}, "time": "PT1M"},
        }

    return make


def test_an_epoch_has_its_checkpoint_elsewhere_though_two_checkpointers_are_killed(
    bucket: Store, elsewhere: Elsewhere, make_settings: Callable[..., dict[str, Any]]
) -> None:
    settings = make_settings(elsewhere.settings)
    killed, living = order_checkpointers(NAMES, SEED)[:2], order_checkpointers(NAMES, SEED)[2:]

    def run_killed(name: str) -> int:
        command = [sys.executable, "-c", KILLED, json.dumps(settings), name]
        return subprocess.run(command, cwd=REPOSITORY, check=False).returncode

    with ThreadPoolExecutor(len(NAMES)) as pool:
        ends = [pool.submit(run_killed, name) for name in killed]
        results = list(pool.map(lambda name: end_epoch(MemberSettings(**settings), name), living))
        assert [end.result() for end in ends] == [-signal.SIGKILL] * 2
    outcomes = [result.outcome for result in results]
    assert outcomes.count(CooldownOutcome.COMMITTED) == 1
    assert all(result.is_durable for result in results)

    epoch = fetch(bucket, CheckpointKeys(JOB).make_epoch_key(0), EpochRecord)
    assert epoch.destination == elsewhere.opened.url
    saved = elsewhere.opened.read_checkpoint(JOB, 5)
    assert (saved.root, saved.position) == (epoch.root, {"sample": 9})
    assert elsewhere.opened.verify(saved) == {}
    assert not [one.key for one in list_objects(bucket) if "/checkpoints/" in one.key]

    seen = watch_epoch_end(bucket, JOB, 0, timeout=timedelta(0))
    assert seen.epoch == epoch
    assert seen.checkpoint is None


def test_an_epoch_of_a_training_loop_is_saved_elsewhere(
    bucket: Store, elsewhere: Elsewhere
) -> None:
    state = {"w": torch.arange(3000, dtype=torch.float32)}
    settings = CooldownSettings(save=SMALL)
    with (
        Membership(bucket, JOB, "a", destination=elsewhere.opened) as member,
        EpochSaver(member, settings) as saver,
    ):
        first = saver.end(state, epoch=0, step=5)
        again = saver.end(state, epoch=1, step=5)  # the destination has this checkpoint
        other = saver.end({"w": state["w"] + 1}, epoch=2, step=5)
    assert first.outcome is again.outcome is CooldownOutcome.COMMITTED
    assert first.sent > again.sent == 0
    assert other.outcome is CooldownOutcome.FAILED
    assert not other.is_durable


def test_an_upload_elsewhere_stops_when_the_epoch_ends_without_a_checkpoint(
    tmp_path: Path, bucket: Store
) -> None:
    opened = open_destination((tmp_path / "elsewhere").as_uri())
    ended = threading.Event()
    content = SnapshotBuffers().snapshot(StateShards({"w": torch.ones(9000)}), 4096).make_content(5)

    def note_end(event: Event) -> None:
        if isinstance(event, EpochEndedWithoutCheckpoint):
            ended.set()

    def read(number: int) -> PartContent:
        ended.wait()  # the upload is in the midst of a file when the epoch ends
        return content.read(number)

    settings = CooldownSettings(
        save=SMALL, time=timedelta(milliseconds=1), on_timeout=OnTimeout.ADVANCE
    )
    with Membership(bucket, JOB, "a", destination=opened) as member:
        result = cool_down(
            member, replace(content, read=read), epoch=0, settings=settings, progress=note_end
        )
    assert result.outcome is CooldownOutcome.FAILED
    assert not result.is_durable
    with pytest.raises(errors.NotFoundError):
        opened.read_checkpoint(JOB, 5)


def test_an_epoch_that_names_a_checkpoint_which_is_not_there_has_not_ended(
    bucket: Store, elsewhere: Elsewhere
) -> None:
    forged = EpochRecord(
        job=JOB, epoch=0, step=5, root="blake3:" + "0" * 64, destination=elsewhere.opened.url
    )
    commit_once(bucket, CheckpointKeys(JOB).make_epoch_key(0), forged)
    with (
        Membership(bucket, JOB, "a", destination=elsewhere.opened) as member,
        EpochSaver(member, CooldownSettings(save=SMALL)) as saver,
    ):
        saver.end({"w": torch.ones(9)}, epoch=0, step=5)
    assert elsewhere.opened.verify(elsewhere.opened.read_checkpoint(JOB, 5)) == {}


def test_a_member_that_cannot_save_elsewhere_does_not_join(bucket: Store, hub: HubServer) -> None:
    spec = {"repo": hub.make_repo(), "token": READER, "endpoint": hub.endpoint}
    destination = open_destination(HubSpec.model_validate(spec))
    with (
        pytest.raises(errors.DeniedError, match="hf://"),
        Membership(bucket, JOB, "a", destination=destination),
    ):
        pass
    with pytest.raises(errors.ConfigurationError, match="the owner of the job commits"):
        Membership(bucket, JOB, "a", reads=bucket, destination=destination)
