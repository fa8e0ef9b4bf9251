"""The guide to cleanup, block by block."""

import os
from datetime import timedelta
from pathlib import Path

import pytest

from millrace.storage import open_store
from tests.support.cleanup.material import BucketBuilder
from tests.support.guides import follow

OLD = timedelta(days=30) / timedelta(hours=1)


def test_every_block_of_the_guide_to_cleanup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients, aggregates, other = (tmp_path / name for name in ("gradients", "aggregates", "x"))
    place = BucketBuilder(open_store(gradients.as_uri()))
    BucketBuilder(open_store(aggregates.as_uri())).put("anything")
    old = [place.put_gradient("runs/one", "worker-1", window, "1", OLD) for window in range(1, 13)]
    gone = [*old[:3], place.put("runs/one/worker-1/rubbish.bin", hours=OLD)]
    kept = [
        *old[3:],  # the newest ten windows, with the young one
        place.put_gradient("runs/one", "worker-1", 13, "1"),
        *(place.put_gradient("runs/paper", "worker-1", window, "1", OLD) for window in range(11)),
    ]
    BucketBuilder(open_store(other.as_uri())).put("data.bin")
    unfinished = other / "words" / "plan.json#1"  # left by a process that was killed while it wrote
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"half")
    os.utime(unfinished, (0, 0))
    values = {
        "r2://0123456789abcdef0123456789abcdef/gradients": gradients.as_uri(),
        "r2://0123456789abcdef0123456789abcdef/aggregates": aggregates.as_uri(),
        "r2://ACCOUNT/BUCKET": other.as_uri(),
        "/data/backup": str(tmp_path / "backup"),
    }
    folder = tmp_path / "clean"
    with follow("cleanup", folder, monkeypatch, values=values, environment={}) as guide:
        seen = guide.run()
        copied = guide.run()
        guide.write("clean.yaml")
        first = "$(ls ../gradients/_clean | sort | head -1)"
        cleaned = guide.run({"--plan NAME": f"--plan {first}"}, answer="y")
        foreign = guide.run()
        aborted = guide.run(answer="y")
        wiped = guide.run()
    assert "1 object, 1 byte, $0.00 a month" in seen
    assert "0 objects, 0 bytes." in seen
    assert "Copied 1 object, 1 byte" in copied
    assert (tmp_path / "backup/data.bin").read_bytes() == (other / "data.bin").read_bytes()
    assert "1 stay: it is pinned" in cleaned
    assert "4 were gone already" in cleaned  # of the first plan, which the last command executes
    assert "0 objects, 0 bytes." in foreign
    assert "Aborted 1 upload" in aborted
    assert [key for key in gone if (gradients / key).exists()] == []
    assert [key for key in kept if not (gradients / key).exists()] == []
    assert not unfinished.exists()
    assert "holds 1 object" in wiped
    assert (other / "data.bin").exists()
