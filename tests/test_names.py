"""A class name means one thing in all of the code."""

import ast
from collections import defaultdict

from tests.servers.process import REPOSITORY


def test_each_class_name_is_defined_once():
    places = defaultdict[str, list[str]](list)
    for top in ("millrace", "tasks", "flows", "blocks", "deployments"):
        for file in sorted((REPOSITORY / top).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(file.relative_to(REPOSITORY)))
    assert len(places) > 400
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
