"""The form that the Prefect UI draws of the flow, in a browser."""

from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

from playwright.sync_api import Page, expect
from prefect.client.schemas.sorting import FlowRunSort

from tests.oracle import Folder
from tests.prefect_server import PrefectServer, Worker, until
from tests.support.flows.browser import field, open_run_form, told
from tests.support.flows.fixtures import jsonl, texts, texts_in


def test_a_run_is_started_from_the_form(
    deployed: PrefectServer, worker: Worker, page: Page, tmp_path: Path,
    folder_source: dict[str, Any],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    refused: list[str] = []
    page.on("response", lambda answer: answer.status >= 400 and refused.append(told(answer)))
    open_run_form(deployed, page, "shard-dataset")

    described = field(page, "destination")
    expect(described).to_contain_text("A Millrace Bucket block with write credentials")
    expect(described.get_by_role("button", name="Add")).to_be_visible()  # a picker of blocks
    expect(field(page, "Kind")).to_contain_text("a sample of each line")

    field(page, "dataset").get_by_role("textbox").fill("words")
    for label, url in (("URL", folder_source["url"]), ("destination", out.as_uri())):
        field(page, label).get_by_role("button", name="str", exact=True).click()
        field(page, label).get_by_role("textbox").fill(url)
        expect(field(page, label).get_by_role("textbox")).to_have_value(url)
    expect(field(page, "dataset").get_by_role("textbox")).to_have_value("words")

    def sent() -> UUID | bool | None:
        page.wait_for_timeout(50)  # lets the browser's answers come in
        return started(deployed, out.as_uri()) or bool(refused) or None

    run: UUID | bool = False
    answers: list[str] = []
    while not isinstance(run, UUID) and len(answers) < 3:
        # Prefect's server answers 503 while its SQLite is locked; a person clicks again.
        refused.clear()
        page.get_by_role("button", name="Submit").click()
        run = until(sent, "the run that the form started")
        answers += refused
    assert isinstance(run, UUID), answers
    state = deployed.wait(run, "Completed", "Failed").state
    assert state is not None
    assert state.name == "Completed", state.message
    rows = jsonl(texts()).decode().splitlines()
    assert texts_in(Folder(out)) == Counter(rows)


def started(server: PrefectServer, destination: str) -> UUID | None:
    """The run that writes to a destination."""
    with server.client() as client:
        runs = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC)
    return next((r.id for r in runs if r.parameters.get("destination") == destination), None)
