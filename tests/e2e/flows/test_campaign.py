"""A campaign, started from the form of its deployment: what is seen of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from playwright.sync_api import Page, expect
from prefect.client.schemas.actions import DeploymentUpdate

from examples.tiny_lm.begin import begin
from millrace.storage import StoreSpec, open_store
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer, Worker
from tests.support.flows.browser import (
    find_field,
    open_artifact,
    open_run_form,
    press,
    read_refusal,
)
from tests.support.flows.campaigns import (
    make_local_workers,
    make_plan_settings,
    make_text,
)
from tests.support.flows.fixtures import MakeBlock

CAMPAIGN = "campaign/campaign"


@pytest.fixture
def prefilled(
    deployed: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock, tmp_path: Path
) -> Iterator[dict[str, Any]]:
    """The deployment, with a plan that its form begins with; its bucket is on a server."""
    make_text(tmp_path / "text")
    spec = StoreSpec(
        url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full)
    )
    begin(open_store(spec), "other/first")
    place = block(bucket, read=rgw.read_only, write=rgw.full)
    plan = make_plan_settings("other", place, tmp_path / "text", make_local_workers())
    with deployed.make_client() as client:
        deployment = client.read_deployment_by_name(CAMPAIGN)
        client.update_deployment(deployment.id, DeploymentUpdate(parameters={"plan": plan}))
        yield plan
        client.update_deployment(deployment.id, DeploymentUpdate(parameters={}))


@pytest.mark.soak
def test_a_campaign_is_started_from_the_form_and_its_summary_is_seen(
    deployed: PrefectServer, worker: Worker, prefilled: dict[str, Any], page: Page,
    rgw: RGW, bucket: str,
) -> None:  # fmt: skip
    posted: list[dict[str, Any]] = []
    runs: list[UUID] = []
    refused: list[str] = []

    def answered(answer: Any) -> None:
        if answer.request.method == "POST" and answer.url.endswith("/create_flow_run"):
            posted.append(json.loads(answer.request.post_data or "{}"))
            if answer.status >= 400:
                refused.append(read_refusal(answer))
            else:
                runs.append(UUID(answer.json()["id"]))

    page.on("response", answered)
    open_run_form(deployed, page, "campaign")
    name = find_field(page, "Name")
    expect(name).to_contain_text("a prefix below the bucket's URL")
    expect(find_field(page, "Epochs")).to_contain_text("Each epoch ends with a checkpoint")
    name.get_by_role("textbox").fill("typed")

    press(page, "Submit", lambda: runs, refused)
    assert {one["parameters"]["plan"]["name"] for one in posted} == {"typed"}
    state = deployed.wait(runs[0], "Completed", "Failed").state
    assert state is not None
    assert state.name == "Completed", state.message
    run = deployed.read_flow_run(runs[0])
    assert (run.name, set(run.tags) >= {"millrace", "training"}) == ("campaign-typed", True)
    open_artifact(deployed, page, runs[0], "Result of the campaign so far")
    expect(page.get_by_text("windows trained, the loss from")).to_be_visible()
    keys = {
        one["Key"] for one in rgw.make_client(rgw.full).list_objects_v2(Bucket=bucket)["Contents"]
    }
    assert "other/final/checkpoints/step_000000012/metadata.json" in keys
    secrets = {rgw.full.secret_access_key, rgw.read_only.secret_access_key}
    leaked = [
        table for table, text in deployed.read_tables() if any(one in text for one in secrets)
    ]
    assert leaked == []  # neither in a parameter of a stage, nor in what a worker printed
