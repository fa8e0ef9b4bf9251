"""The Prefect UI, as a person uses it."""

import re

from playwright.sync_api import Locator, Page, Response


def field(page: Page, label: str) -> Locator:
    """One parameter of the form: its label, its description and what one fills in."""
    named = page.locator(".schema-form-property__label", has_text=re.compile(f"^{label}( |$)"))
    return page.locator(".schema-form-property").filter(has=named).last


def told(answer: Response) -> str:
    """A refusal, in words."""
    return f"{answer.request.method} {answer.url}: {answer.status} {answer.text()}"
