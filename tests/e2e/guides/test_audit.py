"""The guide to audits, block by block."""

import json
from pathlib import Path

import pytest

from millrace.testing.rgw import RGW
from tests.support.guides import follow


def test_every_block_of_the_guide_to_audits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rgw: RGW, bucket: str
) -> None:
    values = {"r2://0123456789abcdef0123456789abcdef/gradients": f"s3://{bucket}"}
    environment = {
        "AWS_ENDPOINT_URL": rgw.endpoint,
        "R2_GRADIENTS_READ_ACCESS_KEY_ID": rgw.read_only.access_key_id,
        "R2_GRADIENTS_READ_SECRET_ACCESS_KEY": rgw.read_only.secret_access_key,
        "R2_GRADIENTS_WRITE_ACCESS_KEY_ID": rgw.full.access_key_id,
        "R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY": rgw.full.secret_access_key,
    }
    folder = tmp_path / "audit"
    with follow("audit", folder, monkeypatch, values=values, environment=environment) as guide:
        guide.write("audit.yaml")
        shown = guide.run()
    assert "operations are as they should be" in shown
    findings = json.loads((folder / "findings.json").read_text())["findings"]
    assert {one["verdict"] for one in findings} == {"correct"}
