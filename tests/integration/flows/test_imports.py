"""Every flow loads where only the base package is installed, as `prefect deploy --all` loads it."""

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
# Libraries that only an extra of pyproject.toml installs.
EXTRAS = ["google", "huggingface_hub", "numba", "ray", "safetensors", "torch", "vastai"]

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
