"""Dataset cards, read by the real `datasets`."""

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from datasets.exceptions import DataFilesNotFoundError
from huggingface_hub import HfApi

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets import (
    CardSettings,
    delete_garbage,
    plan_garbage,
    preflight_dataset,
    repair_dataset,
    verify_dataset,
)
from millrace.datasets.progress_events import CardUploaded, ManifestCommitted
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Event
from millrace.storage import delete, list_objects, open_store, put, read
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.rgw import RGW
from tests.stores import make_spec
from tests.support.flows.fixtures import make_texts

KEYS = DatasetKeys("words")
TEXTS = make_texts(1500)


class KilledError(Exception):
    """End of a run at a boundary."""


def make_settings(tmp_path: Path, formats: list[str], **changes: Any) -> PipelineSettings:
    source = tmp_path / "source"
    if not source.exists():  # a file that is written again would be another source
        source.mkdir()
        rows = [json.dumps({"text": text, "number": n}) for n, text in enumerate(TEXTS)]
        (source / "a.jsonl").write_text("\n".join([*rows, "no json", ""]))
    data = {
        "dataset": "words",
        "source": {"url": source.as_uri(), "columns": {"txt": "text", "id": "number"}},
        "store": {"url": (tmp_path / "out").as_uri()},
        "sharding": {
            "formats": formats, "shard_bytes": 65536, "partition_bytes": 40_000, "holdout": 0.25,
        },
        "execution": {"workers": 0},
        "card": {"license": "cc-by-4.0"},
    }  # fmt: skip
    return PipelineSettings.model_validate(data | changes)


def load(tmp_path: Path, path: str, *name: str, **options: Any) -> Any:
    return datasets.load_dataset(path, *name, cache_dir=str(tmp_path / "cache"), **options)


def list_texts(loaded: Any, column: str) -> list[str]:
    rows = [row for split in loaded.values() for row in split]
    texts = [row[column] for row in rows]
    return [text.decode() if isinstance(text, bytes) else text for text in texts]


def read_metadata(tmp_path: Path) -> dict[str, Any]:
    _, metadata, _ = (tmp_path / "out/words/README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["webdataset", "parquet", "pages"])
def test_datasets_opens_the_folder_of_a_dataset_by_its_card(
    tmp_path: Path, name: str, streaming: bool
) -> None:
    report = shard_dataset(make_settings(tmp_path, [name]))
    loaded = load(tmp_path, str(tmp_path / "out/words"), streaming=streaming)
    assert loaded.keys() == {"train", "val"}
    assert Counter(list_texts(loaded, "text" if name == "pages" else "txt")) == Counter(TEXTS)
    found = {split: sum(1 for _ in one) for split, one in loaded.items()}
    assert found == report.manifest.samples


@pytest.mark.parametrize("streaming", [False, True])
def test_several_formats_are_several_configs_of_one_reader(tmp_path: Path, streaming: bool) -> None:
    shard_dataset(make_settings(tmp_path, ["webdataset", "litdata", "pages", "parquet"]))
    folder = str(tmp_path / "out/words")
    assert datasets.get_dataset_config_names(folder) == ["parquet", "pages"]
    by_default = load(tmp_path, folder, streaming=streaming)
    assert Counter(list_texts(by_default, "txt")) == Counter(TEXTS)
    pages = load(tmp_path, folder, "pages", streaming=streaming)
    assert Counter(list_texts(pages, "text")) == Counter(TEXTS)
    tars = load(
        tmp_path, "webdataset", data_files=f"{folder}/shards/webdataset/*/*.tar",
        streaming=streaming,
    )  # fmt: skip
    assert Counter(list_texts(tars, "txt")) == Counter(TEXTS)


def test_the_types_in_a_card_are_those_of_the_shards(tmp_path: Path) -> None:
    samples = {
        "a": ("bytes", b"\xff"),
        "b": ("str", b"text"),
        "c": ("json", b"{}"),
        "d": ("int", b"7"),
        "e": ("float", b"0.5"),
        "f": ("uint16[]", b"\1\0"),
        "g": ("uint32[]", b""),
    }
    types = {name: kind for name, (kind, _) in samples.items()}
    source = tmp_path / "files"
    source.mkdir()
    for name, (_, body) in samples.items():
        (source / f"sample.{name}").write_bytes(body)
    settings = make_settings(
        tmp_path, ["parquet"], source={"url": source.as_uri(), "kind": "files"},
        sharding={"formats": ["parquet"], "types": types},
    )  # fmt: skip
    shard_dataset(settings)
    folder = tmp_path / "out/words"
    by_card = load(tmp_path, str(folder), split="train")
    files = [str(path) for path in folder.glob("shards/parquet/train/*.parquet")]
    assert by_card.features == load(tmp_path, "parquet", data_files=files, split="train").features
    assert by_card[0]["f"] == [1]


def test_datasets_counts_the_samples_that_a_card_names(tmp_path: Path) -> None:
    shard_dataset(make_settings(tmp_path, ["parquet"]))
    next((tmp_path / "out/words/shards/parquet/train").iterdir()).unlink()
    with pytest.raises(datasets.exceptions.NonMatchingSplitsSizesError):
        load(tmp_path, str(tmp_path / "out/words"))


@pytest.mark.parametrize("name", ["webdataset", "parquet"])
def test_a_dataset_of_the_hub_opens_by_its_card(tmp_path: Path, hub: HubServer, name: str) -> None:
    report = shard_dataset(make_settings(tmp_path, [name]))
    repo = hub.make_repo(dataset=True)
    api = HfApi(endpoint=hub.endpoint, token=WRITER)
    api.upload_folder(repo_id=repo, folder_path=tmp_path / "out/words", repo_type="dataset")
    code = (
        "import datasets, json, sys\n"
        "found = {}\n"
        "for streaming in (False, True):\n"
        "    loaded = datasets.load_dataset(sys.argv[1], streaming=streaming)\n"
        "    found[streaming] = {s: sum(1 for _ in one) for s, one in loaded.items()}\n"
        "print(json.dumps([found[False], found[True]]))\n"
    )
    environment = {
        **os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": READER,
        "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-c", code, repo],
        capture_output=True, text=True, env=environment, check=False, timeout=300,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-4000:]
    assert json.loads(child.stdout.splitlines()[-1]) == [report.manifest.samples] * 2


def test_a_card_says_what_the_dataset_is(tmp_path: Path) -> None:
    transforms = [{"kind": "filter", "field": "txt", "min_size": 3}]
    settings = make_settings(tmp_path, ["webdataset", "parquet"])
    sharding = settings.sharding.model_dump(exclude={"transforms"}) | {"transforms": transforms}
    shard_dataset(make_settings(tmp_path, [], sharding=sharding))
    text = (tmp_path / "out/words/README.md").read_text()
    assert "This dataset has 1,500 samples in " in text
    assert "| train | 1,127 |\n| val | 373 |" in text
    assert f"(327.4 kB) of the kind `jsonl`, at `{(tmp_path / 'source').as_uri()}`." in text
    assert "Transforms of the samples, in their order: `filter`." in text
    assert "1 row of the source made no sample." in text
    metadata = read_metadata(tmp_path)
    assert metadata["license"] == "cc-by-4.0"
    assert metadata["size_categories"] == ["1K<n<10K"]


def test_formats_that_datasets_cannot_read_are_in_the_text_only(tmp_path: Path) -> None:
    shard_dataset(make_settings(tmp_path, ["litdata"], card={}))
    assert read_metadata(tmp_path) == {
        "size_categories": ["1K<n<10K"],
        "configs": [{"config_name": "default", "data_files": []}],
    }
    with pytest.raises(DataFilesNotFoundError, match="data files found in"):
        load(tmp_path, str(tmp_path / "out/words"))
    assert "`litdata.StreamingDataset`" in (tmp_path / "out/words/README.md").read_text()


def test_a_card_does_not_change_the_plan_and_a_later_run_adds_or_changes_it(
    tmp_path: Path,
) -> None:
    store = open_store((tmp_path / "out").as_uri())
    without = make_settings(tmp_path, ["parquet"], card=None)
    first = shard_dataset(without)
    plan = read(store, KEYS.plan)
    assert not (tmp_path / "out/words/README.md").exists()
    events: list[Event] = []
    for card, written in (({}, 2), ({}, 0), ({"license": "mit"}, 2), (None, 0)):
        events.clear()
        report = shard_dataset(
            make_settings(tmp_path, ["parquet"], card=card), progress=events.append
        )
        assert (report.was_complete, report.new_shards) == (True, 0)
        assert report.manifest == first.manifest
        assert sum(isinstance(event, CardUploaded) for event in events) == written
        assert read(store, KEYS.plan) == plan
    assert read_metadata(tmp_path)["license"] == "mit"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_run_that_was_killed_at_the_card_leaves_it_to_the_next_run(
    tmp_path: Path, number: int
) -> None:
    store = open_store((tmp_path / "out").as_uri())
    settings = make_settings(tmp_path, ["pages", "parquet"])
    reached = -1

    def kill(event: Event) -> None:
        nonlocal reached
        reached += isinstance(event, ManifestCommitted | CardUploaded)
        if reached == number:
            raise KilledError

    with pytest.raises(KilledError):
        shard_dataset(settings, progress=kill)
    assert store.make_url("words") == shard_dataset(settings).url
    assert verify_dataset(store, "words").is_intact
    left = {key: read(store, key) for key in (KEYS.card, KEYS.readme)}
    delete(store, list(left))
    shard_dataset(settings)
    assert {key: read(store, key) for key in left} == left


@pytest.mark.parametrize("card", [None, {"license": "cc-by-4.0"}])
@pytest.mark.parametrize("is_missing", [True, False])
def test_a_missing_or_old_card_is_found_and_made_again(
    tmp_path: Path, is_missing: bool, card: dict[str, Any] | None
) -> None:
    store = open_store((tmp_path / "out").as_uri())
    shard_dataset(make_settings(tmp_path, ["parquet"], card={"license": "mit"}))
    old = read(store, KEYS.readme)
    shard_dataset(make_settings(tmp_path, ["parquet"]))
    before = read(store, KEYS.readme)
    if is_missing:
        delete(store, [KEYS.readme])
    else:
        put(store, KEYS.readme, old)
    found = verify_dataset(store, "words", digests=False)
    reason = "missing" if is_missing else "does not fit the manifest"
    assert [(one.key, one.reason) for one in found.other_faults] == [(KEYS.readme, reason)]
    settings = make_settings(tmp_path, ["parquet"], card=card)
    assert repair_dataset(settings).remade_keys == (KEYS.readme,)
    assert read(store, KEYS.readme) == before


@pytest.mark.parametrize("edit", ["other file", "line before the end", "line at the end", "empty"])
def test_an_edited_card_is_never_replaced(tmp_path: Path, edit: str) -> None:
    store = open_store((tmp_path / "out").as_uri())
    settings = make_settings(tmp_path, ["parquet"])
    assert shard_dataset(settings).warnings == ()
    written = read(store, KEYS.readme)
    mine = {
        "other file": b"# By hand\n",
        "line before the end": written.replace(b"## Source", b"## By hand\n\n## Source"),
        "line at the end": written + b"By hand\n",
        "empty": b"",
    }[edit]
    assert mine != written
    put(store, KEYS.readme, mine)
    (warning,) = shard_dataset(make_settings(tmp_path, ["parquet"], card={})).warnings
    assert warning.startswith(f"{store.make_url(KEYS.readme)} was edited or replaced")
    assert verify_dataset(store, "words").is_intact
    delete(store, [next(one.key for one in list_objects(store, "words/shards/"))])
    repair_dataset(settings)
    assert read(store, KEYS.readme) == mine
    delete(store, [KEYS.readme])  # "move the file away"
    assert shard_dataset(settings).warnings == ()
    assert read(store, KEYS.readme) == written


def test_a_damaged_record_of_a_card_is_made_again_from_the_settings(tmp_path: Path) -> None:
    store = open_store((tmp_path / "out").as_uri())
    settings = make_settings(tmp_path, ["parquet"])
    shard_dataset(settings)
    before = read(store, KEYS.card)
    put(store, KEYS.card, b"{}")
    found = verify_dataset(store, "words", digests=False)
    assert [(one.key, one.reason) for one in found.other_faults] == [(KEYS.card, "cannot be read")]
    with pytest.raises(errors.ConflictError, match="Add `card` to the settings"):
        repair_dataset(make_settings(tmp_path, ["parquet"], card=None))
    assert repair_dataset(settings).remade_keys == (KEYS.card,)
    assert read(store, KEYS.card) == before
    assert verify_dataset(store, "words").is_intact


def test_a_card_is_no_garbage(tmp_path: Path) -> None:
    store = open_store((tmp_path / "out").as_uri())
    shard_dataset(make_settings(tmp_path, ["parquet"]))
    plan = plan_garbage(store, "words", min_age=timedelta(0))
    assert not {KEYS.card, KEYS.readme} & {one.key for one in plan.objects}
    delete_garbage(store, plan)
    assert {KEYS.card, KEYS.readme} <= {stat.key for stat in list_objects(store, "words/")}
    assert all(map(KEYS.is_own, (KEYS.card, KEYS.readme)))


def test_a_card_does_not_replace_a_file_of_other_origin(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, ["parquet"])
    readme = tmp_path / "out/words/README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("# By hand\n")
    (refusal,) = preflight_dataset(settings)[1].refusals
    assert "was not written by Millrace" in refusal
    with pytest.raises(errors.ConflictError, match="Move it away, or remove `card`"):
        shard_dataset(settings)
    assert [path.name for path in readme.parent.iterdir()] == ["README.md"]
    assert readme.read_text() == "# By hand\n"


@pytest.mark.parametrize("license_name", ["", "no license", "a\nconfigs: []", "`x`"])
def test_a_license_that_is_no_identifier_is_refused(license_name: str) -> None:
    with pytest.raises(ValueError, match="license"):
        CardSettings(license=license_name)


def test_a_card_over_a_real_store_is_verified(
    request: pytest.FixtureRequest, tmp_path: Path, rgw: RGW, bucket: str
) -> None:
    spec = make_spec("rgw", request).model_copy(update={"url": f"s3://{bucket}"})
    settings = make_settings(tmp_path, ["parquet"]).model_copy(update={"store": spec})
    shard_dataset(settings)
    store = open_store(spec)
    assert read(store, KEYS.readme).startswith(b"---\nlicense: cc-by-4.0\n")
    assert verify_dataset(store, "words").is_intact
    delete(store, [KEYS.readme])
    assert repair_dataset(settings).remade_keys == (KEYS.readme,)
