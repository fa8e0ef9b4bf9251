"""Choice of the newest checkpoint, whose metadata cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import SecretStr

from millrace import errors
from millrace.checkpoints import SavedSource, list_steps
from millrace.cli import main
from millrace.keys.checkpoints import CheckpointKeys
from millrace.storage import Store, open_store, put, read
from millrace.swarm import Host, Hosts, PrewarmSettings, Request
from millrace.swarm.resolving import resolve_requests
from tests.support.cleanup.material import BucketBuilder

KEYS = CheckpointKeys("job")


@pytest.fixture(params=["later version", "damaged"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    """A job with two checkpoints, of which the newest has metadata that cannot be read."""
    store = open_store((tmp_path / "bucket").as_uri())
    for step in (900, 1000):
        BucketBuilder(store).put_checkpoint("job", step, [b"weights %d" % step])
    record: dict[str, Any] = json.loads(read(store, KEYS.make_metadata_key(1000)))
    record["version"] = 4
    later = request.param == "later version"
    put(store, KEYS.make_metadata_key(1000), json.dumps(record).encode() if later else b"{")
    return store


def test_no_older_checkpoint_is_taken_for_the_newest(store: Store, request: Any) -> None:
    later = "later version" in request.node.name
    with pytest.raises(errors.CorruptError, match=r"older checkpoint, name its step") as failure:
        SavedSource(url=store.url, job="job").open()
    assert type(failure.value) is (errors.VersionError if later else errors.CorruptError)
    assert SavedSource(url=store.url, job="job", step=900).open()[1].step == 900


def test_the_command_saves_no_older_checkpoint_unless_its_step_is_named(
    store: Store, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    words = ["checkpoint", "save", store.url, "job", target.as_uri()]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert "step_000001000/metadata.json" in done.output
    assert "name its step (`--step`)" in done.output
    assert CliRunner().invoke(main, [*words, "--step", "900"]).exit_code == 0
    assert list_steps(open_store(target.as_uri()), "job") == [900]


def test_a_prewarm_copies_no_older_checkpoint_unless_its_step_is_named(store: Store) -> None:
    def resolve(**step: int) -> list[str]:
        settings = PrewarmSettings(
            requests=(Request(checkpoint="job", **step),),
            stores={"s": store.spec},
            root=Path("/"),
            nodes=Hosts(hosts=(Host(url="http://127.0.0.1:1"),), key=SecretStr("k" * 32)),
        )
        return [key for _, key in resolve_requests(settings, {"s": store}).objects]

    with pytest.raises(errors.CorruptError, match="older checkpoint, name its step"):
        resolve()
    assert KEYS.make_metadata_key(900) in resolve(step=900)
