"""Datasets of the Hub, read at one commit by the real library and by ranges."""

import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pyarrow
import pytest
import zstandard
from huggingface_hub import CommitOperationAdd, HfApi, constants
from pyarrow import parquet
from pydantic import SecretStr

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets import SourceLocation, preflight_dataset
from millrace.datasets.sources import open_files
from millrace.datasets.sources.files import Patterns
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan, FileRef
from millrace.storage import StoreSpec, open_store
from millrace.testing.hub import READER, WRITER, HubServer
from tests.oracle import Folder
from tests.support.flows.fixtures import make_jsonl, make_texts, read_texts


def make_parquet(texts: list[str]) -> bytes:
    body = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), body, row_group_size=300)
    return body.getvalue()


def commit(hub: HubServer, repo: str, **files: bytes) -> None:
    """Commit files to a dataset; two underscores in a name stand for a slash, one for a dot."""
    HfApi(endpoint=hub.endpoint, token=WRITER).create_commit(
        repo,
        [
            CommitOperationAdd(name.replace("__", "/").replace("_", "."), body)
            for name, body in files.items()
        ],
        commit_message="files",
        repo_type="dataset",
    )


def make_spec(hub: HubServer, url: str, *, token: str = READER) -> StoreSpec:
    return StoreSpec(
        url=url,
        endpoint=hub.endpoint,
        options={"token": SecretStr(token)},
        retry_timeout=timedelta(seconds=5),
    )


def make_settings(hub: HubServer, url: str, tmp_path, **source) -> PipelineSettings:
    return PipelineSettings(
        dataset="words",
        source=SourceLocation(
            **dict(make_spec(hub, url)),
            **({"kind": "parquet", "columns": {"txt": "text"}} | source),
        ),
        store=StoreSpec(url=(tmp_path / "out").as_uri()),
        sharding={"shard_bytes": 65536, "partition_bytes": 5_000},
        execution={"workers": 2},
    )


@pytest.mark.parametrize("url", ["hf://datasets/{}", "hf://datasets/{}@main/data"])
def test_every_row_of_a_dataset_becomes_a_sample(hub, tmp_path, url):
    repo, texts = hub.make_repo(dataset=True), make_texts(2000)
    commit(
        hub, repo, data__a_parquet=make_parquet(texts[:1200]),
        data__b_parquet=make_parquet(texts[1200:]), README_md=b"# Words",
    )  # fmt: skip
    settings = make_settings(hub, url.format(repo), tmp_path)
    plan, found = preflight_dataset(settings, samples=2)
    assert found.refusals == ()
    shown = {row.fields["txt"].beginning[:9] for row in found.preview.rows}
    assert shown <= {text[:9] for text in texts}
    assert len(shown) == 2
    assert len(plan.partitions) > 2
    report = shard_dataset(settings)
    assert report.samples == 2000
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
    committed = fetch(open_store(settings.store), "words/plan.json", DatasetPlan).source.url
    assert re.fullmatch(rf"hf://datasets/{repo}@[0-9a-f]{{40}}(/data)?", committed)
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(READER.encode() in body for body in written)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_compressed_lines_and_tables_are_read_at_the_commit(hub, tmp_path, kind):
    repo, texts = hub.make_repo(dataset=True), make_texts(900)
    table = "text\n" + "".join(f"{text}\n" for text in texts[:300])
    if kind == "jsonl":
        files = {"a_jsonl_gz": gzip.compress(make_jsonl(texts[:300]))}
        files["b_jsonl_zst"] = zstandard.ZstdCompressor().compress(make_jsonl(texts[300:]))
    else:
        files = {"a_csv": table.encode()}
        files["b_csv_gz"] = gzip.compress(
            "\n".join(["id,text"] + [f"1,{t}" for t in texts[300:]]).encode()
        )
    commit(hub, repo, **files)
    settings = make_settings(hub, f"hf://datasets/{repo}", tmp_path, kind=kind)
    assert shard_dataset(settings).samples == 900
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
    commit(hub, repo, **dict.fromkeys(files, b"other"))
    for shard in (tmp_path / "out/words/shards").rglob("*.tar"):
        shard.unlink()
    (tmp_path / "out/words/manifest.json").unlink()
    shard_dataset(settings)  # makes the lost shards again, from the commit of the plan
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)


def test_a_plan_stays_at_its_commit_when_the_branch_moves(hub, tmp_path):
    repo, texts = hub.make_repo(dataset=True), make_texts(600)
    commit(hub, repo, a_parquet=make_parquet(texts))
    settings = make_settings(hub, f"hf://datasets/{repo}", tmp_path)
    shard_dataset(settings)
    commit(hub, repo, a_parquet=make_parquet(texts[::-1]), b_parquet=make_parquet(["new"]))
    for shard in (tmp_path / "out/words/shards").rglob("*.tar"):
        shard.unlink()
    (tmp_path / "out/words/manifest.json").unlink()
    shard_dataset(settings)  # makes the lost shards again, from the commit of the plan
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
    other = settings.model_copy(update={"dataset": "newest"})
    assert shard_dataset(other).samples == 601


def test_lines_and_files_are_read_too_and_lfs_is_verified(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in has no bridge to Xet
    repo, texts = hub.make_repo(dataset=True), make_texts(10)
    commit(hub, repo, rows__a_jsonl=make_jsonl(texts), blobs__b_bin=bytes(1000))
    lines = make_settings(hub, f"hf://datasets/{repo}/rows", tmp_path, kind="jsonl")
    assert shard_dataset(lines).samples == 10
    files = open_files(make_spec(hub, f"hf://datasets/{repo}/blobs"))
    path, size, digest = files.collect(Patterns()).rows[0].split(b"\0")
    file = FileRef(path=path.decode(), size=int(size), etag=digest.decode())
    assert files.read(file) == bytes(1000)
    with pytest.raises(errors.CorruptError, match="SHA-256 that the Hub lists"):
        files.read(replace(file, etag="0" * 64))
    with pytest.raises(errors.ChangedError, match="is gone"):
        files.read(replace(file, path="other.bin"))


def test_a_mirror_of_the_environment_may_be_in_a_private_network(hub, tmp_path):
    """huggingface_hub takes `HF_ENDPOINT` for its default when it is imported."""
    repo, texts = hub.make_repo(dataset=True), make_texts(200)
    commit(hub, repo, a_txt="\n".join(texts).encode())
    code = (
        "import sys\n"
        "from millrace.datasets.sources import open_files\n"
        "from millrace.storage import StoreSpec\n"
        "files = open_files(StoreSpec(url=sys.argv[1]))\n"
        "print(files.read(files.find('a.txt')).decode(), end='')\n"
    )
    environment = {
        **os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": READER,
        "HF_HOME": str(tmp_path / "home"),
    }  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-c", code, f"hf://datasets/{repo}"],
        capture_output=True, text=True, env=environment, check=False, timeout=300,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-4000:]
    assert child.stdout.splitlines() == texts


def test_a_wrong_token_name_or_url_is_a_sentence(hub):
    repo = hub.make_repo(dataset=True)
    wrong = make_spec(hub, f"hf://datasets/{repo}", token="nobody")
    with pytest.raises(errors.DeniedError, match="refuses this token"):
        open_files(wrong).collect(Patterns())
    with pytest.raises(errors.NotFoundError, match="There is no hf://datasets/person/none"):
        open_files(make_spec(hub, "hf://datasets/person/none")).collect(Patterns())
    with pytest.raises(errors.ConfigurationError, match="write hf://datasets/OWNER/NAME"):
        open_files(make_spec(hub, "hf://person/model"))


def test_tar_files_of_a_dataset_are_read_by_ranges(hub, tmp_path):
    repo, texts = hub.make_repo(dataset=True), make_texts(600)
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        for number, text in enumerate(texts):
            info = tarfile.TarInfo(f"{number:06d}.txt")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    commit(hub, repo, data__a_tar=body.getvalue(), README_md=b"# Words")
    settings = make_settings(
        hub, f"hf://datasets/{repo}", tmp_path, kind="webdataset", columns=None
    )
    assert shard_dataset(settings).samples == 600
    assert read_texts(Folder(tmp_path / "out" / "words")) == Counter(texts)
