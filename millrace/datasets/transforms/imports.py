"""Digests of the modules beside the code of a function, on which its samples depend, too."""

import ast
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec, resolve_name
from pathlib import Path

from millrace.digest import compute_digest
from millrace.errors import ConfigurationError

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
_NOT_PINNED = {*sys.stdlib_module_names, "millrace"}


def digest_file_imports(code: bytes, folder: Path) -> dict[str, str]:
    """Return the digests of the modules that code imports from its folder, by their names.

    Imports within functions count, and those of the modules themselves. Nothing is imported.

    Args:
        code: Code of a file.
        folder: Folder of the file.
    """
    return _digest_imports("", code, partial(_is_below, folder.resolve()))


def digest_package_imports(module_name: str) -> dict[str, str]:
    """Return the digests of the modules that a module imports from its own package, by their names.

    A module that is in no package may import others from its folder, unless packages are installed
    there. The module itself is left out.
    """
    file = find_module_file(module_name)
    if file is None:
        return {}
    code = f"import {module_name}".encode()
    if _name_package(module_name, file):
        top = _get_top(module_name)
        found = _digest_imports("", code, lambda name, _: _get_top(name) == top)
    elif _INSTALLED.isdisjoint(file.parent.parts) and file.parent != _STANDARD_LIBRARY:
        found = _digest_imports("", code, partial(_is_below, file.parent))
    else:
        return {}
    return {name: digest for name, digest in found.items() if name != module_name}


def check_imports(expected: Mapping[str, str]) -> None:
    """Check that the modules beside a function are those of the plan.

    Raises:
        ConfigurationError: A module is missing, or has another digest.
    """
    for name, digest in expected.items():
        file = find_module_file(name)
        found = compute_digest(file.read_bytes()) if file is not None else "no file"
        if found != digest:
            raise ConfigurationError(
                f"The module {name}, which a function of the transforms imports, has {found} here, "
                f"and not {digest}. Take the version of the plan, or shard the source under "
                "another dataset name."
            )


def find_module_file(name: str) -> Path | None:
    """Return the Python file of a module; None if there is none. Nothing is imported."""
    top, *rest = name.split(".")
    spec = None
    with suppress(ImportError, ValueError):  # also a module that runs as a program
        spec = find_spec(top)
    if spec is None:
        return None
    if not rest:
        origin = spec.origin if spec.has_location else None
        return Path(origin).resolve() if origin and origin.endswith(".py") else None
    for root in spec.submodule_search_locations or ():
        path = Path(root, *rest)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file.resolve()
    return None


def _digest_imports(
    package: str, code: bytes, is_own: Callable[[str, Path], bool]
) -> dict[str, str]:
    """Return the digests of the modules that code imports, directly or not, by their names.

    Args:
        package: Name of the package to which relative imports of the code refer.
        code: The code.
        is_own: Function that decides by the name and the file of a module whether it is taken.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    codes = [(package, code)]
    while codes:
        for name in _list_imports(*codes.pop()):
            if name in seen or _get_top(name) in _NOT_PINNED:
                continue
            seen.add(name)
            file = find_module_file(name)
            if file is not None and is_own(name, file):
                body = file.read_bytes()
                found[name] = compute_digest(body)
                codes.append((_name_package(name, file), body))
    return dict(sorted(found.items()))


def _is_below(folder: Path, name: str, file: Path) -> bool:
    """Decide whether a module is in a folder, and not in one of installed packages within it."""
    del name
    if not file.is_relative_to(folder):
        return False
    return _INSTALLED.isdisjoint(file.relative_to(folder).parts)


def _get_top(name: str) -> str:
    return name.partition(".")[0]


def _list_prefixes(name: str) -> list[str]:
    """Return the names of the packages of a module, and its own name."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _name_package(name: str, file: Path) -> str:
    return name if file.name == "__init__.py" else name.rpartition(".")[0]


def _list_imports(package: str, code: bytes) -> Iterator[str]:
    """Yield the names of the modules that code may import, and of their packages."""
    with suppress(SyntaxError, ValueError):  # such code cannot be imported
        for node in ast.walk(ast.parse(code)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                with suppress(ImportError):
                    base = resolve_name("." * node.level + (node.module or ""), package)
                    names = [f"{base}.{alias.name}" for alias in node.names]
            for name in names:
                yield from _list_prefixes(name)
