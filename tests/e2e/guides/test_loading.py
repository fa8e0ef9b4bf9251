"""The guide to loading, block by block."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist

from millrace import PipelineSettings, shard_dataset
from millrace.datasets.loader import PageLoader
from millrace.datasets.loader.templar import R2DatasetLoader
from millrace.storage import list_objects, open_store, put, read
from millrace.testing.rgw import RGW
from tests.support.byte_pairs import encode_json, make_tokenizer
from tests.support.forks import leave_out_prefect
from tests.support.guides import Guide, follow


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_every_block_of_the_guide_to_loading(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rgw: RGW,
    bucket: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(1500)))
    environment = {
        "AWS_ENDPOINT_URL": rgw.endpoint,
        "AWS_ACCESS_KEY_ID": rgw.full.access_key_id,
        "AWS_SECRET_ACCESS_KEY": rgw.full.secret_access_key,
        "AWS_REGION": "us-east-1",
    }
    tokenizer = tmp_path / "own-tokenizer.json"
    tokenizer.write_bytes(encode_json(make_tokenizer()))
    mirror = rgw.create_bucket(f"{bucket}-mirror")
    values = {
        "s3://BUCKET": f"s3://{bucket}",
        "s3://MIRROR": f"s3://{mirror}",
        "/var/cache/millrace": str(tmp_path / "cache"),
        '"tokenizer.json"': f'"{tokenizer}"',
    }
    folder = tmp_path / "loading"
    with follow("loading", folder, monkeypatch, values=values, environment=environment) as guide:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = PipelineSettings.model_validate(
            {
                "source": {"url": tmp_path.as_uri(), "kind": "jsonl", "columns": {"txt": "text"}},
                "store": {"url": f"s3://{bucket}"},
                "dataset": "my-dataset",
                "sharding": {"formats": ["pages", "webdataset"], "types": {"txt": "str"}},
                "execution": {"workers": 1},
            }
        )
        shard_dataset(settings)
        store, copy = open_store(f"s3://{bucket}"), open_store(f"s3://{mirror}")
        for stat in list_objects(store):
            put(copy, stat.key, read(store, stat.key))
        capsys.readouterr()
        leave_out_prefect(monkeypatch)
        names: dict[str, object] = {}
        guide.execute(names)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 6
        assert all("rows, the first begins with row " in line for line in lines)
        assert cast("PageLoader", names["loader"]).counts.pages == 6
        guide.execute(names)
        lines = capsys.readouterr().out.splitlines()
        packed = r"\([1-9], 128\) of uint16 and ([0-9]+) documents end here"
        ended = [re.fullmatch(packed, line) for line in lines[:-1]]
        assert all(ended)
        assert sum(int(found[1]) for found in ended if found) > 300
        assert "tokens wait for the next pages" in lines[-1]
        assert "was made: 1 file, 1,500 rows" in guide.run()
        guide.execute(names)
        lines = capsys.readouterr().out.splitlines()
        assert lines
        assert set(lines) <= {f"({rows}, 128) torch.int64" for rows in range(1, 5)}
        guide.execute(names)
        assert set(capsys.readouterr().out.splitlines()) == {"(4, 128) int64"}
        guide.execute(names)
        *lines, first, second = capsys.readouterr().out.splitlines()
        assert len(lines) == 6
        assert f"s3://{bucket}/my-dataset/shards/pages/train" in first
        assert f"s3://{mirror}/my-dataset/shards/pages/train" in second
        assert "Files with checksums: 1." in guide.run()
        guide.execute(names)
        sizes = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
        assert sizes
        assert sum(sizes) == sum(
            file.stat().st_size for file in (tmp_path / "cache/files").iterdir()
        )
        follow_samples(guide, capsys)
    R2DatasetLoader.source = None
    R2DatasetLoader.close_all()


def follow_samples(guide: Guide, capsys: pytest.CaptureFixture[str]) -> None:
    """Follow the part of the guide about samples of shards."""
    names: dict[str, object] = {}
    guide.execute(names)
    lines = capsys.readouterr().out.splitlines()
    assert len(set(lines)) == 5
    assert all(line.endswith(" characters") for line in lines)
    assert cast("dict[str, int]", names["state"])["position"] == 5
    guide.execute(names)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["rank 0 has 500 of 1500", "rank 1 has 500 of 1500", "1500 different samples"]
    guide.execute(names)
    assert capsys.readouterr().out == "750 odd rows\n"
    guide.execute(names)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    end_together = cast("Callable[[Iterable[int]], Iterator[int]]", names["end_together"])
    assert list(end_together([1, 2, 3])) == [1, 2, 3]
    dist.destroy_process_group()
    guide.execute(names)
    assert capsys.readouterr().out == "1500 samples\n"
    guide.execute(names)
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split() for line in lines]
    numbers = [*range(1, 13), *range(11, 21)]
    assert [int(words[1]) for words in steps] == numbers
    assert [int(words[4]) for words in steps] == [(number - 1) // 15 for number in numbers]
    assert [words[-1] for words in steps[10:12]] == [words[-1] for words in steps[12:14]]
    assert len({words[-1] for words in steps[12:]} | {words[-1] for words in steps[:10]}) == 20
