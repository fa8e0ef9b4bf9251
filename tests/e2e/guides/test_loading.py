"""The guide to loading, block by block."""

from pathlib import Path
from typing import cast

import pytest

from millrace import PipelineSettings, shard_dataset
from millrace.datasets.loader import PageLoader
from millrace.testing.rgw import RGW
from tests.support.guides import follow


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
    values = {"s3://BUCKET": f"s3://{bucket}"}
    folder = tmp_path / "loading"
    with follow("loading", folder, monkeypatch, values=values, environment=environment) as guide:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = PipelineSettings.model_validate(
            {
                "source": {"url": tmp_path.as_uri(), "kind": "jsonl", "columns": {"txt": "text"}},
                "store": {"url": f"s3://{bucket}"},
                "dataset": "my-dataset",
                "sharding": {"formats": ["pages"], "types": {"txt": "str"}},
                "execution": {"workers": 1},
            }
        )
        shard_dataset(settings)
        capsys.readouterr()
        names: dict[str, object] = {}
        guide.execute(names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all("rows, the first begins with row " in line for line in lines)
    assert cast("PageLoader", names["loader"]).counts.pages == 6
