"""The flow shard-dataset on rented machines."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from blocks import VastCredentials
from flows.campaign import run_campaign
from flows.reap_machines import reap_machines
from flows.shard_dataset import find_sharding_rental, shard_dataset
from millrace.testing.vast import VastServer
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import RUN, SHARDING, make_jsonl, make_texts


def make_parameters(folder: Path, payer: Any, repo_url: str) -> dict[str, Any]:
    """Return the parameters of a run with a source below its destination."""
    raw = folder / "store/raw"
    raw.mkdir(parents=True)
    (raw / "rows.jsonl").write_bytes(make_jsonl(make_texts(2000)))
    return {
        "dataset": "words",
        "source": {"url": raw.as_uri(), "columns": {"txt": "text"}},
        "destination": (folder / "store").as_uri(),
        "sharding": SHARDING,
        "execution": RUN,
        "machines": {
            "request": {"max_hourly": 2.0, "max_total": 10.0},
            "repo_url": repo_url,
            "vast": payer,
            "timeouts": {"poll_interval": "PT1S"},
        },
    }


def read_shards(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.glob("words/shards/**/*.tar")}


def read_message(server: PrefectServer, run: Any) -> str:
    state = server.read_flow_run(run).state
    assert state is not None
    return state.message or ""


def test_a_dataset_is_sharded_on_rented_machines_as_on_the_workers_own(
    prefect_api: PrefectServer, vast: VastServer, payer: Any, repository: Path, tmp_path: Path
) -> None:
    parameters = make_parameters(tmp_path, payer, repository.as_uri())
    key = vast.reset(real=True, rate=1.0, strict=False, image=sysconfig.get_path("purelib"))
    VastCredentials(api_key=SecretStr(key), server_url=vast.url).save("payer", overwrite=True)
    done = prefect_api.call(shard_dataset, **parameters)
    assert done.code == 0, done.output
    (machine,) = vast.list_machines()
    assert machine["by"] == "the account"
    artifacts = prefect_api.read_artifacts(done.run)
    report = artifacts["shards-words"]
    assert "**words** is complete: 2,000 samples in " in report
    assert "The rented machines have cost $" in report
    assert "| Cost of rented machines | $" in report
    assert artifacts["progress-words"] == 100
    assert "progress-machines-shard-words" in artifacts
    log = prefect_api.read_logs(done.run)
    assert "shard/words/0: its program runs" in log
    assert "shard/words/0: released, the program ended with exit code 0" in log
    assert "partitions ended" in log
    assert key not in log

    here = {name: value for name, value in parameters.items() if name != "machines"}
    local = prefect_api.call(shard_dataset, **here | {"destination": (tmp_path / "own").as_uri()})
    assert local.code == 0, local.output
    assert read_shards(tmp_path / "store") == read_shards(tmp_path / "own")

    again = prefect_api.call(shard_dataset, **parameters)
    assert again.code == 0, again.output
    assert len(vast.list_machines()) == 1  # a complete dataset needs no machine
    report = prefect_api.read_artifacts(again.run)["shards-words"]
    assert "All shards were there before this run." in report


@pytest.mark.soak
def test_a_campaign_shards_on_rented_machines_and_reports_their_cost(
    prefect_api: PrefectServer, vast: VastServer, payer: Any, repository: Path, tmp_path: Path
) -> None:
    parameters = make_parameters(tmp_path, payer, repository.as_uri())
    key = vast.reset(real=True, rate=1.0, strict=False, image=sysconfig.get_path("purelib"))
    VastCredentials(api_key=SecretStr(key), server_url=vast.url).save("payer", overwrite=True)
    names = ("dataset", "source", "sharding", "execution", "machines")
    data = {name: parameters[name] for name in names}
    plan = {"name": "small", "bucket": parameters["destination"], "data": data}
    done = prefect_api.call(run_campaign, plan=plan)
    assert done.code == 0, done.output
    (machine,) = vast.list_machines()
    assert machine["by"] == "the account"
    assert vast.list_alive() == []
    artifacts = prefect_api.read_artifacts(done.run)
    (report,) = [text for text in artifacts.values() if "| Machines |" in str(text)]
    assert "| Machines | 1 rented, $" in report
    assert "| Dataset | 2,000 samples in " in report


@pytest.mark.soak
def test_a_run_that_fails_gives_the_machines_back_and_says_why(
    prefect_api: PrefectServer, vast: VastServer, payer: Any, tmp_path: Path
) -> None:
    parameters = make_parameters(tmp_path, payer, "https://example.org/x")
    poor = {**parameters["machines"], "request": {"max_hourly": 2.0, "max_total": 0.03}}
    spent = prefect_api.call(shard_dataset, **parameters | {"machines": poor})
    assert spent.code == 1
    assert "Raise max_total or max_lifetime, and start again." in read_message(
        prefect_api, spent.run
    )
    machines = vast.list_machines()
    assert [one["by"] for one in machines] == ["the account"] * len(machines)
    assert machines

    key = vast.reset(rate=100.0, strict=False, program=100.0, fates={"failing": 1.0})
    VastCredentials(api_key=SecretStr(key), server_url=vast.url).save("payer", overwrite=True)
    # Another ledger: the account numbers its machines anew.
    parameters = make_parameters(tmp_path / "second", payer, "https://example.org/x")
    failed = prefect_api.call(shard_dataset, **parameters)
    assert failed.code == 1
    assert "the last words" in read_message(prefect_api, failed.run)
    assert (vast.list_alive(), len(vast.list_machines())) == ([], 1)
    reaped = prefect_api.call(
        reap_machines, bucket=parameters["destination"], vast=payer, dry_run=False
    )
    assert "0 machines released, 0 stay." in prefect_api.read_artifacts(reaped.run)["reaper"]


def test_a_run_that_cannot_rent_is_refused_with_a_sentence(
    prefect_api: PrefectServer, vast: VastServer, payer: Any, tmp_path: Path
) -> None:
    parameters = make_parameters(tmp_path, payer, "https://example.org/x")
    mended = prefect_api.call(shard_dataset, **parameters, repair=True)
    assert "shard with `machines` first" in read_message(prefect_api, mended.run)
    missing = parameters["machines"] | {"vast": "not-there"}
    unpaid = prefect_api.call(shard_dataset, **parameters | {"machines": missing})
    assert "There is no Vast.ai Credentials block not-there" in read_message(
        prefect_api, unpaid.run
    )
    wrong = VastCredentials(api_key=SecretStr("not-a-key-of-yours"), server_url=vast.url)
    wrong.save("payer", overwrite=True)
    denied = prefect_api.call(shard_dataset, **parameters)
    message = read_message(prefect_api, denied.run)
    assert "Vast.ai does not know the API key" in message
    assert "not-a-key-of-yours" not in message
    assert vast.list_machines() == []


@pytest.mark.parametrize("machines", [None, "given"])
def test_the_rental_of_a_run_is_found_by_its_parameters(
    machines: str | None, payer: Any, tmp_path: Path
) -> None:
    parameters = make_parameters(tmp_path, "payer", "https://example.org/x")
    if machines is None:
        del parameters["machines"]
    found = find_sharding_rental(shard_dataset.validate_parameters(parameters))
    expected = ("shard/words", parameters["destination"], "payer")
    assert found == (expected if machines else None)
