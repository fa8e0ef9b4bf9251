"""Machines that a run has rented are released though the run is killed."""

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pydantic import SecretStr

from blocks import VastCredentials
from millrace.testing.vast import VastServer
from tests.prefect_server import PrefectServer, Worker, wait_until
from tests.support.flows.renting import RENT


def start_renting(
    deployed: PrefectServer, vast: VastServer, payer: Any, folder: Path, name: str
) -> UUID:
    """Start a flow run that rents a machine, and wait for the machine."""
    key = vast.reset(rate=1.0, strict=False)  # it takes 20 s at least until a machine is up
    VastCredentials(api_key=SecretStr(key), server_url=vast.url).save("payer", overwrite=True)
    (folder / "store").mkdir()
    asked = {"bucket": (folder / "store").as_uri(), "vast": payer, "name": name, "settings": RENT}
    run = deployed.start("rent-machines/rent-machines", watch=False, **asked, dry_run=False).run
    wait_until(lambda: len(vast.list_alive()) == 1, "a machine")
    return run


@pytest.mark.soak
def test_a_run_that_hangs_and_is_cancelled_leaves_no_machine(
    deployed: PrefectServer, own_worker: Worker, vast: VastServer, payer: Any, tmp_path: Path
) -> None:
    run = start_renting(deployed, vast, payer, tmp_path, "hung")
    for process in own_worker.list_descendants():
        if "prefect.engine" in process.cmdline():
            process.suspend()  # so that it hears of nothing, and has to be killed
    assert deployed.run_prefect("flow-run", "cancel", str(run)).returncode == 0
    wait_until(lambda: vast.list_alive() == [], "the machine released")
    deployed.wait(run, "Cancelled")
    wait_until(
        lambda: "1 machine of hung released" in deployed.read_logs(run), "what the hook says"
    )


@pytest.mark.soak
def test_a_worker_that_is_terminated_leaves_no_machine(
    deployed: PrefectServer, own_worker: Worker, vast: VastServer, payer: Any, tmp_path: Path
) -> None:
    run = start_renting(deployed, vast, payer, tmp_path, "ended")
    own_worker.terminate()
    wait_until(lambda: vast.list_alive() == [], "the machine released")
    (one,) = vast.list_machines()
    assert one["by"] == "the account"
    assert deployed.read_flow_run(run).state_name != "Completed"
