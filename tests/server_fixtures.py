"""The stand-ins as session fixtures: `rgw`, `r2` in front of it, `gcs`, `vast` and `hub`.

The processes of a run share one RGW, which starts while they collect their tests. An RGW takes a
thirtieth of a processor also while no test uses it.
"""

import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError

from millrace.testing.gcs import GCSServer
from millrace.testing.hub import HubServer
from millrace.testing.process import start_module
from millrace.testing.r2 import R2Proxy
from millrace.testing.repository import snapshot
from millrace.testing.rgw import RGW
from millrace.testing.vast import VastServer

_SHARED_RGW = "MILLRACE_TESTS_RGW"
"""Variable with the process id and the folder of the RGW that processes share."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Start the shared RGW before the processes, unless they only run tests without servers."""
    unit = config.rootpath / "tests/unit"
    if all((config.invocation_params.dir / one).is_relative_to(unit) for one in config.args):
        return
    folder = Path(tempfile.mkdtemp(prefix="millrace-rgw-"))
    options = ["--in-memory"] if fits_in_memory(config) else []
    server = start_module("millrace.testing.rgw", *options, str(folder / "rgw"), log=folder / "log")
    os.environ[_SHARED_RGW] = f"{server.pid} {folder}"

    def stop() -> None:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(stop)


def fits_in_memory(config: pytest.Config) -> bool:
    """Decide whether an RGW can keep the objects in memory: not those of the soak."""
    return config.getoption("markexpr") == "not soak"


def find_shared_rgw(pid: int, folder: Path) -> RGW:
    """Return the shared RGW once it serves."""
    state = folder / "rgw/state.json"
    while not state.exists():
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError((folder / "log").read_text())
        time.sleep(0.05)
    return RGW(folder / "rgw", json.loads(state.read_text()))


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    """Make the folder of the servers' data, and remove it at the end, as it may be large."""
    with tempfile.TemporaryDirectory(prefix="millrace-servers-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def rgw(server_folder: Path, pytestconfig: pytest.Config) -> Iterator[RGW]:
    """A Ceph RGW. Other processes may use it at the same time, each with buckets of its own."""
    if shared := os.environ.get(_SHARED_RGW):
        pid, _, folder = shared.partition(" ")
        yield find_shared_rgw(int(pid), Path(folder))
    else:
        memory = fits_in_memory(pytestconfig)
        with RGW.start(server_folder / "rgw", in_memory=memory) as server:
            yield server


@pytest.fixture(scope="session")
def r2(rgw: RGW, server_folder: Path) -> Iterator[R2Proxy]:
    """An R2 over TLS in front of `rgw`: each test finds it without faults, its counts at zero."""
    keys = {
        key.access_key_id: key.secret_access_key for key in (rgw.full, rgw.read_only, rgw.other)
    }
    with R2Proxy.start(rgw.endpoint, keys, server_folder / "r2") as server:
        yield server


@pytest.fixture(autouse=True)
def _r2_at_rest(request: pytest.FixtureRequest) -> None:
    if "r2" in request.fixturenames:
        request.getfixturevalue("r2").reset()


@pytest.fixture(scope="session")
def gcs(server_folder: Path) -> Iterator[GCSServer]:
    """A Cloud Storage with the bucket ``bucket``."""
    with GCSServer.start(server_folder / "gcs") as server:
        yield server


@pytest.fixture(scope="session")
def vast(server_folder: Path) -> Iterator[VastServer]:
    """A Vast.ai; `VastServer.reset` gives a test a world of its own."""
    with VastServer.start(server_folder / "vast") as server:
        yield server


@pytest.fixture(scope="session")
def hub(server_folder: Path) -> Iterator[HubServer]:
    """A Hugging Face Hub without repositories."""
    with HubServer.start(server_folder / "hub") as server:
        yield server


@pytest.fixture(scope="session")
def bucket_client(rgw: RGW) -> Any:
    """A client of boto3 with the rights of `rgw.full`."""
    return rgw.make_client(rgw.full)


@pytest.fixture
def bucket(rgw: RGW, bucket_client: Any) -> Iterator[str]:
    """A bucket of `rgw`, and so of `r2`, made for one test, that `rgw.full` owns.

    Its large objects are deleted after the test, since RGW keeps them in memory.
    """
    name = rgw.create_bucket(f"bucket-{uuid.uuid4().hex[:12]}")
    yield name
    with suppress(ClientError):  # the test has deleted the bucket, or denied the access to it
        for stat in bucket_client.list_objects_v2(Bucket=name).get("Contents", ()):
            if stat["Size"] > 1_000_000:
                bucket_client.delete_object(Bucket=name, Key=stat["Key"])


@pytest.fixture(scope="session")
def repository(server_folder: Path) -> Path:
    """This project, as somebody would clone it."""
    return snapshot(server_folder / "repository")
