"""Forked processes end, print and hear signals as started ones."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer

SHOW = """
import json, os, resource, sys
files = resource.getrlimit(resource.RLIMIT_NOFILE)
ours = os.getsid(0) == os.getpid()
print(json.dumps([sys.argv[1:], os.environ.get("ONE"), os.getcwd(), files, ours, sys.stdin.read()]))
sys.exit(3)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("json")
    yield server
    server.stop()


def test_a_fork_is_what_a_started_process_is(server: ForkServer, tmp_path: Path) -> None:
    env = {**os.environ, "ONE": "1"}
    forked = server.start(SHOW, "a", "b c", env=env, cwd=tmp_path, stdin=True, new_session=True)
    assert forked.stdin is not None
    forked.stdin.write("told")
    said, _ = forked.communicate()
    started = subprocess.run(
        [sys.executable, "-c", SHOW, "a", "b c"],
        env=env, cwd=tmp_path, input="told", capture_output=True, text=True, check=False,
        start_new_session=True,
    )  # fmt: skip
    assert (said, forked.returncode) == (started.stdout, started.returncode)


def test_a_fork_has_the_limits_of_the_process_that_asks(server: ForkServer) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        said, _ = server.start(SHOW).communicate()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert f"[200, {before[1]}]" in said


def test_a_fork_that_is_killed_or_raises_says_so(server: ForkServer) -> None:
    endless = server.start("import time\nprint('on', flush=True)\ntime.sleep(600)")
    assert endless.stdout is not None
    assert endless.stdout.readline() == "on\n"
    assert endless.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        endless.wait(0.01)
    endless.kill()
    assert endless.wait(60) == -signal.SIGKILL
    endless.stdout.close()
    failed = server.start("1 / 0", stderr=subprocess.STDOUT)
    said, _ = failed.communicate()
    assert failed.returncode == 1
    assert "ZeroDivisionError" in said


def test_forks_end_with_their_server() -> None:
    server = ForkServer()
    endless = server.start("import time\nprint('on', flush=True)\ntime.sleep(600)")
    assert endless.stdout is not None
    endless.stdout.readline()
    server.stop()
    assert endless.stdout.read() == ""
    endless.stdout.close()
    assert endless.wait(60) == -signal.SIGKILL
