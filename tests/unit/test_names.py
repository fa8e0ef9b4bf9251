"""Names and docstrings of all of the code."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from millrace.testing.process import REPOSITORY

RELATIVE = re.compile(r"(What|That|Of|Who|Whom|Whose|How|Where|Whether|Which|When|Why|If)\b")
ENTRY = re.compile(
    r"^ *(?:\w+: |(?:Returns|Yields):\n +)"
    r"(?:What|That|Of|Who|Whom|Whose|How|Where|Which|When|Why)\b.*",
    re.MULTILINE,
)
SOURCES = (
    "millrace", "tasks", "flows", "blocks", "deployments", "docs", "benchmarks", "examples",
)  # fmt: skip
EVERYTHING = (*SOURCES, "tests")


Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def list_definitions(
    folders: Iterable[str], has: re.Pattern[str]
) -> Iterator[tuple[str, Definition]]:
    """List modules, classes and functions of the code in folders, with their files.

    A file without any match is not parsed, which takes longer than all else.
    """
    for folder in folders:
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            text = file.read_text()
            if has.search(text):
                for definition in iterate_definitions(ast.parse(text)):
                    yield str(file.relative_to(REPOSITORY)), definition


def iterate_definitions(node: ast.AST) -> Iterator[Definition]:
    """Iterate over a node and the statements in it; expressions have no docstrings."""
    if isinstance(node, Definition):
        yield node
    for body in ("body", "orelse", "handlers", "finalbody", "cases"):
        for statement in getattr(node, body, ()):
            yield from iterate_definitions(statement)


def test_each_class_name_is_defined_once():
    files = defaultdict[str, list[str]](list)
    for file, node in list_definitions(SOURCES, re.compile(r"^\s*class ", re.MULTILINE)):
        if isinstance(node, ast.ClassDef):
            files[node.name].append(file)
    assert len(files) > 400
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_no_docstring_begins_with_a_relative_word():
    found = [
        f"{file}: {text.splitlines()[0]}"
        for file, node in list_definitions(EVERYTHING, re.compile(rf'"""[\s\\]*{RELATIVE.pattern}'))
        if (text := ast.get_docstring(node)) and RELATIVE.match(text)
    ]
    assert found == []


def test_no_entry_of_a_docstring_begins_with_a_relative_word():
    """An argument, an attribute or a result is a noun; "Whether" begins that of a boolean."""
    found = [
        f"{file}: {entry.group().strip()}"
        for file, node in list_definitions(EVERYTHING, ENTRY)
        for entry in ENTRY.finditer(ast.get_docstring(node) or "")
    ]
    assert found == []
