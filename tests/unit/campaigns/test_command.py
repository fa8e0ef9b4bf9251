"""A training command, checked before anything is made or rented for it."""

import subprocess
import sys
from pathlib import Path

import pytest

from millrace.campaigns.worker import check_local_command, check_repository_command
from millrace.errors import ConfigurationError
from millrace.rentals import CodeRepository


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with a script, a module in a package, and a package that can be run."""
    for name in ("train.py", "pkg/__init__.py", "pkg/work.py", "pkg/app/__init__.py",
                 "pkg/app/__main__.py", "src/deep/__init__.py", "src/deep/run.py"):  # fmt: skip
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path / "project"


@pytest.fixture
def repository(folder: Path) -> CodeRepository:
    """The same, committed."""
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in ("init -q -b main", "add -A", "commit -q -m x"):
        subprocess.run([*git, *command.split()], check=True)
    return CodeRepository(repo_url=folder.as_uri())


RIGHT = [
    "python train.py --threads 1",
    "python -u -W ignore train.py",
    "python -m pkg.work",
    "python3 -m pkg.app --x",
    "python -c print()",
]
WRONG = [
    ("python tran.py", "tran.py"),
    ("python -u -X dev pkg/wrok.py", "pkg/wrok.py"),
    ("python -m pkg.wrok", "pkg.wrok"),
    ("python -m pkg", "module pkg"),
    ("./tran.sh", "tran.sh"),
]


@pytest.mark.parametrize("command", [*RIGHT, f"{sys.executable} -m json.tool", "true"])
def test_a_command_that_this_machine_can_run_passes(command: str, folder: Path) -> None:
    check_local_command(command.split(), folder)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        *WRONG,
        ("no-such-program x", "no program no-such-program"),
        ("python -m tran", "module tran"),
    ],
)
def test_a_command_that_this_machine_cannot_run_is_refused(
    command: str, said: str, folder: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"training\.command.*" + said):
        check_local_command(command.split(), folder)


def test_a_folder_that_does_not_exist_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="no folder"):
        check_local_command(["true"], folder / "none")


@pytest.mark.parametrize(
    "command", [*RIGHT, "python -m deep.run", "python -m torch.distributed.run", "torchrun x.py"]
)
def test_a_command_that_a_machine_may_be_able_to_run_passes(
    command: str, repository: CodeRepository
) -> None:
    check_repository_command(command.split(), repository)


@pytest.mark.parametrize(("command", "said"), [*WRONG, ("python -m deep.rnu", "deep.rnu")])
def test_a_command_whose_file_is_not_in_the_repository_is_refused(
    command: str, said: str, repository: CodeRepository
) -> None:
    with pytest.raises(ConfigurationError, match=r"training\.command.*" + said):
        check_repository_command(command.split(), repository)


def test_a_branch_that_does_not_exist_is_refused(repository: CodeRepository) -> None:
    with pytest.raises(ConfigurationError, match="has no mian: name a branch"):
        check_repository_command(["true"], repository.model_copy(update={"repo_ref": "mian"}))


def test_of_a_repository_that_cannot_be_read_from_here_nothing_is_known(tmp_path: Path) -> None:
    elsewhere = CodeRepository(repo_url=(tmp_path / "none").as_uri())
    check_repository_command(["python", "train.py"], elsewhere)
