"""Every command that a message or a page names exists, with its options."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from millrace.cli import main

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("deployments/*.md")]
MODULES = [
    path
    for folder in ("millrace", "blocks", "tasks", "flows")
    for path in ROOT.glob(f"{folder}/**/*.py")
]


def list_texts(path: Path) -> Iterator[str]:
    """Yield the text of a page, or the texts of a module; a filled-in value becomes ``VALUE``."""
    if path.suffix == ".md":
        yield path.read_text()
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else "VALUE" for one in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def find_fault(line: str) -> str:
    """Return the first word of a command line that does not exist; empty if all exist."""
    command: click.Command = main
    context = click.Context(main, **main.context_settings)
    for word in line.split():
        if word.startswith("--"):
            options = {name for one in command.get_params(context) for name in one.opts}
            if word.partition("=")[0] not in {*options, "--help", "--version"}:
                return word
        elif isinstance(command, click.Group) and re.fullmatch(r"[a-z][a-z-]*", word):
            found = command.get_command(context, word)
            if found is None:
                return word
            command = found
            context = click.Context(command, parent=context, **command.context_settings)
    return ""


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_a_text_advises_exists(path: Path) -> None:
    lines = [
        " ".join(line.split())
        for text in list_texts(path)
        for line in re.findall(r"`millrace ([^`&]+)", text)
    ]
    assert {line: fault for line in lines if (fault := find_fault(line))} == {}


def test_a_command_or_an_option_that_does_not_exist_is_found() -> None:
    assert find_fault("verify FILE --repair") == "--repair"
    assert find_fault("dataset repair FILE") == "repair"
    assert find_fault("run FILE --repair") == ""
