"""Templar's face: a script changes its import only, and gets the same pages and batches."""

import asyncio
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import HfApi
from pydantic import SecretStr
from tokenizers import Tokenizer, processors

from millrace import errors
from millrace.datasets.formats.base import FieldType
from millrace.datasets.formats.parquet import PagesFormat
from millrace.datasets.loader import PageTokenizer
from millrace.datasets.loader.templar import R2DatasetLoader
from millrace.datasets.sample import Sample
from millrace.keys.datasets import DatasetKeys
from millrace.storage import StoreSpec, open_store, put
from millrace.testing.byte_level import END
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.rgw import RGW
from tests.stores import ACCOUNT
from tests.support.byte_pairs import encode_json, make_tokenizer
from tests.support.formats import make_objects
from tests.support.templar_batches import draw, make_batches

BODY = encode_json(make_tokenizer())
TOKENIZER = Tokenizer.from_buffer(BODY)
END_ID = TOKENIZER.token_to_id(END)
VECTOR = [("CC-2014-10", 271, "train"), ("CC-2013-20", 515, "train"), ("CC-2014-10", 40, "train")]
TEXT_VECTOR = [("small", 5, "train"), ("CC-2014-10", 197, "train"), ("CC-2014-10", 253, "train")]
CONFIGS = {"CC-2013-20": (730, 150), "CC-2014-10": (412,), "small": (120,)}


@dataclass
class FastTokenizerStub:
    """A tokenizer as transformers has it, around the real one of `tokenizers`."""

    backend_tokenizer: Tokenizer
    eos_token_id: int | None


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    R2DatasetLoader.close_all()


@pytest.fixture
def texts() -> dict[str, list[str | None]]:
    rng = random.Random(5)
    words = [rng.randbytes(3).hex() for _ in range(500)]

    def make(rows: int) -> list[str | None]:
        made = [" ".join(rng.choices(words, k=rng.randrange(8))) for _ in range(rows)]
        return [*made[:7], None, *made[8:]]

    return {name: make(sum(sizes)) for name, sizes in CONFIGS.items()}


@pytest.fixture
def dataset(
    tmp_path: Path, texts: dict[str, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A dataset in Templar's layout, with unequal row groups, whose paths begin with a bucket."""
    sizes: dict[str, Any] = {}
    for name, rows in CONFIGS.items():
        (tmp_path / name).mkdir()
        shards, start = list[dict[str, Any]](), 0
        for number, count in enumerate(rows):
            path = f"{name}/train-{number:05d}.parquet"
            cast("Any", pq).write_table(
                pa.table({"text": texts[name][start : start + count]}), tmp_path / path,
                row_group_size=170, max_rows_per_page=100, write_batch_size=100,
                write_page_index=True,
            )  # fmt: skip
            shards.append({"path": f"bucket/folder/{path}", "num_rows": count})
            start += count
        sizes[name] = {"split": "train", "total_rows": start, "shards": shards}
    (tmp_path / "_shard_sizes.json").write_text(json.dumps(sizes))
    configs = "".join(f"- config_name: {name}\n" for name in ["default", *reversed(CONFIGS)])
    (tmp_path / "_metadata.yaml").write_text(f"configs:\n{configs}")
    monkeypatch.setattr(R2DatasetLoader, "source", tmp_path.as_uri())
    return tmp_path


def draw_pages(offset: int, count: int, seed: Any, rows: int = 100) -> list[tuple[str, int, str]]:
    return asyncio.run(R2DatasetLoader.next_pages(offset, count, seed, rows))


def encode(texts: list[str | None]) -> list[list[int]]:
    return [TOKENIZER.encode(text or "", add_special_tokens=False).ids for text in texts]


@pytest.mark.usefixtures("dataset")
def test_the_pages_are_those_of_templar() -> None:
    rows = {name: sum(sizes) for name, sizes in CONFIGS.items()}
    for seed, offset in ((0, 0), (7, 72), (255, 6), (123_456, 1)):
        expected = [(name, row, "train") for name, row in draw(rows, seed, offset, 12)]
        assert draw_pages(offset, 12, seed) == expected
    assert draw_pages(72, 3, 7) == VECTOR


@pytest.mark.usefixtures("dataset")
def test_a_text_as_a_seed_gives_the_same_pages_in_each_process() -> None:
    """In Templar's loader it does not, since Python salts the hash of a text."""
    assert draw_pages(0, 3, "worker") == TEXT_VECTOR


def make_loader(pages: list[Any], *, length: int, pack: bool, batch_size: int = 2) -> Any:
    return asyncio.run(
        R2DatasetLoader.create(
            batch_size=batch_size, sequence_length=length, pages_info=pages,
            tokenizer=FastTokenizerStub(TOKENIZER, END_ID), pack_samples=pack,
        )
    )  # fmt: skip


def assert_same_batches(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Check that there are batches, and that they are all the expected ones."""
    batches, others = list(found), list(expected)
    assert len(batches) == len(others) > 0
    assert all(map(np.array_equal, batches, others))


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_the_batches_are_those_of_templar(
    pack: bool, batch_size: int, texts: dict[str, list[str | None]]
) -> None:
    """A page has exactly its rows, though row groups and files end within it."""
    pages = [*draw_pages(12, 9, 3), ("CC-2013-20", 700, "train"), ("CC-2014-10", 140, "train")]
    loader = make_loader(pages, length=64, pack=pack, batch_size=batch_size)
    assert loader.pages == pages
    documents = [ids for name, row, _ in pages for ids in encode(texts[name][row : row + 100])]
    assert max(map(len, documents)) <= 64  # nothing that Templar would truncate
    expected = make_batches(documents, END_ID, batch_size, 64, pack=pack)
    for _ in range(2):  # each iteration begins anew
        found = list(loader)
        assert len(expected) > 3
        assert_same_batches(found, expected)
    assert torch.tensor(found[0]).dtype == torch.long
    assert found[0].shape == (batch_size, 64)


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize("pack", [True, False])
def test_a_long_document_goes_on_in_the_next_sequence(
    pack: bool, texts: dict[str, list[str | None]]
) -> None:
    pages = draw_pages(0, 3, 1)
    documents = [ids for name, row, _ in pages for ids in encode(texts[name][row : row + 100])]
    assert max(map(len, documents)) > 16
    batches = list(make_loader(pages, length=8, pack=pack))
    expected = make_batches(documents, END_ID, 2, 8, pack=pack, truncate=False)
    assert_same_batches(batches, expected)
    assert len(expected) > len(make_batches(documents, END_ID, 2, 8, pack=pack))


@pytest.mark.usefixtures("dataset")
def test_a_token_that_begins_documents_is_added_as_transformers_does(
    texts: dict[str, list[str | None]],
) -> None:
    begins = Tokenizer.from_buffer(BODY)
    begins.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, END_ID)]
    )
    pages = [("small", 3, "train")]
    loader = asyncio.run(
        R2DatasetLoader.create(1, 16, pages, FastTokenizerStub(begins, 5), pack_samples=True)
    )
    rows = [text for text in texts["small"][3:103] if text is not None]
    documents = [[END_ID, *ids] for ids in encode(list(rows))]
    expected = make_batches(documents, 5, 1, 16, pack=True, truncate=False)
    assert_same_batches(loader, expected)


@pytest.mark.usefixtures("dataset")
def test_the_end_of_one_loader_takes_nothing_from_another() -> None:
    pages = draw_pages(0, 6, 1)
    one, other = (make_loader(pages, length=32, pack=True) for _ in range(2))
    expected = list(one)
    del one
    assert_same_batches(other, expected)
    assert_same_batches(make_loader(pages, length=32, pack=True), expected)


@dataclass
class Window:
    pages_per_window: int = 4
    batch_size: int = 2
    sequence_length: int = 32


@pytest.mark.usefixtures("dataset")
def test_a_window_is_drawn_and_read_by_one_call() -> None:
    tokenizer = PageTokenizer(BODY, end_token=END)
    loader, pages = asyncio.run(R2DatasetLoader.get_loader(8, Window(), tokenizer, seed=3))
    assert pages == draw_pages(8, 4, 3)
    assert_same_batches(loader, make_loader(pages, length=32, pack=True))
    _, one = asyncio.run(R2DatasetLoader.get_loader(8, Window(), tokenizer))
    assert len(one) == 4


def test_a_dataset_of_millrace_is_read_from_a_store_by_the_variables_of_templar(
    rgw: RGW, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the list of buckets. The endpoint of R2 is replaced by that of RGW."""
    key = {"access_key_id": rgw.full.access_key_id, "secret_access_key": rgw.full.secret_access_key}
    store = open_store(
        StoreSpec.model_validate(
            {"url": f"s3://{bucket}", "endpoint": rgw.endpoint, "credentials": key}
        )
    )
    samples = [Sample(f"k{n}", {"text": f"row {n}".encode()}, n) for n in range(300)]
    fields = {"text": FieldType.STR}
    objects = make_objects(PagesFormat(), DatasetKeys("d"), fields, [samples[:190], samples[190:]])
    for name, body in objects.items():
        put(store, name, body)
    monkeypatch.setattr(R2DatasetLoader, "DATASET_SUBFOLDER", "d/shards/pages/train")
    for name, value in (
        ("ACCOUNT_ID", ACCOUNT),
        ("BUCKET_NAME", bucket),
        ("READ_ACCESS_KEY_ID", rgw.full.access_key_id),
        ("READ_SECRET_ACCESS_KEY", rgw.full.secret_access_key),
    ):
        monkeypatch.setenv(f"R2_DATASET_{name}", value)
    monkeypatch.setattr(StoreSpec, "resolve_endpoint", lambda *_: rgw.endpoint)
    pages = draw_pages(0, 4, 1)
    loader = make_loader(pages, length=32, pack=True)
    rows = [f"row {n}" for _, row, _ in pages for n in range(row, row + 100)]
    expected = make_batches(encode(list(rows)), END_ID, 2, 32, pack=True)
    assert_same_batches(loader, expected)
    R2DatasetLoader.close_all()
    monkeypatch.delenv("R2_DATASET_BUCKET_NAME")
    with pytest.raises(errors.ConfigurationError, match="Set R2_DATASET_BUCKET_NAME, or"):
        draw_pages(0, 1, 1)
    listed = [
        {"account_id": ACCOUNT, "name": name, "credentials": {"read": key}}
        for name in (f"{bucket}-gone", bucket)
    ]
    monkeypatch.setenv("R2_DATASET_BUCKET_LIST", json.dumps(listed))
    assert draw_pages(0, 4, 1) == pages
    assert_same_batches(make_loader(pages, length=32, pack=True), expected)
    R2DatasetLoader.close_all()
    monkeypatch.setenv("R2_DATASET_BUCKET_LIST", "[{}]")
    with pytest.raises(errors.ConfigurationError, match="no list of buckets"):
        draw_pages(0, 1, 1)


def test_folders_are_configs_where_there_is_no_index(dataset: Path) -> None:
    expected = draw_pages(0, 6, 1)
    R2DatasetLoader.close_all()
    (dataset / "_shard_sizes.json").unlink()
    assert draw_pages(0, 6, 1) == expected


def test_a_dataset_of_the_hub_is_read_with_its_index(dataset: Path, hub: HubServer) -> None:
    """The index decides the draw, so it is the same as of the files in a folder."""
    repo = hub.make_repo(dataset=True)
    HfApi(endpoint=hub.endpoint, token=WRITER).upload_folder(
        repo_id=repo, folder_path=dataset, path_in_repo="data", repo_type="dataset"
    )
    expected = draw_pages(0, 6, 1)
    R2DatasetLoader.source = StoreSpec(
        url=f"hf://datasets/{repo}@main/data", endpoint=hub.endpoint,
        options={"token": SecretStr(READER)},
    )  # fmt: skip
    assert draw_pages(0, 6, 1) == expected
    loader = make_loader(expected[:2], length=32, pack=True)
    R2DatasetLoader.source = dataset.as_uri()
    assert_same_batches(loader, make_loader(expected[:2], length=32, pack=True))


def test_a_dataset_that_was_replaced_is_opened_again_by_the_next_call(dataset: Path) -> None:
    pages = draw_pages(0, 6, 1)
    for name, rows in CONFIGS.items():
        for number, count in enumerate(rows):
            cast("Any", pq).write_table(
                pa.table({"text": ["new"] * count}), dataset / name / f"train-{number:05d}.parquet"
            )
    with pytest.raises(errors.ChangedError, match="Open the loader again"):
        make_loader(pages, length=32, pack=True)
    tokens = {*TOKENIZER.encode("new", add_special_tokens=False).ids, END_ID}
    batches = list(make_loader(pages, length=32, pack=True))
    assert {token for batch in batches for token in batch.ravel().tolist()} == tokens


def change_index(dataset: Path, old: str, new: str) -> None:
    path = dataset / "_shard_sizes.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "kind", "text"),
    [
        ('"num_rows": 412', '"num_rows": 411', errors.CorruptError, "has 412 rows, .* says 411"),
        ("train-00001", "train-00009", errors.NotFoundError, "names .*train-00009"),
        ('"num_rows": 412', '"rows": 412', errors.CorruptError, "no index of a dataset"),
        ('"shards"', "shards", errors.CorruptError, "no index of a dataset"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    old: str, new: str, kind: type[Exception], text: str, dataset: Path
) -> None:
    change_index(dataset, old, new)
    with pytest.raises(kind, match=text):
        draw_pages(0, 1, 1)


@pytest.mark.parametrize("prefix", ["", "bucket/", "bucket/a/b/c/"])
def test_an_index_begins_its_paths_with_any_prefix(dataset: Path, prefix: str) -> None:
    expected = draw_pages(0, 6, 1)
    R2DatasetLoader.close_all()
    change_index(dataset, "bucket/folder/", prefix)
    assert draw_pages(0, 6, 1) == expected


def test_a_file_that_is_gone_is_replaced_by_none_of_the_same_name(dataset: Path) -> None:
    name = next(iter(CONFIGS))
    (dataset / name / "train-00000.parquet").rename(dataset / "train-00000.parquet")
    with pytest.raises(errors.NotFoundError, match=f"names bucket/folder/{name}/train-00000"):
        draw_pages(0, 1, 1)


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: make_loader([("none", 0, "train")], length=8, pack=True), "no config 'none'"),
        (lambda: make_loader([("small", 50, "train")], length=8, pack=True), "no rows from 50"),
        (lambda: make_loader([], length=0, pack=True), "at least one sequence"),
        (lambda: R2DatasetLoader(1, 8, FastTokenizerStub(TOKENIZER, None)), "eos_token_id"),
        (lambda: R2DatasetLoader(1, 8, PageTokenizer(BODY)), "set `end_token`"),
        (lambda: draw_pages(0, 1, 1, 119), "needs at least 121"),
    ],
)
def test_what_cannot_be_loaded_is_a_sentence(act: Any, text: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=text):
        act()
