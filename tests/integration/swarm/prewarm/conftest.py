"""Store and nodes of the tests of a prewarm."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rig.store import RigStore
from tests.support.swarm.swarms import Agent, running


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigStore]:
    with RigStore.start(tmp_path_factory.mktemp("objects")) as store:
        yield store


@pytest.fixture(autouse=True)
def fresh(store: RigStore) -> None:
    store.reset()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Agent]]:
    with running(tmp_path, 3) as agents:
        yield agents
