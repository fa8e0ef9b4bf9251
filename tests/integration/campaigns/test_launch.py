"""A worker's process: warmed by others, its script started again, ended with its leader."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pydantic import SecretStr

from millrace.campaigns.worker import WorkerSettings
from millrace.keys.campaigns import CampaignKeys
from millrace.processes import read_start_time
from millrace.storage import Store, StoreSpec, delete, put
from millrace.swarm import Host, Hosts, PrewarmSettings, Request, prewarm
from millrace.testing.process import find_free_ports
from tests.prefect_server import wait_until
from tests.support.campaigns.workers import Make

COUNTS = """
import os, pathlib, sys
path = pathlib.Path("{path}")
path.write_text(path.read_text() + "x" if path.exists() else "x")
assert pathlib.Path(os.environ["MILLRACE_WORKER"]).is_absolute()
{then}
"""


def written(folder: Path, settings: WorkerSettings) -> Path:
    path = folder / "worker.yaml"
    path.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    return path


def script(path: Path, then: str) -> tuple[str, ...]:
    return (sys.executable, "-c", COUNTS.format(path=path, then=then))


@pytest.mark.parametrize(
    ("then", "restarts", "runs", "code"),
    [
        ("sys.exit(0)", 3, 1, 0),
        ("sys.exit(0 if len(path.read_text()) == 3 else 4)", 3, 3, 0),
        ("sys.exit(4)", 2, 3, 4),
        ("os.kill(os.getpid(), 9)", 0, 1, 137),
        (None, 0, 0, 127),
    ],
)
def test_a_script_that_fails_is_started_again(
    make: Make, tmp_path: Path, then: str | None, restarts: int, runs: int, code: int
) -> None:
    path = tmp_path / "runs"
    command = ("no-such-program",) if then is None else script(path, then)
    settings = make(command=command, restarts=restarts)
    assert started(written(tmp_path, settings)).wait() == code
    assert (len(path.read_text()) if path.exists() else 0) == runs


def started(file: Path, *options: str, **more: Any) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-c",
        "from millrace.cli import main; main()",
        "campaign",
        "worker",
        str(file),
    ]
    return subprocess.Popen([*command, *options], start_new_session=True, **more)


def test_a_machine_is_warmed_before_its_script_runs(
    make: Make, store: Store, place: StoreSpec, tmp_path: Path
) -> None:
    put(store, "models/weights.bin", b"w" * 100_000)
    put(store, CampaignKeys("small").prewarm_marker, b"{}")
    brought = tmp_path / "data/weights.bin"
    settings = make(
        prewarm_timeout="PT5M",
        command=script(tmp_path / "ran", f'assert pathlib.Path("{brought}").exists()'),
    )
    key, (port,) = "k" * 32, find_free_ports(1)
    environment = {**os.environ, "MILLRACE_NODE_KEY": key, "VAST_TCP_PORT_70000": str(port)}
    process = started(written(tmp_path, settings), env=environment)
    try:
        hosts = Hosts(hosts=(Host(url=f"http://127.0.0.1:{port}"),), key=SecretStr(key))
        requests = (Request(prefix="models", store="s"),)
        report = prewarm(
            PrewarmSettings(requests=requests, stores={"s": place}, root=Path("/"), nodes=hosts)
        )
        assert [node.ready for node in report.nodes] == [True]
        assert not (tmp_path / "ran").exists()
        delete(store, [CampaignKeys("small").prewarm_marker])
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "ran").exists()


ESCAPES = """
import os, pathlib, subprocess, sys, time
rank = ["{python}", "-c", "import time; time.sleep(600)"]
ranks = [subprocess.Popen(rank, start_new_session=True).pid]  # as torchrun starts its ranks
if not os.fork():  # a daemon: its parent has ended
    os.setsid()
    ranks.append(subprocess.Popen(rank).pid)
    path = pathlib.Path("{note}")
    path.with_suffix(".part").write_text(" ".join(map(str, [*ranks, os.getpid()])))
    path.with_suffix(".part").rename(path)
    time.sleep(600)
while not os.path.exists("{note}"):
    time.sleep(0.01)
{then}
"""


def escaping(note: Path, then: str) -> tuple[str, ...]:
    """A script whose ranks are in sessions of their own."""
    return (sys.executable, "-c", ESCAPES.format(python=sys.executable, note=note, then=then))


def ranks_of(note: Path) -> list[int]:
    text = wait_until(lambda: (note.exists() and note.read_text()) or None, "the ranks")
    return [int(pid) for pid in text.split()]


def ended(pids: list[int]) -> bool:
    return all(read_start_time(pid) is None for pid in pids)


@pytest.mark.parametrize("end", ["leader", "script", "failure", "SIGTERM"])
def test_ranks_in_sessions_of_their_own_end_with_their_script(
    make: Make, tmp_path: Path, end: str
) -> None:
    note = tmp_path / "pids"
    then = {"script": "sys.exit(0)", "failure": "os.abort()"}.get(end, "time.sleep(600)")
    settings = make(command=escaping(note, then), restarts=0)
    process = started(written(tmp_path, settings), "--attached", stdin=subprocess.PIPE)
    ranks = ranks_of(note)
    assert len(ranks) == 3
    assert process.stdin is not None
    if end == "leader":
        process.stdin.close()  # as the kernel does when the leader is killed
    elif end == "SIGTERM":
        process.terminate()
    assert process.wait() == {"leader": -9, "script": 0, "failure": 134, "SIGTERM": 130}[end]
    wait_until(lambda: ended(ranks) or None, "the ranks' end")
    process.stdin.close()


def test_what_is_attached_ends_with_whoever_started_it(make: Make, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    then = f'pathlib.Path("{note}").write_text(str(os.getpid())); import time; time.sleep(600)'
    settings = make(command=script(tmp_path / "ran", then))
    process = started(written(tmp_path, settings), "--attached", stdin=subprocess.PIPE)
    pid = wait_until(lambda: (note.exists() and note.read_text()) or None, "the script")
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does when the leader is killed
    assert process.wait() == -9
    wait_until(lambda: not psutil.pid_exists(int(pid)), "the script's end")
