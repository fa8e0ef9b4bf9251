"""Trainings share the cache of a node while one is killed. The oracle judges their samples."""

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from millrace.datasets.formats import FieldType
from millrace.datasets.sample import Sample
from millrace.schemas.dataset import Manifest
from millrace.storage import StoreSpec, open_store
from millrace.testing.process import REPOSITORY
from tests.oracle import Folder, judge_epoch
from tests.support.shard_datasets import write_dataset

SHARDS, SHARD_SAMPLES = 24, 25
TOTAL = SHARDS * SHARD_SAMPLES


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A dataset of which the cache has room for a third."""
    samples = [Sample(f"k{n:03d}", {"txt": f"text {n}".encode()}, n) for n in range(TOTAL)]
    shards = [samples[at : at + SHARD_SAMPLES] for at in range(0, TOTAL, SHARD_SAMPLES)]
    store = open_store((tmp_path / "store").as_uri())
    return write_dataset(store, "corpus", ["webdataset"], {"txt": FieldType.STR}, shards)


class Training:
    """A training process, and what it has reported.

    Args:
        folder: Folder of the store and of the cache.
        max_bytes: Largest size of the cache.
        state: State with which it resumes.
        stop: Step of a file, and the file's digest, at which it waits for a line.
    """

    def __init__(
        self, folder: Path, max_bytes: int, *, state: Any = None, stop: list[str] | None = None
    ) -> None:
        self._cache, self._max_bytes = folder / "cache", max_bytes
        self.received: list[tuple[str, str]] = []
        self.state: Any = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.shard_training"],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._send(
            {
                "store": StoreSpec(url=(folder / "store").as_uri()).reveal_secrets(),
                "rank": 0, "world_size": 1, "streams": 2, "state": state,
                "cache": str(self._cache), "max_bytes": max_bytes, "stop": stop,
            }
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:
            pass

    def wait_for(self, step: str, digest: str) -> None:
        """Wait until the training has reported a step of a file."""
        assert {"step": step, "digest": digest} in self._read_messages()

    def go_on(self) -> None:
        """Let the training go on from the step at which it waits."""
        self._send("go on")

    def kill(self) -> None:
        """Send SIGKILL, and read what the training had reported before."""
        self._process.send_signal(signal.SIGKILL)
        assert self._read_to_end() == -signal.SIGKILL

    def finish(self) -> None:
        """Wait until the training has ended its epoch."""
        assert self._read_to_end() == 0

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _read_to_end(self) -> int:
        for _ in self._read_messages():
            pass
        return self._process.wait()

    def _read_messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the training. At each, the cache is within its bound."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "received" in message:
                self.received += map(tuple, message["received"])
                self.state = message["state"]
            assert measure_cache(self._cache) <= self._max_bytes
            yield message


def measure_cache(cache: Path) -> int:
    """Return the bytes of all files of a cache, in which no process makes room meanwhile."""
    with (cache / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        size = 0
        for path in [*(cache / "files").iterdir(), *(cache / "parts").iterdir()]:
            with suppress(FileNotFoundError):  # it has its final name now
                size += path.stat().st_size
        return size


@pytest.mark.parametrize(
    ("killed_at", "other_at"),
    [
        pytest.param("downloaded", "wanted", id="while-the-other-waits-for-its-file"),
        pytest.param("lent", "lent", id="while-both-read-a-file"),
    ],
)
def test_a_training_that_is_killed_disturbs_no_other_over_their_cache(
    manifest: Manifest, tmp_path: Path, killed_at: str, other_at: str
) -> None:
    digest, room = manifest.shards[SHARDS // 2].digest, manifest.size // 3
    with Training(tmp_path, room, stop=[killed_at, digest]) as killed:
        killed.wait_for(killed_at, digest)
        with Training(tmp_path, room, stop=["lent", digest]) as other:
            other.wait_for(other_at, digest)
            killed.kill()
            assert 0 < len(killed.received) < TOTAL
            assert 0 < len(other.received) < TOTAL
            with Training(tmp_path, room, state=killed.state) as resumed:
                resumed.finish()  # while the other one is in its epoch
            other.go_on()
            other.finish()
    assert judge_received(tmp_path, killed.received + resumed.received) == ""
    assert judge_received(tmp_path, other.received) == ""
    assert list((tmp_path / "cache" / "parts").iterdir()) == []


def judge_received(folder: Path, received: list[tuple[str, str]]) -> str:
    """Judge the samples of an epoch; an empty text is right."""
    verdict = judge_epoch(Folder(folder / "store"), "corpus", received)
    return "" if verdict.is_correct else str(verdict)
