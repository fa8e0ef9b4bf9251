"""Locations of flows: a block, a block's name, a URL or an absolute path; nothing else."""

import importlib
import inspect
import shutil
import types
import typing
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import pytest
import torch
import yaml
from prefect import Flow, flow
from prefect.exceptions import ParameterTypeError
from pydantic import BaseModel, TypeAdapter, ValidationError

from blocks import Bucket, BucketRole
from flows.abort_uploads import abort_uploads
from flows.clean_bucket import clean_bucket
from flows.prewarm import prewarm
from flows.release_machines import release_machines
from flows.save_checkpoint import save_checkpoint
from flows.shard_dataset import shard_dataset
from flows.verify_datasets import verify_datasets
from millrace.checkpoints import Saver, VerifyDepth, find_newest
from millrace.errors import ConfigurationError, CorruptError
from millrace.storage import Right, open_store
from millrace.testing.process import REPOSITORY
from tasks.locations import BucketLocation, make_store_spec, refuse_temporary
from tests.oracle import Folder
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import SHARDING, make_texts, read_texts

HERE: dict[str, Any] = {"workers": 0, "uploads": 1}


@pytest.fixture
def named(prefect_api: PrefectServer, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The name of a block of a folder, and the folder."""
    name, folder = f"folder-{uuid4().hex[:8]}", tmp_path / "bucket"
    folder.mkdir()
    Bucket(role=BucketRole.DATASET, url=folder.as_uri()).save(name)
    yield name, folder
    Bucket.delete(name)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, as a worker gives a flow run one."""
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_name_is_a_blocks_name_wherever_a_dataset_goes(
    named: tuple[str, Path], elsewhere: Path, folder_source: dict[str, Any]
) -> None:
    name, folder = named
    shard_dataset("words", folder_source, name, SHARDING, HERE)  # pyright: ignore[reportArgumentType]
    assert read_texts(Folder(folder)) == Counter(make_texts())
    assert list(elsewhere.iterdir()) == []
    assert list(verify_datasets(name) or ()) == ["words"]


def test_the_mirrors_of_a_block_are_verified_too(
    named: tuple[str, Path], elsewhere: Path, folder_source: dict[str, Any], tmp_path: Path
) -> None:
    name, folder = named
    copy = tmp_path / "copy"
    Bucket(role=BucketRole.DATASET, url=folder.as_uri(), mirrors=[copy.as_uri()]).save(
        name, overwrite=True
    )
    shard_dataset("words", folder_source, name, SHARDING, HERE)  # pyright: ignore[reportArgumentType]
    shutil.copytree(folder, copy)
    found = verify_datasets(name, depth=VerifyDepth.DIGESTS)
    assert found is not None
    assert list(found) == ["words", f"words in {copy.as_uri()}"]
    assert all(one.is_intact and one.shards > 1 for one in found.values())

    lost = next(copy.rglob("*.tar"))
    lost.unlink()
    with pytest.raises(CorruptError, match=r"Missing or different .*: 1 object"):
        verify_datasets(name)
    manifest = copy / "words/manifest.json"
    manifest.write_text(manifest.read_text().replace('"quarantined":0', '"quarantined":1'))
    with pytest.raises(CorruptError, match="2 objects"):
        verify_datasets(name)
    shutil.rmtree(copy)
    with pytest.raises(CorruptError, match="1 object"):
        verify_datasets(name)


def test_a_checkpoint_goes_to_the_block_that_is_named(
    named: tuple[str, Path], elsewhere: Path, tmp_path: Path
) -> None:
    name, folder = named
    saved = tmp_path / "saved"
    with Saver(open_store(saved.as_uri()), "job") as saver:
        saver.save({"w": torch.zeros(10)}, step=3).result()
    save_checkpoint({"url": saved.as_uri(), "job": "job"}, "copy", bucket=name)  # pyright: ignore[reportArgumentType]
    found = find_newest(open_store(folder.as_uri()), "copy")
    assert found is not None
    assert found.step == 3
    assert list(elsewhere.iterdir()) == []
    save_checkpoint({"bucket": name, "job": "copy"}, "again", bucket=str(saved))  # pyright: ignore[reportArgumentType]
    assert find_newest(open_store(saved.as_uri()), "again") is not None


def test_a_name_without_a_block_names_the_blocks_that_there_are(
    named: tuple[str, Path], elsewhere: Path, folder_source: dict[str, Any]
) -> None:
    name, _ = named
    with pytest.raises(ConfigurationError) as refused:
        shard_dataset("words", folder_source, f"{name}x", SHARDING, HERE)  # pyright: ignore[reportArgumentType]
    assert f"There is no Millrace Bucket block '{name}x'. There" in str(refused.value)
    assert repr(name) in str(refused.value)  # of many those that are most alike
    assert "file:///folder" in str(refused.value)
    with pytest.raises(ConfigurationError, match="no Millrace Bucket block 'datasett'"):
        release_machines("fleet", "datasett")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["out/words", "./out", "..", "data.d", "file://out", "file:out", ""]
)
def test_a_relative_path_is_refused_with_a_sentence(
    prefect_api: PrefectServer, elsewhere: Path, path: str
) -> None:
    source = {"url": "file:///data/words", "columns": {"txt": "text"}}
    calls = (
        lambda: shard_dataset("words", source, path),  # pyright: ignore[reportArgumentType]
        lambda: shard_dataset("words", {"url": path}, "/out"),
        # pyright: ignore[reportArgumentType]
        lambda: clean_bucket(path),
        lambda: abort_uploads([path]),
    )
    for call in calls:
        with pytest.raises(ParameterTypeError) as refused:
            call()
        assert "is no location" in str(refused.value)
        assert "an absolute path" in str(refused.value)
    assert list(elsewhere.iterdir()) == []


def test_nothing_is_written_below_the_temporary_folder_of_a_flow_run(
    prefect_api: PrefectServer, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = elsewhere / "out"
    assert make_store_spec(str(out), Right.WRITE).url == str(out)  # a person's own folder
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid4()))
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere.parent))
    for location in (str(out), out.as_uri(), f"{elsewhere.as_uri()}/../working/out"):
        with pytest.raises(ConfigurationError, match="is deleted when the run ends"):
            make_store_spec(location, Right.WRITE)
    with pytest.raises(ConfigurationError, match="is deleted when the run ends"):
        refuse_temporary(Path())  # where a campaign's local workers run by default


def test_a_relative_folder_on_nodes_is_refused(prefect_api: PrefectServer) -> None:
    with pytest.raises(ParameterTypeError, match="'data' is a relative path"):
        prewarm([{"url": "file:///models"}], "data")  # pyright: ignore[reportArgumentType]


def entrypoints() -> dict[str, Flow[..., Any]]:
    """Each deployment's flow."""
    made = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    found: dict[str, Flow[..., Any]] = {}
    for one in made:
        module, _, name = one["entrypoint"].rpartition(".")
        found[one["name"]] = getattr(importlib.import_module(module), name)
    return found


NESTS = {typing.Union, types.UnionType, list, dict, tuple, Annotated}


def bare(annotation: Any, where: str, seen: set[Any]) -> Iterator[str]:
    """Return the fields whose types accept a bucket without the checks of a location."""
    if annotation is BucketLocation:
        return
    if annotation is Bucket:
        yield where
    elif typing.get_origin(annotation) in {
        typing.Union,
        types.UnionType,
        list,
        dict,
        tuple,
        Annotated,
    }:
        for one in typing.get_args(annotation):
            yield from bare(one, where, seen)
    elif (
        inspect.isclass(annotation) and issubclass(annotation, BaseModel) and annotation not in seen
    ):
        seen.add(annotation)
        for name, one in annotation.model_fields.items():
            hint = typing.get_type_hints(annotation, include_extras=True).get(name, one.annotation)
            yield from bare(hint, f"{where}.{name}", seen)


@pytest.mark.parametrize("name", sorted(entrypoints()))
def test_every_flow_takes_locations_of_one_type(name: str) -> None:
    hints = typing.get_type_hints(entrypoints()[name].fn, include_extras=True)
    hints.pop("return", None)
    loose = [found for field, hint in hints.items() for found in bare(hint, field, set())]
    assert loose == []


def test_a_bare_number_is_no_duration_in_any_flow() -> None:
    """So that `48` means neither seconds nor hours."""
    durations = {
        (name, parameter): hint
        for name, flow in entrypoints().items()
        for parameter, hint in typing.get_type_hints(flow.fn, include_extras=True).items()
        if "timedelta" in str(hint)
    }
    assert {name for name, _ in durations} >= {"abort-uploads", "clean-versions", "cooldown"}
    for hint in durations.values():
        with pytest.raises(ValidationError, match="unit"):
            TypeAdapter(hint).validate_python(48)
        assert TypeAdapter(hint).validate_python("48h") == timedelta(hours=48)


def test_the_form_offers_a_picker_of_blocks_and_a_text(prefect_api: PrefectServer) -> None:
    @flow
    def takes(bucket: BucketLocation) -> None:
        """Take one."""

    (schema,) = takes.parameters.properties.values()
    assert [one.get("type", "block") for one in schema["anyOf"]] == ["block", "string"]


def test_an_error_of_a_flows_rule_names_the_field(prefect_api: PrefectServer) -> None:
    with pytest.raises(ParameterTypeError) as refused:
        clean_bucket("dataset", [{"kinds": ["gradients"], "older_than": 48}])  # pyright: ignore[reportArgumentType]
    assert "rule 1: older_than: '48' has no unit" in str(refused.value)
    assert "CleaningRules" not in str(refused.value)
