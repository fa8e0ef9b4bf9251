"""The Prefect UI, as a person uses it."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from playwright.sync_api import Locator, Page, Response, expect, sync_playwright
from playwright.sync_api import TimeoutError as Timeout

from tests.prefect_server import PrefectServer, wait_until

CHROMIUM = "/usr/bin/chromium"
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE = 60_000  # milliseconds


@pytest.fixture
def page() -> Iterator[Page]:
    """A window of Chromium."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": 1400, "height": 3000})
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        yield page
        browser.close()


def open_run_form(server: PrefectServer, page: Page, name: str) -> None:
    """Open the form in which a deployment is run, as a person does: from the deployment's page.

    The list of deployments has pages, so the deployment is opened by its address.
    """
    page.goto(_address(server, name))
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()


def open_form(server: PrefectServer, page: Page, name: str) -> None:
    """Open the same form by its address."""
    page.goto(f"{_address(server, name)}/run")


def open_run(server: PrefectServer, page: Page, run: UUID, button: Locator, seen: Locator) -> None:
    """Open the page of a run and press a button, until the page shows what is behind it.

    The page asks once, and shows nothing of what the server, its SQLite locked, could not read.
    """
    failed: list[str] = []

    def note(answer: Response) -> None:
        if answer.status >= 400:
            failed.append(f"{answer.status} {answer.url}")

    page.on("response", note)
    page.on("requestfailed", lambda request: failed.append(f"{request.url}: {request.failure}"))
    for _ in range(3):
        page.goto(f"{server.url.removesuffix('/api')}/runs/flow-run/{run}")
        try:
            button.click(timeout=PATIENCE / 2)
            seen.wait_for(timeout=PATIENCE / 2)
        except Timeout:
            continue
        return
    raise AssertionError((page.locator("body").inner_text(), failed))


def open_artifact(server: PrefectServer, page: Page, run: UUID, title: str) -> None:
    """Open an artifact of a run, from the page of the run."""
    artifact = page.locator("a", has_text=title).first
    open_run(server, page, run, page.get_by_text("Artifacts", exact=True), artifact)
    artifact.click()


def _address(server: PrefectServer, name: str) -> str:
    with server.make_client() as client:
        deployment = client.read_deployment_by_name(f"{name}/{name}")
    return f"{server.url.removesuffix('/api')}/deployments/deployment/{deployment.id}"


def find_field(page: Page, label: str) -> Locator:
    """One parameter of the form: its label, its description and what one fills in."""
    words = re.compile(rf"^\s*{label}\s*(\(Optional\))?\s*$")
    named = page.locator(".schema-form-property__label", has_text=words)
    return page.locator(".schema-form-property").filter(has=named).last


def choose(page: Page, label: str, option: str) -> None:
    """Choose an option of a menu of the form, beside those chosen before if it takes several."""
    find_field(page, label).locator(".p-select-button__control").focus()
    page.keyboard.press("ArrowDown")  # opens the menu
    page.get_by_role("option", name=option, exact=True).click()
    page.keyboard.press("Escape")
    expect(find_field(page, label)).to_contain_text(option)


def read_refusal(answer: Response) -> str:
    """A refusal, in words."""
    return f"{answer.request.method} {answer.url}: {answer.status} {answer.text()}"


def press(page: Page, button: str, seen: Callable[[], Any], refused: list[str]) -> None:
    """Press a button; again if the server's SQLite was locked just then, as a person would."""
    for _ in range(30):
        refused.clear()
        page.get_by_role("button", name=button, exact=True).last.click()

        def came() -> bool | None:
            page.wait_for_timeout(50)  # lets the browser's answers come in
            return bool(seen() or refused) or None

        wait_until(came, f"what {button} does")
        if seen() or not all(": 503 " in one for one in refused):
            break
        page.wait_for_timeout(1000)
    if not seen():
        raise AssertionError(refused)
