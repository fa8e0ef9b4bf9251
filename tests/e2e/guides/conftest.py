"""Assumptions of the guides: credentials of a store, and a folder of text."""

from pathlib import Path

import pytest

from millrace.testing.rgw import RGW
from tests.support.flows.fixtures import make_jsonl, make_texts


@pytest.fixture
def credentials(rgw: RGW) -> dict[str, str]:
    """Variables with which an ``s3://`` URL is the RGW, in place of R2."""
    return {
        "AWS_ENDPOINT_URL": rgw.endpoint,
        "AWS_ACCESS_KEY_ID": rgw.full.access_key_id,
        "AWS_SECRET_ACCESS_KEY": rgw.full.secret_access_key,
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of JSON lines."""
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(make_jsonl(make_texts()))
    return folder
