"""Installed packages as a folder that has those of some requirements only, and no others."""

import subprocess
import sysconfig
import tomllib
from collections.abc import Collection, Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from millrace.testing.process import REPOSITORY

PROJECT = "millrace"


def link_requirements(folder: Path, *extras: str, without: Collection[str] = ()) -> None:
    """Link what pip would install for this project: its requirements, and theirs.

    Each file is a link of its own, so pip can replace a package without a change of the original.

    Args:
        folder: Folder of packages. It is made.
        extras: Extras of the project.
        without: Names of packages to leave out.
    """
    folder.mkdir(parents=True)
    packages = Path(sysconfig.get_path("purelib"))
    names: set[str] = set()
    for one in _find_distributions(extras):
        if canonicalize_name(one.name) not in without:
            names |= _find_names(one, packages)
    whole = sorted(packages / name for name in names if "/" not in name)
    subprocess.run(["cp", "-rs", *whole, folder], check=True)
    for name in names:
        if "/" in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(packages / name)


def _find_distributions(extras: Iterable[str]) -> list[Distribution]:
    """Return the distributions that the project requires, without the project."""
    found: dict[str, Distribution] = {}
    waiting = [(PROJECT, extra) for extra in ("", *extras)]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        if name != PROJECT and name not in found:
            found[name] = distribution(name)
        for requirement in _read_requirements(name, extra, found):
            required = canonicalize_name(requirement.name)
            new = {(required, more) for more in ("", *requirement.extras)} - seen
            waiting += new
            seen |= new
    return list(found.values())


def _read_requirements(
    name: str, extra: str, found: dict[str, Distribution]
) -> Iterable[Requirement]:
    """Return the requirements of one extra of a package; without an extra, those that all have."""
    if name == PROJECT:
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    else:
        lines = found[name].requires or []
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _find_names(one: Distribution, packages: Path) -> set[str]:
    """Return the files of a distribution, and its folders that no other one shares."""
    names: set[str] = set()
    for line in (one.read_text("RECORD") or "").splitlines():
        name = line.partition(",")[0]
        top = name.partition("/")[0]
        if top in {"..", "__pycache__"}:
            continue  # commands, and what Python has compiled
        is_own = top.endswith(".dist-info") or (packages / top / "__init__.py").exists()
        names.add(top if is_own else name)
    return names
