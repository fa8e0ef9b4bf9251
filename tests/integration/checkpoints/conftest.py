"""Stores for checkpoints: one of every kind, and a folder."""

from pathlib import Path

import pytest

from millrace.storage import Store, StoreSpec, open_store
from tests.stores import make_spec


@pytest.fixture(params=["local", "memory", "rgw", "r2", "gcs"])
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(make_spec(request.param, request))


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return open_store(StoreSpec(url=tmp_path.as_uri()))
