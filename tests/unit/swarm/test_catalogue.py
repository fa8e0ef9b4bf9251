"""Objects that a request finds, without a node."""

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from flows.prewarm import FilesRequest
from millrace import errors
from millrace.keys.datasets import DatasetKeys
from millrace.records import fetch
from millrace.schemas.dataset import Manifest
from millrace.storage import Store, delete, open_store, put, read
from millrace.swarm import Host, Hosts, PrewarmSettings, Request, preview
from tests.support.campaigns.workers import finalize_dataset

HOSTS = Hosts(hosts=(Host(url="http://127.0.0.1:1"),), key=SecretStr("k" * 32))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A complete dataset, with the other objects of a sharding run."""
    store = open_store((tmp_path / "store").as_uri())
    finalize_dataset(store, 3)
    for key in ("plan.json", "commits/train-00000/000000.json", "lease/train-00000/000000.json",
                "shards/webdataset/train/train-00000-000009.tar"):  # fmt: skip
        put(store, f"text/{key}", b"{}")
    return store


def settings_of(store: Store, files: FilesRequest) -> PrewarmSettings:
    """Return the settings that the flow passes to the engine."""
    return PrewarmSettings(
        requests=(files.make_request("0"),),
        stores={"0": files.make_spec()},
        root=Path("/"),
        nodes=HOSTS,
    )


def test_of_a_dataset_the_shards_of_its_manifest_are_found_and_nothing_else(store: Store) -> None:
    files = FilesRequest(url=store.url, dataset="text")
    found = preview(settings_of(store, files))
    manifest = fetch(store, DatasetKeys("text").manifest, Manifest)
    wanted = {shard.key: shard.size for shard in manifest.shards}
    assert {path: size for path, size, _ in found.files} == wanted
    assert found.unverified == 0

    elsewhere = preview(settings_of(store, files.model_copy(update={"destination": "here"})))
    assert {path for path, *_ in elsewhere.files} == {
        key.replace("text/", "here/", 1) for key in wanted
    }


def test_a_dataset_that_is_not_whole_is_refused(store: Store) -> None:
    settings = settings_of(store, FilesRequest(url=store.url, dataset="text"))
    put(store, "text/shards/webdataset/train/train-00000-000001.tar", b"cut")
    with pytest.raises(errors.CorruptError, match=r"000001\.tar has 3 bytes, and \d+ by the man"):
        preview(settings)
    delete(store, ["text/shards/webdataset/train/train-00000-000001.tar"])
    with pytest.raises(errors.NotFoundError, match=r"000001\.tar is missing"):
        preview(settings)
    delete(store, [DatasetKeys("text").manifest])
    with pytest.raises(
        errors.NotFoundError, match="text has no manifest: the dataset is not complete"
    ):
        preview(settings)


def test_a_dataset_that_was_renamed_is_refused(store: Store) -> None:
    put(store, "words/manifest.json", read(store, "text/manifest.json", max_size=1 << 20))
    with pytest.raises(errors.ConfigurationError, match="words is a copy of the dataset 'text'"):
        preview(settings_of(store, FilesRequest(url=store.url, dataset="words")))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({}, "must name one of"),
        ({"key": "a", "dataset": "b"}, "must name one of"),
        ({"prefix": "", "dataset": "b"}, "must name one of"),
        ({"checkpoint": "a", "dataset": "b"}, "must name one of"),
        ({"dataset": "b", "step": 1}, "`step` needs a `checkpoint`"),
    ],
)
def test_a_request_names_one_kind_of_thing(more: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Request.model_validate(more)
