"""Names and docstrings of all of the code."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from millrace.testing.process import REPOSITORY

RELATIVE = re.compile(r"(What|That|Of|Who|Whom|Whose|How|Where|Whether|Which|When|Why|If)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


SHIPPED = ("millrace", "tasks", "flows", "blocks", "deployments")
EVERYTHING = (*SHIPPED, "docs", "tests", "benchmarks", "examples")


def nodes(folders: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of the code in these folders, with its file."""
    for top in folders:
        for file in sorted((REPOSITORY / top).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                yield str(file.relative_to(REPOSITORY)), node


def test_each_class_name_is_defined_once():
    files = defaultdict[str, list[str]](list)
    for file, node in nodes(SHIPPED):
        if isinstance(node, ast.ClassDef):
            files[node.name].append(file)
    assert len(files) > 400
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_no_docstring_begins_with_a_relative_word():
    found = [
        f"{file}: {text.splitlines()[0]}"
        for file, node in nodes(EVERYTHING)
        if isinstance(node, DOCUMENTED)
        and (text := ast.get_docstring(node))
        and RELATIVE.match(text)
    ]
    assert found == []
