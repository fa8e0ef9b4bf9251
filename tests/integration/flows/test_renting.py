"""Machines are rented, listed, released and reaped by flows."""

import json
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow, task
from prefect.states import Crashed
from pydantic import SecretStr

from blocks import Bucket, BucketRole, VastCredentials
from examples.tiny_lm.begin import begin
from flows.campaign_machines import rent_workers
from flows.campaign_plan import CampaignPlan
from flows.list_machines import list_machines
from flows.reap_machines import reap_machines
from flows.release_machines import release_machines
from flows.rent_machines import await_machines, rent_machines
from millrace.errors import MachineError, UnavailableError, WorkerError
from millrace.rentals import MachineSettings, RentalSettings, RentalTimeouts, VastAccount
from millrace.storage import StoreSpec, open_store
from millrace.testing.vast import VastServer
from tasks.renting import make_supervisor, require_ledger
from tests.prefect_server import PATIENCE, PrefectServer, wait_until
from tests.support.flows.campaigns import make_plan_settings, make_text
from tests.support.flows.renting import RENT

RENTED_WORKERS: dict[str, Any] = {
    "kind": "rented", "request": RENT["request"], "vast": "payer", "prewarm": False,
    "repo_url": "https://example.org/x", "timeouts": {"poll_interval": "PT0.2S"},
}  # fmt: skip
QUICK = timedelta(milliseconds=100)


def test_machines_are_rented_listed_and_released(
    prefect_api: PrefectServer, vast: VastServer, payer: Any, tmp_path: Path
) -> None:
    place = {"bucket": (tmp_path / "store").as_uri(), "vast": payer}
    (tmp_path / "store").mkdir()
    asked = {**place, "settings": {**RENT, "machines": 2}, "name": "fleet"}
    dry = prefect_api.call(rent_machines, **asked)
    assert dry.code == 0, dry.output
    report = prefect_api.read_artifacts(dry.run)["offers"]
    assert "**Nothing was rented.** 12 offers of Vast.ai fit `fleet`" in report
    assert vast.list_machines() == []

    done = prefect_api.call(rent_machines, **asked, dry_run=False)
    assert done.code == 0, done.output
    assert len(vast.list_alive()) == 2
    report = prefect_api.read_artifacts(done.run)["rent-machines"]
    assert "**fleet**: 2 machines run" in report
    assert report.count("| `fleet` |") == 2

    (hook,) = rent_machines.on_crashed_hooks
    # As a worker calls it for a run that was killed.
    hook(rent_machines, prefect_api.read_flow_run(done.run), Crashed())
    assert len(vast.list_alive()) == 2  # both were left to work

    listed = prefect_api.call(list_machines, **place)
    assert "2 machines rented, $" in prefect_api.read_artifacts(listed.run)["rentals"]
    kept = prefect_api.call(reap_machines, **place, dry_run=False)
    assert "0 machines released, 2 stay." in prefect_api.read_artifacts(kept.run)["reaper"]

    back = prefect_api.call(release_machines, **place, name="fleet")
    assert back.code == 0, back.output
    assert (
        "2 machines released; a listing shows none."
        in prefect_api.read_artifacts(back.run)["rentals"]
    )
    assert vast.list_alive() == []


@pytest.mark.parametrize("failing", ["fetch_machines", "report_rentals"])
def test_machines_stay_rented_when_their_report_fails(
    prefect_api: PrefectServer,
    vast: VastServer,
    payer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
) -> None:
    @task(name=failing)
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("There was no answer.")

    monkeypatch.setattr(f"flows.rent_machines.{failing}", fail)
    (tmp_path / "store").mkdir()
    bucket = (tmp_path / "store").as_uri()
    done = prefect_api.call(
        rent_machines, bucket=bucket, vast=payer, settings=RENT, name="fleet", dry_run=False
    )
    assert done.code == 0, done.output
    assert len(vast.list_alive()) == 1

    @flow
    def attend() -> None:
        settings = MachineSettings.model_validate(RENT)
        rental = RentalSettings.make("fleet", require_ledger(bucket, "payer"), settings)
        with make_supervisor(rental) as supervisor:
            await_machines(supervisor)
            assert len(vast.list_alive()) == 1

    attend()
    assert vast.list_alive() == []


@pytest.mark.parametrize("failing", ["release_rental", "report_rentals"])
def test_a_campaign_goes_on_when_the_last_release_of_its_machines_fails(
    prefect_api: PrefectServer,
    vast: VastServer,
    payer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: str,
) -> None:
    @task(name=failing)
    def fail(*_: object, **__: object) -> None:
        raise UnavailableError("There was no answer.")

    monkeypatch.setattr(f"flows.release_machines.{failing}", fail)
    store = (tmp_path / "store").as_uri()
    settings = make_plan_settings("unreported", store, tmp_path, RENTED_WORKERS)
    plan = CampaignPlan.model_validate(settings)
    training = plan.make_campaign().training
    assert training is not None
    assert plan.rental is not None

    @flow
    def train(outcome: str) -> str:
        with rent_workers(training, plan.rental):
            assert len(vast.list_alive()) == 2
            if outcome == "failed":
                raise WorkerError("of the training")
        return outcome

    assert train("trained") == "trained"
    assert "millrace machine release unreported" in caplog.text
    assert "There was no answer." in caplog.text
    with pytest.raises(WorkerError, match="of the training"):
        train("failed")
    assert vast.list_alive() == []


@pytest.mark.soak
def test_machines_are_rented_into_the_bucket_of_a_block(
    prefect_api: PrefectServer, vast: VastServer, payer: Any, tmp_path: Path
) -> None:
    """A bucket may be named, and the name is that of a block, not of a folder."""
    store = tmp_path / "store"
    store.mkdir()
    name = f"fleet-store-{uuid4().hex[:8]}"
    Bucket(role=BucketRole.GRADIENTS, url=store.as_uri()).save(name)
    done = prefect_api.call(
        rent_machines, bucket=name, vast=payer, settings=RENT, name="named", dry_run=False
    )
    assert done.code == 0, done.output
    assert len(vast.list_alive()) == 1
    assert list(store.glob("**/named/*"))
    back = prefect_api.call(release_machines, bucket=name, vast=payer, name="named")
    assert back.code == 0, back.output
    assert vast.list_alive() == []
    Bucket.delete(name)


@pytest.mark.soak
def test_a_campaign_that_is_hung_up_gives_back_however_often_it_is_interrupted(
    prefect_api: PrefectServer, vast: VastServer, payer: Any, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    make_text(tmp_path / "text")
    begin(open_store(store.as_uri()), "hung-up/first")
    plan = tmp_path / "campaign.yaml"
    plan.write_text(
        json.dumps(make_plan_settings("hung-up", store.as_uri(), tmp_path / "text", RENTED_WORKERS))
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [Path(sys.executable).parent / "millrace", "campaign", "run", plan, "--yes"],
            env=prefect_api.environment, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=_hear_signals,  # noqa: PLW1509 - it only sets signals
        )  # fmt: skip
    try:
        wait_until(lambda: len(vast.list_alive()) == 2, "two machines")
        vast.fail_next(3, "error500", "delete")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: vast.count_fired()["error500"] > 0, "machines being released")
        for _ in range(500):
            process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
    finally:
        process.kill()
    assert vast.list_alive() == [], (tmp_path / "log").read_text()[-3000:]
    leases = [*store.glob("hung-up/lease/**/*.json"), *store.glob("_rentals/**/lease/**/*.json")]
    assert leases
    assert [one for one in leases if not one.with_suffix(".end").exists()] == []  # none waits


def _hear_signals() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_reaper_whose_blocks_are_missing_fails_as_does_one_that_cannot_read(
    prefect_api: PrefectServer, vast: VastServer, payer: Any, tmp_path: Path
) -> None:
    missing = prefect_api.call(reap_machines, bucket="not-there", vast="not-there")
    assert missing.code == 1
    assert "There is no Millrace Bucket block 'not-there'" in missing.output
    assert vast.list_requests() == []

    wrong = VastCredentials(api_key=SecretStr("not-a-key-of-yours"), server_url=vast.url)
    wrong.save("payer", overwrite=True)
    folder = tmp_path / "store"
    folder.mkdir()
    failed = prefect_api.call(reap_machines, bucket=folder.as_uri(), vast=payer, dry_run=False)
    assert failed.code == 1
    state = prefect_api.read_flow_run(failed.run).state
    assert state is not None
    assert "Vast.ai does not know the API key" in (state.message or "")


@pytest.mark.soak
@pytest.mark.parametrize(("proven", "rented"), [(False, 2), (True, 5)])
def test_a_program_that_has_never_worked_is_tried_twice(
    prefect_api: PrefectServer, vast: VastServer, tmp_path: Path, proven: bool, rented: int
) -> None:
    key = vast.reset(rate=100.0, strict=False, program=100.0, fates={"failing": 1.0})
    settings = RentalSettings(
        name="fleet",
        store=StoreSpec(url=tmp_path.as_uri()),
        account=VastAccount(api_key=SecretStr(key), server_url=vast.url),
        **{**RENT, "timeouts": RentalTimeouts(retry_failed=True, poll_interval=QUICK)},
    )

    @flow
    def attend() -> None:
        with make_supervisor(settings, lambda: proven) as supervisor:
            supervisor.wait_until_ready()
            supervisor.wait_until_done(timedelta(minutes=1))
            supervisor.raise_failure()

    with pytest.raises(MachineError, match="the last words" if not proven else "did not start"):
        attend()
    assert (vast.list_alive(), len(vast.list_machines())) == ([], rented)
    vast.reset()


def test_a_program_that_ended_too_early_runs_again_when_the_campaign_is_started_again(
    prefect_api: PrefectServer, vast: VastServer, tmp_path: Path
) -> None:
    key = vast.reset(rate=100.0, strict=False, program=100.0)
    settings = RentalSettings(
        name="fleet",
        store=StoreSpec(url=tmp_path.as_uri()),
        account=VastAccount(api_key=SecretStr(key), server_url=vast.url),
        **{**RENT, "timeouts": RentalTimeouts(poll_interval=QUICK)},
    )

    @flow
    def attend() -> None:
        with make_supervisor(settings) as supervisor:
            supervisor.wait_until_done(timedelta(minutes=5))
            assert supervisor.is_over
            supervisor.raise_failure()

    for count in (1, 2):
        attend()
        assert (vast.list_alive(), len(vast.list_machines())) == ([], count)
    vast.reset()
