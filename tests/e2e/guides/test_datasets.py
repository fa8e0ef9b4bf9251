"""The guide to datasets, block by block."""

import gzip
import io
import os
import re
import sysconfig
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import yaml
from huggingface_hub import CommitOperationAdd, HfApi
from pyarrow import parquet

from millrace.datasets import PipelineSettings
from millrace.settings import load_settings
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.vast import VastServer
from tests.oracle import Folder
from tests.ray_cluster import RayCluster
from tests.support.flows.fixtures import make_jsonl, make_texts, read_texts
from tests.support.guides import follow
from tests.support.transforms import train_tokenizer
from tests.support.web import Site, serve

BRIDGE = {
    "r2": {"account_id": "0" * 32, "access_key_id": "id", "secret_access_key": "a secret",
           "bucket": "bucket"},
    "pipeline": {"name": "webdataset", "input_uri": "s3://raw/a.jsonl"},
}  # fmt: skip
CARD = b"---\nconfigs: [{config_name: en, data_files: [{split: train, path: en/*}]}]\n---\n"


def test_every_block_of_the_guide_to_datasets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    vast: VastServer,
    hub: HubServer,
    ray_cluster: RayCluster,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, folder = tmp_path / "store", tmp_path / "datasets"
    values = {
        "r2://ACCOUNT/BUCKET": store.as_uri(),
        "s3://somewhere/tables": make_tables(tmp_path / "tables"),
        "s3://somewhere/pictures": make_pictures(tmp_path / "pictures"),
        "s3://somewhere/tars": make_tars(tmp_path / "tars"),
        "s3://somewhere/photos": (tmp_path / "photos").as_uri(),
        "s3://somewhere/lists": (tmp_path / "lists").as_uri(),
    }
    environment = {
        "STORAGE_BACKEND": "local",
        "LOCAL_STORAGE_PATH": str(store),
        "RAY_ADDRESS": ray_cluster.address,
        **ray_cluster.environment,
    }
    with follow("datasets", folder, monkeypatch, values=values, environment=environment) as guide:
        plan = "millrace plan job.yaml"
        edit = f"sed -i 's#file:///path/to/a/folder#{source.as_uri()}#' job.yaml"
        shown = guide.run({plan: f"{edit}; {plan}"})
        assert read_texts(Folder(store / "my-dataset")) == Counter(make_texts())
        assert "my-dataset: complete" in shown
        assert "1 shard of 1 as the manifest says" in shown

        monkeypatch.chdir(folder)
        guide.execute({})
        assert capsys.readouterr().out.splitlines()[-1] == "{'train': 4000}"
        assert "First rows of train-00000:" in guide.run()
        guide.execute({})
        assert len(re.findall("PreviewedField", capsys.readouterr().out)) == 5

        run = "millrace run job.yaml"
        original = (folder / "job.yaml").read_text()
        update_source(guide.write("job.yaml", update=True), "tables")
        assert "3 samples" in guide.type(run)
        assert read_texts(Folder(store / "tables")) == Counter(["a\nb", "c", "d"])

        (folder / "job.yaml").write_text(original)
        update_source(guide.write("job.yaml", update=True), "pictures")
        assert "2 samples" in guide.type(run)
        assert read_fields(store / "pictures") == {
            "00000-0000000000.jpg": b"\x00", "00000-0000000000.txt": b"caption.0",
            "00000-0000000001.jpg": b"\x01", "00000-0000000001.txt": b"caption.1",
        }  # fmt: skip

        (folder / "job.yaml").write_text(original)
        update_source(guide.write("job.yaml", update=True), "tars")
        assert "2 samples" in guide.type(run)
        assert read_fields(store / "tars") == {
            "a.jpg": b"1", "a.txt": b"A", "b.jpg": b"2", "b.txt": b"B",
        }  # fmt: skip
        (folder / "job.yaml").write_text(original)

        repo = hub.make_repo(dataset=True)
        commit_pictures(hub, repo)
        here = {"hf://datasets/OWNER/NAME": f"hf://datasets/{repo}", "${HF_TOKEN}": READER}
        path = guide.write("job.yaml", here, update=True)
        update_source(path, "hub", columns={"txt": "caption"}, endpoint=hub.endpoint)
        assert "2 samples" in guide.type(run)

        repo = hub.make_repo(dataset=True)
        commit_pictures(hub, repo, "en/train.parquet", card=CARD)
        here["hf://datasets/OWNER/NAME"] = f"hf://datasets/{repo}"
        path = guide.write("job.yaml", here, update=True)
        update_source(path, "split", endpoint=hub.endpoint)
        assert "2 samples" in guide.type(run)
        (folder / "job.yaml").write_text(original)

        texts = make_texts(20)
        with serve(Site(token="Bearer token")) as site:
            site.files = {
                "/data/a.jsonl": make_jsonl(texts[:10]), "/data/b.jsonl": make_jsonl(texts[10:])
            }  # fmt: skip
            here = {"https://host": site.url, "${TOKEN}": "token"}
            path = guide.write("job.yaml", here, update=True)
            update_source(path, "web", columns={"txt": "text"}, allow_private=True)
            assert "20 samples" in guide.type(run)
        assert read_texts(Folder(store / "web")) == Counter(texts)
        (folder / "job.yaml").write_text(original)

        with serve(Site(headers={"Content-Type": "image/png"})) as site:
            site.files = {f"/{n}": bytes([n]) for n in range(2)}
            rows = "".join(f"{site.url}/{n},caption.{n}\n" for n in range(3))
            (tmp_path / "lists").mkdir()
            (tmp_path / "lists/a.csv").write_text(f"link,caption\n{rows}")
            path = guide.write("job.yaml", update=True)
            update_source(path, "links", allow_private=True)
            assert "2 samples" in guide.type(run)
        assert set(read_fields(store / "links").values()) == {
            b"\x00", b"\x01", b"caption.0", b"caption.1",
        }  # fmt: skip
        (folder / "job.yaml").write_text(original)

        mirrored = tmp_path / "mirrored"
        mirrored.mkdir()
        (mirrored / "b.jsonl").write_bytes(make_jsonl(texts[10:]))
        with serve(Site()) as site:
            site.files = {f"/words/{name}.jsonl": make_jsonl(texts[:10]) for name in "ab"}
            here = {
                "s3://somewhere/words": (tmp_path / "nothing").as_uri(),
                "https://mirror": site.url,
                "s3://elsewhere/words": mirrored.as_uri(),
            }
            path = guide.write("job.yaml", here, update=True)
            update_source(path, "mirrored", columns={"txt": "text"}, allow_private=True)
            shown = guide.type(run)
        assert "20 samples" in shown
        assert re.search(rf"Read [^0].* from {site.url}/words", shown)
        (folder / "job.yaml").write_text(original)

        update_source(guide.write("job.yaml", update=True), "formats", columns={"txt": "text"})
        assert "4,000 samples" in guide.type(run)
        formats = {path.name for path in (store / "formats/shards").iterdir()}
        assert formats == {"litdata", "mds", "parquet", "webdataset"}
        (folder / "job.yaml").write_text(original)

        update_source(guide.write("job.yaml", update=True), "my-dataset")
        assert "is complete already" in guide.type(run)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        guide.execute({}, {"FOLDER": str(store)})
        assert capsys.readouterr().out.splitlines()[-1] == "4000"
        (folder / "job.yaml").write_text(original)

        (folder / "tokenizer.json").write_bytes(train_tokenizer())
        update_source(guide.write("job.yaml", update=True), "tokens", columns={"txt": "text"})
        (folder / "clean.py").write_text(guide.read_python())
        guide.type(run)
        shards = sorted((store / "tokens/shards/tokens/train").glob("*.npy"))
        assert shards
        assert sum(len(np.load(path)) for path in shards) > 4000
        (folder / "job.yaml").write_text(original)

        (folder / "metadata.csv").write_text("file_name,caption,label\na/1.jpg,one,3\na/2.jpg,,4\n")
        (tmp_path / "photos/a").mkdir(parents=True)
        for number in (1, 2):
            (tmp_path / f"photos/a/{number}.JPG").write_bytes(bytes([number]))
        path = guide.write("job.yaml", {'["*.jpg"]': '["*.JPG"]'}, update=True)
        update_source(path, "photos", columns=None)
        assert "2 samples" in guide.type(run)
        assert read_fields(store / "photos") == {
            "a/1.jpg": b"\x01", "a/1.txt": b"one", "a/1.cls": b"3",
            "a/2.jpg": b"\x02", "a/2.txt": b"", "a/2.cls": b"4",
        }  # fmt: skip
        (folder / "job.yaml").write_text(original)

        update_source(guide.write("job.yaml", update=True), "ray", columns={"txt": "text"})
        assert "4,000 samples" in guide.type(run)
        assert read_texts(Folder(store / "ray")) == Counter(make_texts())
        (folder / "job.yaml").write_text(original)

        (folder / "bridge.yaml").write_text(yaml.safe_dump(BRIDGE))
        guide.run()
        keys = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
        variables = {f"R2_DATASET_WRITE_{name}": "value" for name in keys}
        imported = load_settings(folder / "imported.yaml", PipelineSettings, variables)
        assert imported.store.url == f"r2://{'0' * 32}/bucket/datasets"
        assert "secret" not in (folder / "imported.yaml").read_text().replace("secret_access", "")

        left = store / "my-dataset/shards/webdataset/train/train-00000-000009.tar"
        left.write_bytes(b"left")
        os.utime(left, (0, 0))
        assert left.as_uri() in guide.run()
        assert f"{store.as_uri()}/my-dataset holds " in guide.run()

        settings = rented_settings(folder / "job.yaml", store, vast, repository)
        (folder / "millrace.yaml").write_text(yaml.safe_dump(settings))
        rented = guide.run(answer="y")
        assert "1 x RTX 4090" in rented
        assert "Rent 1 machine for shard/words, for at most $5.00 in all?" in rented
        assert "shard/words/0: released (done: the program ended with exit code 0)" in rented
        assert read_texts(Folder(store / "words")) == Counter(["x"])
        guide.execute({})
        assert capsys.readouterr().out.splitlines()[-1] == "1 None"
        assert [one["destroyed"] is None for one in vast.list_machines()] == [False]


def make_tables(folder: Path) -> str:
    """Write a CSV file and a compressed one, and return the URL of their folder."""
    folder.mkdir()
    (folder / "a.csv").write_text('id,text\n1,"a\nb"\n2,c\n')
    (folder / "b.csv.gz").write_bytes(gzip.compress(b"text,id\nd,3\n"))
    return folder.as_uri()


def make_tars(folder: Path) -> str:
    """Write a tar file whose samples have their members apart, and return the URL of its folder."""
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, data in {"a.jpg": b"1", "b.jpg": b"2", "a.txt": b"A", "b.txt": b"B"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return folder.as_uri()


def make_pictures(folder: Path) -> str:
    """Write a parquet file of pictures with captions, and return the URL of its folder."""
    folder.mkdir()
    (folder / "a.parquet").write_bytes(encode_pictures())
    return folder.as_uri()


def commit_pictures(
    hub: HubServer, repo: str, path: str = "data/a.parquet", card: bytes = b"# Pictures\n"
) -> None:
    """Commit the same file to a dataset of the Hub, with a README."""
    operations = [
        CommitOperationAdd(path, encode_pictures()), CommitOperationAdd("README.md", card)
    ]  # fmt: skip
    api = HfApi(endpoint=hub.endpoint, token=WRITER)
    api.create_commit(repo, operations, commit_message="pictures", repo_type="dataset")


def encode_pictures() -> bytes:
    rows = [
        {"image": {"bytes": bytes([n]), "path": None}, "caption": f"caption.{n}"} for n in range(2)
    ]
    body = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), body)
    return body.getvalue()


def update_source(path: Path, dataset: str, **source: Any) -> None:
    """Name another dataset in a settings file, and add to its source."""
    settings = yaml.safe_load(path.read_text())
    settings["dataset"] = dataset
    settings["source"] |= source
    path.write_text(yaml.safe_dump(settings))


def read_fields(dataset: Path) -> dict[str, bytes]:
    """Return the members of a dataset's only shard."""
    (shard,) = dataset.rglob("*.tar")
    with tarfile.open(shard) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar}  # pyright: ignore[reportOptionalMemberAccess]


def rented_settings(job: Path, store: Path, vast: VastServer, repository: Path) -> dict[str, Any]:
    """Return the settings of the guide with a source below the store, and the section `vast`."""
    key = vast.reset(real=True, rate=1.0, strict=False, image=sysconfig.get_path("purelib"))
    (store / "raw").mkdir()
    (store / "raw/a.jsonl").write_bytes(make_jsonl(["x"]))
    return yaml.safe_load(job.read_text()) | {
        "dataset": "words",
        "source": {"url": f"{store.as_uri()}/raw", "columns": {"txt": "text"}},
        "store": {"url": store.as_uri()},
        "vast": {
            "account": {"api_key": key, "server_url": vast.url},
            "request": {"max_hourly": 1.0, "max_total": 5.0},
            "repo_url": repository.as_uri(),
            "machines": 1,
        },
    }
