"""The commands that flows add to `millrace` import Prefect only when they run."""

import subprocess
import sys

import pytest

from blocks import BucketRole
from blocks.server_names import UPLOAD_LIMIT
from blocks.setup import _DEFAULT_SLOTS
from flows.server_commands import _ROLES, setup


def test_the_roles_and_limits_of_setup_are_those_of_the_blocks() -> None:
    assert tuple(role.value for role in BucketRole) == _ROLES
    (uploads,) = [one for one in setup.params if one.name == "uploads"]
    text = getattr(uploads, "help", "")
    assert f"(the limit {UPLOAD_LIMIT})" in text
    assert text.endswith(f"a new one is {_DEFAULT_SLOTS}.")


@pytest.mark.parametrize("command", ["", "setup", "deploy", "campaign", "campaign run"])
def test_help_does_not_import_prefect(command: str) -> None:
    program = (
        f"import sys; sys.argv = ['millrace', *{command.split()}, '--help']\n"
        "from millrace.cli import main\n"
        "main(standalone_mode=False)\n"
        "sys.exit(int('prefect' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Usage" in done.stdout


def test_commands_and_workers_of_datasets_import_no_large_library() -> None:
    """numpy alone takes a tenth of a second."""
    program = (
        "import sys\n"
        "import millrace.checkpoints, millrace.cleanup, millrace.datasets.worker, millrace.swarm\n"
        "print(*{'boto3', 'numpy', 'pyarrow', 'ray', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b""
