"""The commands that rent machines, as a person types them."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from millrace.cli import main
from millrace.testing.vast import VastServer
from tests.prefect_server import wait_until

Run = Callable[..., str]


@pytest.fixture
def run(vast: VastServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A command in a folder with a `rent.yaml`, at a stand-in whose time goes quickly."""
    monkeypatch.setenv("VAST_KEY", vast.reset(rate=200.0, strict=False, program=300.0))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "rent.yaml").write_text(
        f"""
name: fleet
store: {{url: {(tmp_path / "store").as_uri()}}}
account: {{api_key: "${{VAST_KEY}}", server_url: {vast.url}}}
request: {{gpu: RTX_4090, max_hourly: 1.0, max_total: 5.0, max_lifetime: PT2H}}
program: {{repo_url: "https://example.org/x", command: [millrace, run]}}
timeouts: {{poll_interval: PT0.5S}}
"""
    )

    def command(*words: str, code: int = 0, answer: str = "") -> str:
        result = CliRunner().invoke(main, words, input=answer)
        assert result.exit_code == code, result.output
        return result.output

    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield command
    for number, handler in handlers.items():
        signal.signal(number, handler)
    vast.reset()


def test_machines_are_looked_at_rented_and_released(run: Run, vast: VastServer) -> None:
    shown = run("machine", "offers")
    assert "1 x RTX 4090, 24 GB" in shown
    assert vast.list_machines() == []
    said = run("machine", "rent", "--yes")
    assert "fleet/0: takes RTX 4090" in said
    assert "fleet/0| the last words" in said
    assert "fleet/0: released (done: the program ended with exit code 0)" in said
    assert "All is released. It has cost about $" in said
    assert "Rented: 0 machines" in run("machine", "list")
    assert vast.list_alive() == []


def test_variables_of_the_program_do_not_keep_a_machine_rented(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rent.yaml"
    text = path.read_text()
    path.write_text(text.replace("run]}", "run], environment: {KEY: '${UNSET_KEY}'}}"))
    assert "Rented: 0 machines" in run("machine", "list")
    assert "has no rental 'fleet'" in run("machine", "release", "fleet", code=1)
    assert "Released: 0 machines" in run("machine", "reap")
    assert "UNSET_KEY" in run("machine", "rent", "--yes", code=2)


def test_what_is_left_running_is_listed_kept_and_released(
    run: Run, vast: VastServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAST_KEY", vast.reset(rate=200.0, strict=False, program=9000.0))
    said = run("machine", "rent", "--detach", "--yes")
    assert "fleet/0 runs at 127.0.0.1." in said
    assert "release them with `millrace machine release fleet rent.yaml`" in said
    (one,) = vast.list_alive()
    listed = run("machine", "list")
    assert f"fleet: instance {one['id']} is running, since " in listed
    assert "detached until its deadline." in listed
    assert "Released: 0 machines. Stay: 1." in run("machine", "reap")
    vast.advance(3 * 3600)
    said = run("machine", "reap", "--dry-run")
    assert "the program has ended.\nWould be released: 1 machine. Stay: 0." in said
    assert "has no rental 'fleat'" in run("machine", "release", "fleat", code=1)
    assert "Released: 1 machine of fleet" in run(
        "machine", "release", "fleet", "rent.yaml", "--yes"
    )
    assert vast.list_alive() == []


@pytest.mark.parametrize("words", [("release", "fleet"), ("reap",)])
def test_machines_are_released_only_after_an_answer(
    run: Run, vast: VastServer, words: tuple[str, ...]
) -> None:
    run("machine", "rent", "--detach", "--yes")
    vast.advance(3 * 3600)
    (one,) = vast.list_alive()
    said = run("machine", *words, code=2)
    assert f"fleet: instance {one['id']} is " in said
    assert "Release 1 machine? [y/N]" in said
    assert "Nothing was done, since the question has no answer. Add --yes" in said
    said = run("machine", *words, "--json", answer="n\n", code=1)
    assert "Nothing was done.\n" in said
    assert json.loads(said[said.index("\n{") :])["released"] in (0, [])
    assert [left["id"] for left in vast.list_alive()] == [one["id"]]
    assert "Released: 1 machine" in run("machine", *words, answer="y\n")
    assert vast.list_alive() == []


def test_the_printed_command_releases_machines_of_a_file_with_a_space_in_its_name(
    run: Run, vast: VastServer, tmp_path: Path
) -> None:
    (tmp_path / "rent.yaml").rename(tmp_path / "my machines.yaml")
    said = run("machine", "rent", "my machines.yaml", "--detach", "--yes")
    (command,) = re.findall(r"release them with `millrace (.*)`\.", said)
    assert "Released: 1 machine of fleet" in run(*shlex.split(command), "--yes")
    assert vast.list_alive() == []


# The command without the pause before the monitor releases the machines of a killed owner.
QUICK_MONITOR = """
from millrace.cli import main
from millrace.rentals import OwnerMonitor
OwnerMonitor.__init__.__kwdefaults__["grace_period"] = 0.0
main()
"""


def test_machines_of_a_command_that_was_killed_are_released(run: Run, vast: VastServer) -> None:
    command = [sys.executable, "-c", QUICK_MONITOR, "machine", "rent", "--yes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as owner:
        wait_until(lambda: len(vast.list_alive()) == 1, "the machine rented")
        owner.kill()
    wait_until(lambda: vast.list_alive() == [], "the machine released")
    (one,) = vast.list_machines()
    assert one["by"] == "the account"
    assert "Rented: 0 machines" in run("machine", "list")


def test_a_machine_that_nobody_can_afford_is_not_there(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rent.yaml"
    path.write_text(path.read_text().replace("max_hourly: 1.0", "max_hourly: 0.01"))
    assert "No offer fits" in run("machine", "offers", code=1)
    assert "has no offer (any more) that fits fleet" in run("machine", "rent", "--yes", code=1)
