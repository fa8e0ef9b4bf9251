"""Shards as the readers of their formats see them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.datasets.formats.base import ShardFormat
from millrace.datasets.formats.litdata import LitDataFormat
from millrace.datasets.formats.mds import MDSFormat
from millrace.datasets.sample import Sample
from millrace.keys.datasets import DatasetKeys
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.support.format_readers import read_litdata, read_mds, write_mds
from tests.support.formats import ALL_TYPES, make_objects

KEYS = DatasetKeys("texts")
FIELDS = ALL_TYPES
COLUMNS = {
    "__key__": "str",
    "body": "bytes",
    "count": "int",
    "meta": "json",
    "score": "float64",
    "text": "str",
    "wide": "ndarray:uint32",
    "words": "ndarray:uint16",
}
COUNT = 60
Item = dict[str, Any]


def make_items() -> list[Item]:
    rng = random.Random(5)
    return [
        {
            "__key__": f"00000-{number:010d}",
            "body": rng.randbytes(rng.randrange(3000)),
            "count": rng.randrange(-(1 << 63), 1 << 63),
            "meta": {"number": number, "grün": [None, "x", 1.5]},
            "score": rng.random(),
            "text": "".join(rng.choices("aé漢\N{ROCKET}\n", k=rng.randrange(300))),
            "wide": np.array(rng.choices(range(1 << 32), k=rng.randrange(1, 300)), np.uint32),
            "words": np.array(rng.choices(range(1 << 16), k=rng.randrange(1, 300)), np.uint16),
        }
        for number in range(COUNT)
    ]


def make_sample(item: Item) -> Sample:
    fields = {
        "body": item["body"],
        "count": b"%d" % item["count"],
        "meta": json.dumps(item["meta"]).encode(),  # the text that MDSWriter makes
        "score": orjson.dumps(item["score"]),
        "text": item["text"].encode(),
        "wide": item["wide"].astype("<u4").tobytes(),
        "words": item["words"].astype("<u2").tobytes(),
    }
    return Sample(item["__key__"], fields, 0)


def make_files(
    shard_format: ShardFormat, items: Sequence[Item], samples_per_shard: int
) -> dict[str, bytes]:
    """Return the shards and the index of a split, by their names below the split's prefix."""
    prefix = KEYS.make_shards_prefix(shard_format.name, "train")
    samples = [make_sample(item) for item in items]
    parts = [
        samples[start : start + samples_per_shard]
        for start in range(0, len(samples), samples_per_shard)
    ]
    objects = make_objects(shard_format, KEYS, FIELDS, parts)
    return {key.removeprefix(prefix): body for key, body in objects.items()}


def write(folder: Path, objects: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, body in objects.items():
        (folder / name).write_bytes(body)
    return folder


def assert_same(found: Sequence[Item], expected: Sequence[Item]) -> None:
    assert [item["__key__"] for item in found] == [item["__key__"] for item in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert isinstance(value, type(other[name])), name
            if isinstance(value, np.ndarray):
                assert value.dtype == other[name].dtype
                assert value.tolist() == other[name].tolist()
            else:
                assert value == other[name], name


def sort(items: Sequence[Item]) -> list[Item]:
    return sorted(items, key=lambda item: item["__key__"])


def with_json_as_text(items: Sequence[Item]) -> list[Item]:
    return [{**item, "meta": json.dumps(item["meta"])} for item in items]


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return make_items()


def test_litdata_reads_a_folder_in_its_order(tmp_path: Path, items: list[Item]) -> None:
    folder = write(tmp_path / "train", make_files(LitDataFormat(), items, 7))
    assert_same(read_litdata(str(folder)), with_json_as_text(items))


def test_litdata_reads_each_sample_once_when_shuffled_by_two_workers(
    tmp_path: Path, items: list[Item]
) -> None:
    folder = write(tmp_path / "train", make_files(LitDataFormat(), items, 7))
    found = read_litdata(str(folder), shuffle=True, workers=2)
    assert [item["__key__"] for item in found] != [item["__key__"] for item in items]
    assert_same(sort(found), with_json_as_text(items))


def test_litdata_reads_from_s3_over_tls(
    items: list[Item], rgw: RGW, r2: R2Proxy, bucket: str
) -> None:
    for name, body in make_files(LitDataFormat(), items, 7).items():
        r2.make_client(rgw.full).put_object(Bucket=bucket, Key=f"texts/train/{name}", Body=body)
    assert r2.ca_file is not None
    options = {
        "endpoint_url": r2.endpoint,
        "aws_access_key_id": rgw.full.access_key_id,
        "aws_secret_access_key": rgw.full.secret_access_key,
        "region_name": "auto",
    }
    trust = {"AWS_CA_BUNDLE": str(r2.ca_file), "SSL_CERT_FILE": str(r2.ca_file)}
    found = read_litdata(f"s3://{bucket}/texts/train", storage_options=options, environment=trust)
    assert_same(found, with_json_as_text(items))


@pytest.mark.soak
def test_mosaicml_reads_a_folder_in_its_order(
    tmp_path: Path, items: list[Item], mosaicml: Path
) -> None:
    folder = write(tmp_path / "train", make_files(MDSFormat(), items, 7))
    assert_same(read_mds(mosaicml, folder), items)


def test_mosaicml_reads_each_sample_once_when_shuffled_by_two_workers(
    tmp_path: Path, items: list[Item], mosaicml: Path
) -> None:
    folder = write(tmp_path / "train", make_files(MDSFormat(), items, 7))
    found = read_mds(mosaicml, folder, shuffle=True, workers=2)
    assert [item["__key__"] for item in found] != [item["__key__"] for item in items]
    assert_same(sort(found), items)


@pytest.mark.soak
def test_mosaicmls_own_writer_makes_the_same_bytes(
    tmp_path: Path, items: list[Item], mosaicml: Path
) -> None:
    write_mds(mosaicml, tmp_path / "theirs", COLUMNS, items)
    (body,) = (tmp_path / "theirs").glob("*.mds")
    index = json.loads((tmp_path / "theirs/index.json").read_bytes())
    own = make_files(MDSFormat(), items, COUNT)
    assert own["train-00000-000000.mds"] == body.read_bytes()
    index["shards"][0]["raw_data"]["basename"] = "train-00000-000000.mds"
    assert own["index.json"] == json.dumps(index, sort_keys=True).encode()


@pytest.mark.soak
def test_mosaicml_reads_an_empty_array_which_its_writer_refuses(
    tmp_path: Path, items: list[Item], mosaicml: Path
) -> None:
    empty = [{**items[0], "wide": np.array([], np.uint32), "body": b"", "text": ""}]
    folder = write(tmp_path / "train", make_files(MDSFormat(), empty, 1))
    assert_same(read_mds(mosaicml, folder), empty)
    with pytest.raises(AssertionError, match="0 elements"):
        write_mds(mosaicml, tmp_path / "theirs", COLUMNS, empty)
