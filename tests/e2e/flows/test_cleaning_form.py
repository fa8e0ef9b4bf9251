"""Cleaning and wiping as a person does it, in a browser."""

import contextlib
import json
import secrets
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from playwright.sync_api import Page, Response, expect

from blocks import Bucket, BucketRole
from millrace.storage import Store, StoreSpec, list_objects, open_store
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer, Worker
from tests.support.cleanup.material import BucketBuilder
from tests.support.flows.browser import (
    find_field,
    open_artifact,
    open_run,
    open_run_form,
    press,
    read_refusal,
)
from tests.support.flows.fixtures import MakeBlock, make_aws_credentials


@pytest.fixture
def store(rgw: RGW, bucket: str) -> Store:
    spec = StoreSpec(
        url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full)
    )
    return open_store(spec)


@pytest.fixture
def given(rgw: RGW, bucket: str, block: MakeBlock) -> Iterator[str]:
    """The name of a block, and a block `aggregator`: the deployment has it beside that.

    Made before there is a page: where one is, Prefect's own calls wait for its event loop.
    """
    with contextlib.suppress(ValueError):
        Bucket.delete("aggregator")  # `save` would keep what it does not name
    name = rgw.create_bucket(f"bucket-{secrets.token_hex(6)}")
    pair = make_aws_credentials(rgw.full, rgw.endpoint)
    pair.save("aggregator-read", overwrite=True)
    Bucket(role=BucketRole.AGGREGATOR, url=f"s3://{name}", read_credentials=pair).save(
        "aggregator", overwrite=True
    )
    yield block(bucket, write=rgw.full)["$ref"]["block_document_slug"].partition("/")[2]
    Bucket.delete("aggregator")


def keys_of(store: Store) -> set[str]:
    return {stat.key for stat in list_objects(store) if not stat.key.startswith("_clean/")}


class Started:
    """Requests of the browser alone to the server, and their answers.

    A page asks for much else meanwhile; only these answers say whether a button did its work.
    """

    def __init__(self, page: Page) -> None:
        self.parameters: list[dict[str, Any]] = []
        """Return the parameters of the created runs, as the browser posted them."""
        self.runs: list[UUID] = []
        self.refused: list[str] = []
        self.resumed: list[str] = []
        page.on("response", self._answered)

    def _answered(self, answer: Response) -> None:
        creates = answer.url.endswith("/create_flow_run")
        if answer.request.method != "POST" or not (creates or answer.url.endswith("/resume")):
            return
        if answer.status >= 400:
            self.refused.append(read_refusal(answer))
        elif creates:
            self.parameters.append(json.loads(answer.request.post_data or "{}")["parameters"])
            self.runs.append(UUID(answer.json()["id"]))
        else:
            self.resumed.append(answer.url)


def open_form(server: PrefectServer, page: Page, name: str) -> Started:
    """The form of a deployment."""
    started = Started(page)
    open_run_form(server, page, name)
    return started


@pytest.mark.soak
def test_a_dry_run_is_started_from_the_form_and_its_plan_is_seen(
    deployed: PrefectServer, worker: Worker, store: Store, given: str, page: Page
) -> None:
    keys = {BucketBuilder(store).put_gradient("run", "w1", window, "0.2.1") for window in range(3)}
    started = open_form(deployed, page, "clean-bucket")
    expect(find_field(page, "Dry run")).to_contain_text("Only show what would be deleted")
    expect(find_field(page, "Kinds")).to_contain_text("links and updates of an aggregator")
    find_field(page, "Bucket").get_by_role("textbox").fill(given)
    find_field(page, "Older than").get_by_role("textbox").fill("0h")
    press(page, "Submit", lambda: started.runs, started.refused)

    assert [parameters["dry_run"] for parameters in started.parameters] == [True]
    (run,) = started.runs
    state = deployed.wait(run, "Completed", "Failed").state
    assert state is not None
    assert state.name == "Completed", state.message
    open_artifact(deployed, page, run, "Objects that would be deleted")
    expect(page.get_by_text("would delete 3 objects, 24 bytes")).to_be_visible()
    for key in keys:
        expect(page.get_by_text(key, exact=True)).to_be_visible()
    assert keys_of(store) == keys


@pytest.mark.soak
def test_a_bucket_is_wiped_once_its_name_was_typed(
    deployed: PrefectServer, worker: Worker, store: Store, bucket: str, given: str, page: Page
) -> None:
    BucketBuilder(store).put_gradient("run", "w1", 1, "0.2.1")
    started = open_form(deployed, page, "wipe-bucket")
    find_field(page, "Bucket").get_by_role("button", name="Name or URL", exact=True).click()
    find_field(page, "Bucket").get_by_role("textbox").fill(given)
    find_field(page, "Dry run").locator("input[type=checkbox]").locator("..").click()
    press(page, "Submit", lambda: started.runs, started.refused)

    assert [parameters["dry_run"] for parameters in started.parameters] == [False]
    (run,) = started.runs
    deployed.wait(run, "Paused")
    resume = page.get_by_role("button", name="Resume")
    warning = page.get_by_text(f"All 1 object of s3://{bucket}, 8 bytes, will be deleted")
    open_run(deployed, page, run, resume, warning)
    assert keys_of(store)
    find_field(page, "Bucket name").get_by_role("textbox").fill(bucket)
    press(page, "Submit", lambda: started.resumed, started.refused)

    state = deployed.wait(run, "Completed", "Failed").state
    assert state is not None
    assert state.name == "Completed", state.message
    page.reload()  # it asks for the state now and then only
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
    assert not list(list_objects(store))
