"""The rig's hosts are apart, their links are as slow as they should be, and nothing is left."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.rig import DISK, GOODPUT, Rig, RigError, RigHost
from benchmarks.rig.hosts import REPOSITORY
from benchmarks.rig.store import RigStore

MIB = 1 << 20
RATE = 100  # Mbit/s
MB_A_SECOND = RATE / 8 * GOODPUT
SEND = """
import socket, sys
server = socket.create_server(("", 9))
print("ready", flush=True)
with server.accept()[0] as peer:
    peer.sendall(bytes(int(sys.argv[1])))
"""
RECEIVE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 9), timeout=20) as peer:
    began, got = time.monotonic(), 0
    while piece := peer.recv(1 << 20):
        got += len(piece)
    print(got / (time.monotonic() - began) / 1e6)
"""
OWNER = """
import signal, time
from benchmarks.rig import Rig
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in background
with Rig.start(nodes=1) as rig:
    host = rig.nodes[0]
    host.popen(["sleep", "300"])
    host.popen(["sh", "-c", "setsid sleep 300 & exit"]).wait()
    print(host.holder, *host.list_pids(), flush=True)
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig.start(nodes=2, rate_mbit=RATE, store_mbit=10 * RATE, disk_bytes=32 * MIB) as rig:
        yield rig


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", *arguments]


def rate(sender: RigHost, receiver: RigHost, size: int = 6 * MIB) -> float:
    """MB/s at which one sends to the other."""
    with sender.popen(python(SEND, str(size)), stdout=subprocess.PIPE) as sending:
        assert sending.stdout is not None
        sending.stdout.readline()
        return float(receiver.run(python(RECEIVE, sender.address)))


def state(pid: int) -> str:
    """``R``, ``S``, ``T``; ``Z`` also for one that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def within(seconds: float, true: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < until:
        time.sleep(0.01)
    return done


def gone(pids: list[int], patience: float = 0) -> bool:
    return within(patience, lambda: {state(pid) for pid in pids} == {"Z"})


def mounted() -> str:
    return Path("/proc/self/mounts").read_text()


def test_hosts_reach_each_other_at_the_rate_of_the_slower_link(rig):
    # A burst of 128 KiB goes unshaped at either end, and the clock starts a little late.
    most = MB_A_SECOND * 1.1
    for sender, receiver in (rig.nodes, (rig.store, rig.nodes[0]), (rig.nodes[0], rig.store)):
        assert 0.5 * MB_A_SECOND < rate(sender, receiver) < most


def test_a_link_can_be_given_another_rate(rig):
    rig.shape(rig.nodes[0], 20)
    try:
        assert rate(*rig.nodes, size=MIB) < MB_A_SECOND / 2
    finally:
        rig.shape(rig.nodes[0], RATE)


def test_a_far_zone_is_reached_over_one_link_that_is_counted():
    with Rig.start(nodes=3, rate_mbit=RATE, far=2, link_mbit=20, disk_bytes=32 * MIB) as rig:
        near, *far = rig.nodes
        assert rig.far == tuple(far)
        assert rate(*far) > 0.5 * MB_A_SECOND
        assert sum(rig.read_link_bytes()) < MIB / 10
        assert rate(rig.store, far[0], size=2 * MIB) < MB_A_SECOND / 2
        there, back = rig.read_link_bytes()
        assert 2 * MIB <= there < 2.2 * MIB
        assert back < MIB / 10
        assert rate(far[1], near, size=2 * MIB) < MB_A_SECOND / 2
        assert 2 * MIB <= rig.read_link_bytes()[1] < 2.2 * MIB


def test_the_same_path_is_another_disk_on_every_host(rig):
    assert not DISK.exists()
    for host in rig.hosts:
        assert list(host.call(lambda: sorted(DISK.iterdir()))) == [DISK / "tmp"]
        host.call((DISK / "name").write_text, host.name)
    for host in rig.hosts:
        assert host.run(["cat", DISK / "name"]) == host.name
        host.call((DISK / "name").unlink)
    assert not DISK.exists()
    with pytest.raises(OSError, match="No space left"):
        rig.nodes[0].call((DISK / "full").write_bytes, bytes(33 * MIB))
    rig.nodes[0].call((DISK / "full").unlink)


def test_a_temporary_file_is_the_hosts_own(rig):
    one, other = rig.nodes
    with tempfile.NamedTemporaryFile(dir="/tmp") as outside:
        made = Path(one.run(["mktemp"]).strip())
        assert made.parent == Path("/tmp")
        for host, seen in ((one, True), (other, False)):
            assert host.call(made.exists) is seen
            assert not host.call(Path(outside.name).exists)
        assert not made.exists()
    one.call(made.unlink)


def test_a_host_has_a_name_and_processes_of_its_own_and_no_way_out(rig):
    host = rig.nodes[1]
    assert host.call(socket.gethostname) == "n1"
    assert socket.gethostname() != "n1"
    listed = host.run(["ls", "/proc"]).split()
    assert len([name for name in listed if name.isdigit()]) == 2  # the first, and ls
    with pytest.raises(OSError, match="unreachable"):
        host.call(socket.create_connection, ("192.0.2.1", 9), 1)


def test_killing_a_host_ends_all_that_runs_in_it_and_nothing_else(rig):
    one, other = rig.nodes
    bystander = other.popen(["sleep", "60"])
    child = one.popen(["sleep", "60"])
    one.popen(["sh", "-c", "setsid sleep 60 & exit"]).wait()
    assert len(one.list_pids()) == 2
    pids = one.list_pids()
    one.kill()
    assert child.returncode == -signal.SIGKILL
    assert gone(pids)
    assert bystander.poll() is None
    assert one.run(["echo", "again"]) == "again\n"
    other.kill()


def test_a_frozen_host_goes_on_when_it_is_thawed(rig):
    host = rig.nodes[0]
    tick = "import time\nwhile True: print(flush=True); time.sleep(.01)"
    child = host.popen(python(tick), stdout=subprocess.PIPE)
    with child.stdout:
        child.stdout.readline()
        host.signal("STOP")
        assert within(5, lambda: state(child.pid) == "T")
        host.signal("CONT")
        for _ in range(10):
            assert child.stdout.readline()
        host.kill()


def test_an_unplugged_host_falls_silent_and_can_be_plugged_in_again(rig):
    one, other = rig.nodes
    rig.unplug(one)
    try:
        with pytest.raises(OSError, match=r"timed out|No route"):
            other.call(socket.create_connection, (one.address, 9), 0.3)
    finally:
        rig.plug(one)
    assert rate(one, other, MIB)


def test_a_command_that_fails_or_takes_too_long_says_so(rig):
    with pytest.raises(RigError, match="sh ended with 3 on n0: so it is"):
        rig.nodes[0].run(["sh", "-c", "echo so it is >&2; exit 3"])
    with pytest.raises(RigError, match=r"sleep took more than 0\.2 s on n0"):
        rig.nodes[0].run(["sleep", "60"], timeout=0.2)
    assert rig.nodes[0].list_pids() == []


def test_a_store_in_a_host_is_reached_by_the_others_and_counts(rig):
    with RigStore.start(DISK / "objects", rig.store) as store:
        store.generate("a", MIB)
        code = "import json,sys,obstore;from obstore.store import S3Store;"
        code += "print(len(obstore.get(S3Store(**json.loads(sys.argv[1])),'a').bytes()))"
        read = [sys.executable, "-c", code, json.dumps(store.make_config())]
        assert rig.nodes[0].run(read) == f"{MIB}\n"
        assert store.read_counts().bytes == MIB


def test_after_the_block_all_is_gone_even_if_it_raised():
    before = mounted(), socket.if_nameindex()
    pids: list[int] = []
    with pytest.raises(ZeroDivisionError), Rig.start(nodes=2) as rig:  # noqa: PT012
        for host in rig.hosts:
            host.popen(["sleep", "60"])
            host.popen(["sh", "-c", "setsid sleep 60 & exit"]).wait()
            pids += [host.holder, *host.list_pids()]
        assert len(pids) == 9
        raise ZeroDivisionError
    assert gone(pids)
    assert (mounted(), socket.if_nameindex()) == before


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_nothing_outlives_an_owner_that_was_killed(name):
    command = [sys.executable, "-c", OWNER]
    silent = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=REPOSITORY, **silent) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert not any(map(gone, [[pid] for pid in pids]))
        owner.send_signal(signal.Signals[name])
    assert gone(pids, 20)


def test_a_rig_ends_by_itself_when_its_time_is_up():
    with Rig.start(nodes=1, limit=timedelta(seconds=5)) as rig:
        child = rig.nodes[0].popen(["sleep", "60"])
        assert child.wait(30) == -signal.SIGKILL
