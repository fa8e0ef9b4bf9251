"""Checks of a campaign before it makes anything, its failures, and the stages of one that ends."""

import re
import shutil
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from pydantic import ValidationError

from examples.tiny_lm.begin import begin
from flows.campaign import run_campaign
from flows.campaign_plan import CampaignPlan
from millrace.campaigns import commit_training, hold_campaign_lease
from millrace.checkpoints import Saver
from millrace.errors import ConflictError, MillraceError, WorkerError
from millrace.keys.gradients import GradientKeys
from millrace.storage import StoreSpec, exists, open_store, put
from tests.prefect_server import PrefectServer
from tests.support.flows.campaigns import (
    EPOCHS,
    STEPS,
    WINDOWS,
    WORKERS,
    find_faults,
    make_local_workers,
    make_plan_settings,
    make_text,
)


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_done(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    plan = make_plan_settings("small", store.as_uri(), tmp_path, make_local_workers())
    del plan["data"]
    done = prefect_api.call(run_campaign, plan=plan)
    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert "name the dataset that is trained on" in (state.message or "")
    assert not store.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"initial_weights": {"job": "small/none"}}, "has no undamaged checkpoint"),
        ({"initial_weights": {"job": "small/first", "tensors": "modle."}}, "begin with 'modle.'"),
        ({"command": ["python", "-m", "examples.tiny_lm.trian"]}, "no module"),
        ({"workers": 3}, r"training\.workers was 2, and is 3 now"),
        ({"workers": 1}, "more gradients than there are workers"),
        ({"aggregation": {"ray": "127.0.0.1:1"}}, r"no Ray cluster at 127\.0\.0\.1:1"),
    ],
)
def test_what_can_be_known_is_checked_before_anything_is_made(
    prefect_api: PrefectServer, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    store = tmp_path / "store"
    begin(open_store(store.as_uri()), "small/first")
    plan = make_plan_settings("small", store.as_uri(), tmp_path / "text", make_local_workers())
    begun = CampaignPlan.model_validate(plan).make_campaign().training
    assert begun is not None
    if "initial_weights" not in change:  # other weights would be another plan
        commit_training(begun)
    make_text(tmp_path / "text")
    with pytest.raises((MillraceError, ValidationError), match=said):
        run_campaign(CampaignPlan.model_validate(plan | {"training": plan["training"] | change}))
    assert not (store / "small-text").exists()


def test_a_destination_with_other_weights_is_refused_before_anything_is_made(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    begin(open_store(store.as_uri()), "small/first")
    with Saver(open_store(store.as_uri()), "small/final") as saver:
        saver.save({"weight": torch.zeros(2)}, step=EPOCHS * WINDOWS * STEPS)
    plan = make_plan_settings("small", store.as_uri(), tmp_path / "text", make_local_workers())
    make_text(tmp_path / "text")
    with pytest.raises(ConflictError, match="name another `job` in `publish`"):
        run_campaign(CampaignPlan.model_validate(plan))
    assert not (store / "small-text").exists()


def test_a_script_that_fails_at_once_costs_no_window(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    make_text(tmp_path / "text")
    begin(open_store(store.as_uri()), "small/first")
    plan = make_plan_settings("small", store.as_uri(), tmp_path / "text", make_local_workers())
    fails = "import sys; print('the last line'); sys.exit(3)"
    plan["training"] |= {"command": ["python", "-c", fails], "restarts": 0}
    plan["training"]["run"]["window_length"] = "PT1S"
    with pytest.raises(WorkerError, match=r"(?s)All workers have failed: .*3.*\nthe last line"):
        run_campaign(CampaignPlan.model_validate(plan))
    chain = [path.name for path in (store / "small/run/gathers/1").rglob("0*.json")]
    assert chain == ["000000000.json"]  # no window was opened


def test_a_start_of_a_running_campaign_leaves_the_report_of_the_campaign(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    source = {"url": tmp_path.as_uri(), "columns": {"txt": "text"}}
    plan = {"name": "small", "bucket": url, "data": {"dataset": "words", "source": source}}
    with hold_campaign_lease(StoreSpec(url=url), "small"):
        done = prefect_api.call(run_campaign, plan=plan)
    assert done.code == 1
    assert "The campaign small is led by process" in done.output
    assert "campaign-small" not in prefect_api.read_artifacts(done.run)


def test_a_campaign_cleans_no_other_run_of_its_bucket(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    store = open_store((tmp_path / "store").as_uri())
    own, other = (
        GradientKeys(run, "1").make_gradient_key("worker-0", 1) for run in ("small/run", "big")
    )
    for key in (own, other):
        put(store, key, b"gradient")
    rule = {"kinds": ["gradients"], "older_than": "0h"}
    plan = {"name": "small", "bucket": store.url, "cleaning_rules": [rule]}
    assert run_campaign(CampaignPlan.model_validate(plan)).deleted_objects == 1
    assert (exists(store, own), exists(store, other)) == (False, True)


def stages(server: PrefectServer, run: UUID) -> list[tuple[str, str | None]]:
    """The runs that a campaign has started, in order, and what they came to."""
    wanted = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    with server.make_client() as client:
        found = client.read_flow_runs(flow_run_filter=wanted)
    found.sort(key=lambda one: one.start_time or one.created)
    return [(one.name, one.state_name) for one in found]


@pytest.mark.soak
def test_a_campaign_calls_its_stages_and_the_next_run_finds_all_of_it_done(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    text = make_text(tmp_path / "text")
    begin(open_store(store.as_uri()), "small/first")
    plan = make_plan_settings("small", store.as_uri(), tmp_path / "text", make_local_workers())

    done = prefect_api.call(run_campaign, plan=plan)

    assert done.code == 0, done.output
    assert find_faults(store, "small", text) == []
    made = stages(prefect_api, done.run)
    assert {state for _, state in made} == {"Completed"}
    assert [name for name, _ in made][:-1] == [
        "shard-small-text",
        "aggregate-small/run", "cooldown-small/model-0",
        "aggregate-small/run", "cooldown-small/model-1",
        "save-small/final",
    ]  # fmt: skip
    report = prefect_api.read_artifacts(done.run)["campaign-small"]
    assert f"{EPOCHS * WINDOWS} windows trained, the loss from 5." in report
    assert f"| Gradients | {EPOCHS * WINDOWS * WORKERS}: " in report
    assert "epoch 0: step 6, epoch 1: step 12" in report
    assert f"| Weights | step 12 of `small/final` in `{store.as_uri()}` |" in report
    assert "![the loss over the windows](data:image/svg+xml" in report
    for name, _ in made[:-1]:
        assert re.search(rf"\| \[{re.escape(name)}\]\(http://127.0.0.1:\d+/runs/flow-run/[-0-9a-f]+\)"
                         r" \| Completed \| ", report)  # fmt: skip

    again = prefect_api.call(run_campaign, plan=plan)  # finds all of it done
    assert again.code == 0, again.output
    assert find_faults(store, "small", text) == []
    assert not [name for name, _ in stages(prefect_api, again.run) if name.startswith("aggregate")]

    # As if the aggregator had been killed between its last link and its last checkpoint.
    shutil.rmtree(store / "small/final")
    shutil.rmtree(store / "small/run/gathers/1/checkpoints/step_000000012")
    published = prefect_api.call(run_campaign, plan=plan)
    assert published.code == 0, published.output
    assert find_faults(store, "small", text) == []

    # What a stage that is over has read is needed no more: its source, and the workers' script.
    shutil.rmtree(store / "small/final")
    shutil.rmtree(tmp_path / "text")
    machines = make_local_workers() | {"folder": str(tmp_path / "gone")}
    training = plan["training"] | {"machines": machines, "aggregation": {"ray": "127.0.0.1:1"}}
    published = prefect_api.call(run_campaign, plan=plan | {"training": training})
    assert published.code == 0, published.output
    assert find_faults(store, "small", text) == []
