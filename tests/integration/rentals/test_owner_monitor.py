"""A rental is released when the process that owns it is killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from millrace.rentals import (
    OfferRequest,
    OwnerMonitor,
    Program,
    Rental,
    RentalSettings,
    VastAccount,
)
from millrace.rentals.owner_monitor import watch_owner
from millrace.storage import StoreSpec
from millrace.testing.process import REPOSITORY
from millrace.testing.vast import VastServer
from tests.prefect_server import wait_until


def settings_of(key: str, url: str, folder: Path) -> RentalSettings:
    return RentalSettings(
        name="fleet",
        store=StoreSpec(url=folder.as_uri()),
        account=VastAccount(api_key=SecretStr(key), server_url=url),
        request=OfferRequest(max_hourly=2.0, max_total=50.0),
        program=Program(repo_url="https://example.org/x", command=("true",)),
    )


def own(key: str, url: str, folder: str, grace: str) -> None:
    """Own a machine until this process is killed."""
    settings = settings_of(key, url, Path(folder))
    with (
        OwnerMonitor(settings.ledger, settings.name, grace_period=float(grace)),
        Rental(settings) as rental,
    ):
        rental.wait_until_ready()
        print("ready", flush=True)
        signal.pause()


def killed(key: str, url: str, folder: Path, grace: float) -> None:
    """Have an owner rent a machine, and be killed."""
    command = [
        sys.executable,
        "-m",
        "tests.integration.rentals.test_owner_monitor",
        key,
        url,
        str(folder),
        str(grace),
    ]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        owner.kill()


@pytest.fixture
def key(vast: VastServer, tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    return vast.reset(rate=200.0, strict=False)


def test_machines_of_an_owner_that_was_killed_are_released(
    vast: VastServer, key: str, tmp_path: Path
) -> None:
    killed(key, vast.url, tmp_path / "store", grace=0.0)
    wait_until(lambda: vast.list_alive() == [], "the machine released")
    (one,) = vast.list_machines()
    assert one["by"] == "the account"


@pytest.mark.soak
def test_machines_that_a_next_owner_goes_on_with_are_left_to_it(
    vast: VastServer, key: str, tmp_path: Path
) -> None:
    with Rental(settings_of(key, vast.url, tmp_path / "store")) as rental:
        rental.wait_until_ready()
        gone = subprocess.Popen(["true"])
        gone.wait()
        watch_owner(
            {
                "owner": [gone.pid, "1"], "grace_period": 0.0, "rental": "fleet",
                "ledger": {
                    "store": {"url": (tmp_path / "store").as_uri()},
                    "account": {"api_key": key, "server_url": vast.url},
                },
            }
        )  # fmt: skip
        assert len(vast.list_alive()) == 1
    assert vast.list_alive() == []


if __name__ == "__main__":
    own(*sys.argv[1:])
