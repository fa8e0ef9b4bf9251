"""Names in the pages of `docs/design`, held against the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from millrace.testing.process import REPOSITORY

PAGES = sorted((REPOSITORY / "docs/design").glob("*.md"))
ENTRANCE = REPOSITORY / "docs/architecture.md"
LINES = 80
FOREIGN = {"DTensor", "Retry-After", "Last-Modified"}  # names of torch and of HTTP
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

CLASS = re.compile(r"([A-Z][a-z0-9]\w*)(\.[a-z_]+)?")
DOTTED = re.compile(r"millrace(\.[a-z_]+)+(\.[A-Z]\w*)?")
SOURCE_PATH = re.compile(r"(millrace|flows|tasks|blocks|tests)/[\w/.]*")
MODULE = re.compile(r"[a-z_]+\.py")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


@cache
def read_definitions() -> dict[str, set[str]]:
    """Return the names that the engine defines, with those within classes and outer functions."""
    found: dict[str, set[str]] = {}
    for file in (REPOSITORY / "millrace").rglob("*.py"):
        if file.is_relative_to(REPOSITORY / "millrace/testing"):
            continue
        module = ast.parse(file.read_text())
        outer = set(module.body)
        for node in ast.walk(module):
            if not isinstance(node, DEFINITIONS):
                continue
            inside = found.setdefault(node.name, set())
            if not isinstance(node, ast.ClassDef) and node not in outer:
                continue
            for one in ast.walk(node):
                if isinstance(one, ast.Name):
                    inside.add(one.id)
                elif isinstance(one, DEFINITIONS):
                    inside.add(one.name)
    return found


def is_module_or_name(dotted: str, definitions: dict[str, set[str]]) -> bool:
    """Decide whether a module has this dotted name, or has a definition with it."""
    path = REPOSITORY / dotted.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    last = dotted.rpartition(".")[2]
    owner = path.parent
    return last in definitions and (owner.is_dir() or owner.with_suffix(".py").is_file())


def list_unknown(text: str, definitions: dict[str, set[str]]) -> list[str]:
    """Return the names in backticks that the code does not have."""
    modules = {file.name for file in (REPOSITORY / "millrace").rglob("*.py")}
    life = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("```"))
    unknown: list[str] = []
    for name in re.findall(r"`([^`\n]+)`", life):
        if name in FOREIGN:
            continue
        if match := CLASS.fullmatch(name):
            inside = definitions.get(match[1])
            good = inside is not None and (match[2] is None or match[2][1:] in inside)
        elif DOTTED.fullmatch(name):
            good = is_module_or_name(name, definitions)
        elif SOURCE_PATH.fullmatch(name):
            good = (REPOSITORY / name).exists()
        elif MODULE.fullmatch(name):
            good = name in modules
        else:
            continue
        if not good:
            unknown.append(name)
    return unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_only_modules_and_classes_that_exist(page: Path):
    assert list_unknown(page.read_text(), read_definitions()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_functions_in_the_life_of_a_page_exist(page: Path):
    definitions = read_definitions()
    life = [line for line in page.read_text().splitlines() if re.match(r"\d\. |   \S", line)]
    called = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", "\n".join(life))
    attributes = set().union(*definitions.values())
    assert [name for name in called if name not in definitions and name not in attributes] == []


def test_a_name_that_the_code_lacks_is_found():
    text = "`SwarmOracle`, `millrace.swarm.oracle`, `millrace/swarm/oracle.py`, `oracle.py`"
    assert len(list_unknown(text, read_definitions())) == 4
    assert list_unknown("`Tracker`, `millrace.swarm.tracker`", read_definitions()) == []


def test_each_page_is_short_and_is_linked_from_the_entrance():
    linked = set(LINK.findall(ENTRANCE.read_text()))
    assert len(PAGES) >= 9
    for page in PAGES:
        assert page.read_text().count("\n") <= LINES, page
        assert f"design/{page.name}" in linked


@pytest.mark.parametrize("page", [ENTRANCE, *PAGES], ids=lambda page: page.stem)
def test_the_links_of_a_page_lead_to_files(page: Path):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (page.parent / link).is_file()] == []
