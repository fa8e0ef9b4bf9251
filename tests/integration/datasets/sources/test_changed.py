"""A source that changes between a stop and the next run: refused, or read as it was."""

import csv
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from pyarrow import parquet

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets import preflight_dataset
from millrace.datasets.progress_events import ShardCommitted
from millrace.storage import delete, open_store, put
from millrace.testing.hub import READER, WRITER, HubServer
from tests.oracle import Folder
from tests.stores import make_spec
from tests.support.flows.fixtures import read_texts
from tests.support.web import Site, serve

KINDS = {
    "jsonl": "jsonl",
    "csv": "csv",
    "parquet": "parquet",
    "webdataset": "tar",
    "files": "txt",
}
"""Extension of the files of each kind of source."""
ROWS = 60  # in each file
CHANGES = ["replaced", "truncated", "removed", "added"]


class Place(Protocol):
    """Location of the files of a source."""

    def write(self, name: str, body: bytes) -> None:
        """Write a file, with another ETag or time than before."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file."""
        ...

    def make_source(self, names: list[str]) -> dict[str, Any]:
        """Return the settings by which a run reads the files."""
        ...


class FolderPlace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0
        folder.mkdir()

    def write(self, name: str, body: bytes) -> None:
        self._written += 1
        path = self._folder / name
        path.write_bytes(body)
        os.utime(path, ns=(self._written, self._written))  # also if the clock did not move

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()

    def make_source(self, names: list[str]) -> dict[str, Any]:
        return {"url": self._folder.as_uri()}


class BucketPlace:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._store = open_store(make_spec("rgw", request))

    def write(self, name: str, body: bytes) -> None:
        put(self._store, name, body)

    def remove(self, name: str) -> None:
        assert delete(self._store, [name]) == []

    def make_source(self, names: list[str]) -> dict[str, Any]:
        return self._store.spec.reveal_secrets()


class WebPlace:
    def __init__(self, site: Site) -> None:
        self._site = site

    def write(self, name: str, body: bytes) -> None:
        site = self._site
        site.files[f"/{name}"] = body
        site.etags[f"/{name}"] = f'"{len(site.etags)}-{site.etags.get(f"/{name}")}"'

    def remove(self, name: str) -> None:
        del self._site.files[f"/{name}"]

    def make_source(self, names: list[str]) -> dict[str, Any]:
        return {"url": self._site.url, "paths": names, "allow_private": True}


class HubPlace:
    def __init__(self, hub: HubServer) -> None:
        self._hub = hub
        self._repo = hub.make_repo(dataset=True)

    def write(self, name: str, body: bytes) -> None:
        self._commit(CommitOperationAdd(name, body))

    def remove(self, name: str) -> None:
        self._commit(CommitOperationDelete(name))

    def make_source(self, names: list[str]) -> dict[str, Any]:
        return {
            "url": f"hf://datasets/{self._repo}",
            "endpoint": self._hub.endpoint,
            "options": {"token": READER},
        }

    def _commit(self, operation: CommitOperationAdd | CommitOperationDelete) -> None:
        HfApi(endpoint=self._hub.endpoint, token=WRITER).create_commit(
            self._repo, [operation], commit_message="a change", repo_type="dataset"
        )


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    match request.param:
        case "folder":
            yield FolderPlace(tmp_path / "source")
        case "bucket":
            yield BucketPlace(request)
        case "web":
            with serve(Site()) as site:
                yield WebPlace(site)
        case _:
            yield HubPlace(request.getfixturevalue("hub"))


def make_bodies(kind: str, texts: list[str]) -> dict[str, bytes]:
    """Return files with the texts, by their names. A source of files has one for each text."""
    if kind == "files":
        return {f"{text.split()[0]}.txt": text.encode() for text in texts}
    body = io.BytesIO()
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"text": texts}), body, row_group_size=20)
    elif kind == "webdataset":
        with tarfile.open(fileobj=body, mode="w") as tar:
            for text in texts:
                member = tarfile.TarInfo(f"{text.split()[0]}.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
    elif kind == "csv":
        written = io.StringIO()
        csv.writer(written).writerows([["text"], *([text] for text in texts)])
        body.write(written.getvalue().encode())
    else:
        body.write(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    name = texts[0].partition("-")[0]
    return {f"{name}.{KINDS[kind]}": body.getvalue()}


def make_texts(name: str) -> list[str]:
    return [f"{name}-{number:03d} {'water ' * 20}" for number in range(ROWS)]


class StopError(Exception):
    pass


def stop_at_a_commit(event: object) -> None:
    if isinstance(event, ShardCommitted):
        raise StopError


def change_one(place: Place, bodies: dict[str, bytes], added: dict[str, bytes], how: str) -> str:
    """Change a file, or add one. Returns its name."""
    name = sorted(bodies)[len(bodies) // 2]
    match how:
        case "replaced":
            place.write(name, bodies[name][::-1])
        case "truncated":
            place.write(name, bodies[name][: len(bodies[name]) // 2])
        case "removed":
            place.remove(name)
        case _:
            name = next(iter(added))
            place.write(name, added[name])
    return name


def begin(place: Place, tmp_path: Path, kind: str, file_kind: str) -> tuple[Any, ...]:
    """Make a source and a run that stops after a commit."""
    texts = [text for name in "abc" for text in make_texts(name)]
    bodies: dict[str, bytes] = {}
    for name in "abc":
        bodies |= make_bodies(file_kind, make_texts(name))
    for name, body in bodies.items():
        place.write(name, body)
    has_columns = file_kind not in {"files", "webdataset"}
    source = {"kind": kind, "columns": {"txt": "text"} if has_columns else None}
    settings = PipelineSettings.model_validate(
        {
            "dataset": "words",
            "source": {**source, **place.make_source(list(bodies))},
            "store": {"url": (tmp_path / "out").as_uri()},
            "sharding": {"shard_samples": 25, "partition_bytes": 4000},
            "execution": {"workers": 0},
        }
    )
    with pytest.raises(StopError):
        shard_dataset(settings, progress=stop_at_a_commit)
    return settings, texts, bodies


def find_refusals(settings: PipelineSettings) -> tuple[str, ...]:
    """Return the refusals of a plan of a changed source, also if it cannot be planned any more."""
    try:
        return preflight_dataset(settings)[1].refusals
    except errors.ChangedError as error:
        return (str(error),)


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["folder", "bucket", "web"], indirect=True)
def test_a_file_that_changed_is_named_and_nothing_is_mixed(place, tmp_path, kind, how):
    settings, texts, bodies = begin(place, tmp_path, kind, kind)
    name = change_one(place, bodies, make_bodies(kind, make_texts("d")), how)
    before = read_texts(Folder(tmp_path / "out"))
    assert before
    if how == "added" and isinstance(place, WebPlace):  # `paths` does not name it
        shard_dataset(settings)
        assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
        return
    (refusal,) = find_refusals(settings)
    assert name in refusal
    assert "under another dataset name" in refusal
    with pytest.raises(errors.ChangedError) as found:
        shard_dataset(settings)
    assert name in str(found.value)
    assert "under another dataset name" in str(found.value)
    assert read_texts(Folder(tmp_path / "out")) == before


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize(
    ("kind", "file_kind"),
    [*((kind, kind) for kind in KINDS), ("huggingface", "jsonl"), ("huggingface", "parquet")],
)
@pytest.mark.parametrize("place", ["hub"], indirect=True)
def test_a_dataset_of_the_hub_goes_on_at_its_commit(place, tmp_path, kind, file_kind, how):
    settings, texts, bodies = begin(place, tmp_path, kind, file_kind)
    change_one(place, bodies, make_bodies(file_kind, make_texts("d")), how)
    shard_dataset(settings)
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
