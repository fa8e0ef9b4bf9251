"""A checkpoint brought to every node by the swarm, and loaded there from the disk."""

from pathlib import Path

import pytest
import torch
from pydantic import ByteSize

from benchmarks.rig.store import RigStore
from millrace import errors
from millrace.checkpoints import Saver, SaveSettings, load
from millrace.keys.checkpoints import CheckpointKeys
from millrace.storage import open_store, put
from millrace.swarm import Request, prewarm
from tests.support.swarm.swarms import make_settings, make_spec, running


def test_every_node_loads_what_left_the_store_once(tmp_path: Path) -> None:
    keys = CheckpointKeys("runs/one")
    state = {"w": torch.arange(200_000.0), "lr": 0.1}
    with RigStore.start(tmp_path / "objects") as store, running(tmp_path, 3) as agents:
        bucket = open_store(make_spec(store))
        with Saver(bucket, keys.job, SaveSettings(part_bytes=ByteSize(1 << 17))) as saver:
            saved = saver.save(state, step=7).result()
        folder = keys.make_folder_prefix(7).removesuffix("/")
        store.reset()
        asked = [Request(prefix=folder, destination=folder)]
        report = prewarm(make_settings(store, agents, requests=asked))
        assert report.store_bytes < 1.1 * saved.size
        for agent in agents:
            found = load(open_store(agent.root.as_uri()), keys.job)
            assert found.checkpoint == saved
            assert torch.equal(found.state["w"], state["w"])
        # What was damaged on a node's disk meanwhile is not loaded there.
        local = open_store(agents[0].root.as_uri())
        put(local, keys.make_part_key(7, saved.parts[0].digest), b"x" * saved.parts[0].size)
        with pytest.raises(errors.CorruptError):
            load(local, keys.job, step=7)
