"""A rental is released when the process that owns it is killed, or gives its release up."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from millrace import errors
from millrace.rentals import (
    LedgerSettings,
    OfferRequest,
    OwnerMonitor,
    Program,
    Rental,
    RentalSettings,
    VastAccount,
    outside_release,
    owner_monitor,
)
from millrace.rentals.owner_monitor import watch_owner
from millrace.storage import StoreSpec
from millrace.testing.process import REPOSITORY
from millrace.testing.vast import VastServer
from tests.prefect_server import wait_until
from tests.support.rentals.account import Account_, Reset


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


def run_monitor(ledger: LedgerSettings) -> None:
    """Watch an owner that has ended, until the monitor returns."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    config = {
        "owner": [gone.pid, "1"], "grace_period": 0.0, "rental": "fleet",
        "ledger": ledger.reveal_secrets(),
    }  # fmt: skip
    with Path("/dev/null").open("rb") as pipe:
        watch_owner(config, pipe)


@pytest.mark.soak
def test_machines_that_a_next_owner_goes_on_with_are_left_to_it(
    vast: VastServer, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_monitor, "_HELD_TIMEOUT", 0.0)
    settings = settings_of(key, vast.url, tmp_path / "store")
    with Rental(settings) as rental:
        rental.wait_until_ready()
        run_monitor(settings.ledger)
        assert len(vast.list_alive()) == 1
    assert vast.list_alive() == []


def abandon(account: Account_) -> Callable[[], None]:
    """Rent a machine; return a function by which its owner disappears."""
    rental = Rental(account.make_settings(), vast=account.vast)
    rental.__enter__()
    rental.wait_until_ready()
    return rental._stack.close  # its lease is released, its machine is not


def test_machines_of_a_next_owner_that_disappears_soon_are_released(
    world: Reset, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, has_failed = world(strict=False), threading.Event()
    monkeypatch.setattr(owner_monitor, "_HELD_POLL_INTERVAL", 0.1)
    release_rental = outside_release.release_rental

    def release(*args: Any, **more: Any) -> None:
        try:
            release_rental(*args, **more)
        except errors.HeldError:
            has_failed.set()
            raise

    monkeypatch.setattr(outside_release, "release_rental", release)
    disappear = abandon(account)
    monitor = threading.Thread(target=run_monitor, args=(account.make_ledger_settings(),))
    monitor.start()
    assert has_failed.wait(60)
    disappear()
    monitor.join(60)
    assert account.server.list_alive() == []


def make_monitor(account: Account_) -> OwnerMonitor:
    return OwnerMonitor(account.make_ledger_settings(), "fleet", grace_period=0.0)


def rent(account: Account_, monitor: OwnerMonitor, fault: str = "", **more: Any) -> None:
    """Own a machine, with a monitor. The end meets a fault of destroy requests."""
    with monitor, Rental(account.make_settings(), vast=account.vast, **more) as rental:
        rental.wait_until_ready()
        if fault:
            account.server.fail_next(10_000, fault, "delete")


def await_release(account: Account_, monitor: OwnerMonitor) -> None:
    """Have the account answer again, and wait until the monitor has ended."""
    account.server.ask("calm", {})
    assert monitor._process is not None
    assert monitor._process.wait(120) == 0
    assert account.server.list_alive() == []


@pytest.mark.parametrize("detached", [False, True])
def test_the_monitor_of_an_owner_that_leaves_nothing_behind_ends(
    world: Reset, *, detached: bool
) -> None:
    account = world()
    monitor = make_monitor(account)
    rent(account, monitor, detached=detached)
    assert monitor._process is not None
    assert monitor._process.poll() == -signal.SIGKILL
    assert len(account.server.list_alive()) == detached


def test_what_an_owner_cannot_release_is_released_by_its_monitor(world: Reset) -> None:
    account = world(strict=False)
    monitor = make_monitor(account)
    with pytest.raises(errors.UnavailableError, match="is not confirmed"):
        rent(account, monitor, "error500")
    await_release(account, monitor)


def test_machines_that_a_next_owner_cannot_take_over_are_released_by_its_monitor(
    world: Reset,
) -> None:
    account = world(strict=False)
    abandon(account)()
    account.server.fail_next(10_000, "error500", "user")
    monitor = make_monitor(account)
    with pytest.raises(errors.UnavailableError, match="does not answer to user"):
        rent(account, monitor)
    await_release(account, monitor)


if __name__ == "__main__":
    own(*sys.argv[1:])
