"""The form that the Prefect UI draws of the flow, in a browser."""

from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from playwright.sync_api import Page, expect
from prefect.client.schemas.sorting import FlowRunSort

from millrace.testing.process import REPOSITORY
from tests.oracle import Folder
from tests.prefect_server import PrefectServer, Worker
from tests.support.flows.browser import find_field, open_form, open_run_form, press, read_refusal
from tests.support.flows.fixtures import make_jsonl, make_texts, read_texts

DEPLOYMENTS = REPOSITORY / "prefect.yaml"
WIDTH, MAX_HEIGHT = 1300, 2400  # pixels of the window, and of a form at first


@pytest.mark.soak
def test_a_run_is_started_from_the_form(
    deployed: PrefectServer, worker: Worker, page: Page, tmp_path: Path,
    folder_source: dict[str, Any],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    refused: list[str] = []
    page.on(
        "response", lambda answer: answer.status >= 400 and refused.append(read_refusal(answer))
    )
    open_run_form(deployed, page, "shard-dataset")

    described = find_field(page, "Destination")
    expect(described).to_contain_text("A Millrace Bucket block with write credentials")
    expect(described.get_by_role("button", name="Add")).to_be_visible()  # a picker of blocks
    expect(find_field(page, "Kind")).to_contain_text("a sample of each line")

    find_field(page, "Dataset").get_by_role("textbox").fill("words")
    for label, kind, url in (
        ("URL", "Text", folder_source["url"]),
        ("Destination", "Name or URL", out.as_uri()),
    ):
        find_field(page, label).get_by_role("button", name=kind, exact=True).click()
        find_field(page, label).get_by_role("textbox").fill(url)
        expect(find_field(page, label).get_by_role("textbox")).to_have_value(url)
    expect(find_field(page, "Dataset").get_by_role("textbox")).to_have_value("words")

    press(page, "Submit", lambda: started(deployed, out.as_uri()), refused)
    run = started(deployed, out.as_uri())
    assert run is not None
    state = deployed.wait(run, "Completed", "Failed").state
    assert state is not None
    assert state.name == "Completed", state.message
    rows = make_jsonl(make_texts()).decode().splitlines()
    assert read_texts(Folder(out)) == Counter(rows)


@pytest.mark.soak
def test_every_form_fits_into_a_few_screens(deployed: PrefectServer, page: Page) -> None:
    page.set_viewport_size({"width": WIDTH, "height": 900})
    names = [one["name"] for one in yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]]
    heights: dict[str, int] = {}
    for name in names:
        open_form(deployed, page, name)
        expect(page.locator(".schema-form-property").first).to_be_visible()
        expect(page.get_by_role("button", name="Submit")).to_be_attached()
        heights[name] = page.locator("form").evaluate("form => form.scrollHeight")
    assert len(heights) == len(names)
    assert {name: height for name, height in heights.items() if height > MAX_HEIGHT} == {}


def started(server: PrefectServer, destination: str) -> UUID | None:
    """The run that writes to a destination."""
    with server.make_client() as client:
        runs = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC)
    return next((r.id for r in runs if r.parameters.get("destination") == destination), None)
