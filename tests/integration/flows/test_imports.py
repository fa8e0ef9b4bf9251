"""Every flow loads where only the base package is installed, as `prefect deploy --all` loads it."""

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
FOR_DEVELOPERS = {"bench", "demo", "dev"}


def list_extras() -> list[str]:
    """Return the packages that only an extra for users installs, by the names of their imports."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    distributions = {
        canonicalize_name(Requirement(line).name)
        for extra, lines in extras.items()
        for line in lines
        if extra not in FOR_DEVELOPERS
    }
    packages: dict[str, list[str]] = {name: [] for name in distributions}
    for package, names in packages_distributions().items():
        for name in distributions.intersection(map(canonicalize_name, names)):
            packages[name].append(package)
    assert all(packages.values()), packages
    return sorted({package for found in packages.values() for package in found})


EXTRAS = list_extras()

_PROGRAM = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
{body}
"""


def _run(body: str) -> subprocess.CompletedProcess[str]:
    program = _PROGRAM.format(extras=EXTRAS, body=body)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_every_flow_task_and_block_loads_without_an_extra():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("flows", "tasks", "blocks")
        for path in sorted((ROOT / folder).glob("*.py"))
    ]
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    entrypoints = {each["entrypoint"].rpartition(".")[0] for each in deployments}
    assert entrypoints <= set(modules)
    ended = _run(f"for module in {modules!r}: importlib.import_module(module)")
    assert ended.returncode == 0, ended.stderr


def test_what_needs_an_extra_names_it():
    ended = _run("""
from millrace import checkpoints, errors, gradients
from millrace.campaigns import worker

for package, name in ((gradients, "iterate_links"), (checkpoints, "Saver"), (worker, "Worker")):
    try:
        getattr(package, name)
    except errors.ConfigurationError as error:
        print(error)
""")
    assert ended.stdout.splitlines() == [
        "numba is not installed here: pip install 'millrace[gradients]'.",
        "torch is not installed here: pip install 'millrace[torch]'.",
        "torch is not installed here: pip install 'millrace[gradients]'.",
    ], ended.stderr
