"""The Prefect UI, as a person uses it."""

import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Locator, Page, Response

from tests.prefect_server import PrefectServer, until


def open_run_form(server: PrefectServer, page: Page, name: str) -> None:
    """The form in which a deployment is run. Its list has pages: it is opened by its address."""
    with server.client() as client:
        deployment = client.read_deployment_by_name(f"{name}/{name}")
    page.goto(f"{server.url.removesuffix('/api')}/deployments/deployment/{deployment.id}")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()


def field(page: Page, label: str) -> Locator:
    """One parameter of the form: its label, its description and what one fills in."""
    named = page.locator(".schema-form-property__label", has_text=re.compile(f"^{label}( |$)"))
    return page.locator(".schema-form-property").filter(has=named).last


def told(answer: Response) -> str:
    """A refusal, in words."""
    return f"{answer.request.method} {answer.url}: {answer.status} {answer.text()}"


def press(page: Page, button: str, seen: Callable[[], Any], refused: list[str]) -> None:
    """Press a button; again if the server's SQLite was locked just then, as a person would."""
    for _ in range(3):
        refused.clear()
        page.get_by_role("button", name=button, exact=True).last.click()

        def came() -> bool | None:
            page.wait_for_timeout(50)  # lets the browser's answers come in
            return bool(seen() or refused) or None

        until(came, f"what {button} does")
        if seen():
            return
    raise AssertionError(refused)
