"""Hosts on one machine, each with its own processes, its own disk and a link of a set rate.

::

    with Rig.start(nodes=4, rate_mbit=200, store_mbit=200) as rig:
        rig.nodes[0].run(["ping", "-c1", rig.store.address])

A host is a set of Linux namespaces (network, mounts, processes, host name). One thread of this
process is in these namespaces. Processes that the thread starts run in the host, and its files and
sockets are those of the host.

A host's link is a veth pair to a bridge. ``tc tbf`` limits the rate of both ends: the host's end
is the uplink, and the bridge's end is the downlink. Each host has its own tmpfs at `DISK`, which
also has its ``/tmp``. All other folders are those of the machine. The bridge is in a namespace
too, so the rig neither changes nor reaches the network of the machine.

Some of the nodes can be in a far zone with a second bridge. One link with a limited rate in both
directions connects it to the first bridge, which has the store.

A rig creates no named namespaces. They exist as long as their processes, which end with their owner
(see `benchmarks.rig.holder`). So a rig leaves nothing after its owner was killed.
"""

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from benchmarks.common import read_cpu_seconds

P = ParamSpec("P")
T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[2]
HOLDER = Path(__file__).with_name("holder.py")
MOUNT_POINT = Path("/mnt")  # exists on every machine, so that none is created and removed
DISK = MOUNT_POINT / "millrace"
NETWORK = "198.18.0."  # addresses for benchmarks, RFC 2544
STORE_NUMBER = 200  # last byte of the address
TEMPORARY = Path("/tmp")
SHARED_MEMORY = Path("/dev/shm")
TO_FAR, TO_NEAR = "to-far", "to-near"  # ends of the link between the zones
HEADERS = 66  # bytes of Ethernet, IPv4 and TCP with timestamps
GOODPUT = 1448 / 1514  # share of a link's rate without the headers of TCP and Ethernet
LIMIT = timedelta(hours=1)
KILL_TIMEOUT = 20.0  # seconds
GIB = 1 << 30

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000


class RigError(RuntimeError):
    """This machine cannot have a rig, or a command in a rig failed."""


def find_obstacle() -> str:
    """Return a sentence that says why this machine cannot have a rig, or an empty string."""
    if sys.platform != "linux":
        return "The rig is made of Linux namespaces."
    if os.geteuid():
        return "The rig makes network namespaces: only root can."
    if lacking := [name for name in ("ip", "tc", "mount") if shutil.which(name) is None]:
        return f"The rig needs {', '.join(lacking)} (Debian: iproute2, mount)."
    return ""


class _NamespaceThread:
    """A thread in new namespaces."""

    def __init__(self, name: str, namespaces: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.call(_unshare, namespaces)

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the thread. Its sockets, files and processes are in the namespaces."""
        return self._pool.submit(function, *args, **kwargs).result()

    def stop(self) -> None:
        """End the thread. Namespaces without another process end with it."""
        self._pool.shutdown()


def _unshare(namespaces: int) -> None:
    """Move the calling thread into new namespaces."""
    # os.unshare needs Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(namespaces):
        fault = os.strerror(ctypes.get_errno())
        raise RigError(f"New namespaces are not allowed here: {fault}.")


class RigHost:
    """A host of the rig.

    Attributes:
        name: Name of the host: ``n0``, ``n1`` and so on, or ``store``.
        address: IPv4 address.
        rate_mbit: Rate of the link in each direction, in Mbit/s of Ethernet frames.
    """

    def __init__(
        self, name: str, number: int, rate_mbit: float, *, disk_bytes: int, limit: timedelta
    ) -> None:
        """Create the namespaces, the first process and the disk. `Rig` connects the host."""
        self.name = name
        self.address = f"{NETWORK}{number}"
        self.rate_mbit = rate_mbit
        self._started: list[subprocess.Popen[Any]] = []
        self._thread = _NamespaceThread(name, NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET)
        try:
            self._holder = self.call(self._start_holder, limit)
        except BaseException:
            self._thread.stop()
            raise
        try:
            self.call(self._mount_disk, disk_bytes)
        except BaseException:
            self.stop()
            raise

    def _start_holder(self, limit: timedelta) -> subprocess.Popen[bytes]:
        """Start the first process of the host, and wait for its imports."""
        socket.sethostname(self.name)
        command = [sys.executable, "-I", "-S", str(HOLDER), str(limit.total_seconds())]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        assert holder.stdout is not None
        with holder.stdout as output:
            output.readline()  # mounts may hide the files of the holder from now on
        return holder

    def _mount_disk(self, size: int) -> None:
        """Mount the file systems of the host, with the code and Python still visible."""
        tmpfs = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "rig"]
        _run_command("mount", "--make-rprivate", "/")
        _run_command("mount", "-t", "proc", "proc", "/proc")
        _run_command(*tmpfs, str(SHARED_MEMORY))
        visible = {
            SHARED_MEMORY / str(n): folder for n, folder in enumerate(_find_visible_folders())
        }
        for kept, folder in visible.items():
            kept.mkdir()
            _run_command("mount", "--bind", str(folder), str(kept))
        _run_command(*tmpfs, str(MOUNT_POINT))
        (DISK / "tmp").mkdir(parents=True)
        (DISK / "tmp").chmod(0o1777)
        _run_command("mount", "--bind", str(DISK / "tmp"), str(TEMPORARY))
        for kept, folder in visible.items():
            folder.mkdir(parents=True)
            _run_command("mount", "--bind", str(kept), str(folder))
            _run_command("umount", str(kept))
            kept.rmdir()

    @property
    def holder(self) -> int:
        """Process id of the first process, in the machine's PID namespace."""
        return self._holder.pid

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the host. The sockets and files that it opens are those of the host.

        Calls run one at a time. The function must not start threads: these would fail, since a
        thread cannot enter the PID namespace.
        """
        return self._thread.call(function, *args, **kwargs)

    def popen(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in the host, in the folder of the repository and in a new session.

        Args:
            command: Program and its arguments.
            env: Additional environment variables.
            options: Options of `subprocess.Popen`.
        """
        settings: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "cwd": REPOSITORY,
            "env": {**_make_environment(), **(env or {})},
            "start_new_session": True,
            **options,
        }
        child = self.call(subprocess.Popen, [str(word) for word in command], **settings)
        self._started = [child for child in self._started if child.poll() is None]
        self._started.append(child)
        return child

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 60.0,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command in the host, and return its standard output.

        Args:
            command: Program and its arguments.
            timeout: Time limit in seconds, after which the command is killed.
            stdin: Text for the standard input.
            env: Additional environment variables.

        Raises:
            RigError: The command failed, or exceeded the time limit.
        """
        pipe = subprocess.PIPE
        with self.popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
            try:
                out, fault = child.communicate(stdin, timeout=timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                raise RigError(f"{command[0]} took more than {timeout} s on {self.name}.") from None
            except BaseException:
                child.kill()
                raise
        if child.returncode:
            message = fault.strip() or out.strip()
            raise RigError(f"{command[0]} ended with {child.returncode} on {self.name}: {message}")
        return out

    def list_pids(self) -> list[int]:
        """Return the ids of all running processes but the first, in the machine's PID namespace."""
        own = _read_namespace(self.holder)
        found = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [
            pid
            for pid in found
            if pid != self.holder and _read_namespace(pid) == own and not _has_ended(pid)
        ]

    def kill(self) -> None:
        """Send SIGKILL to all processes of the host, and wait until they end.

        The disk and the link remain, so that new processes can start. Peers see closed connections,
        unless the host was unplugged before.

        Raises:
            RigError: A process was still running after 20 s.
        """
        self.signal("KILL")
        deadline = time.monotonic() + KILL_TIMEOUT
        while any(child.poll() is None for child in self._started) or self.list_pids():
            if time.monotonic() > deadline:
                raise RigError(f"Something on {self.name} outlives SIGKILL.")
            time.sleep(0.005)
        self._started.clear()

    def signal(self, name: str) -> None:
        """Send a signal to all processes: ``STOP`` pauses the host, ``CONT`` continues it."""
        self.call(_run_command, "sh", "-c", f"kill -{name} -1 2>/dev/null || true")

    def stop(self) -> None:
        """Kill all processes, and remove the host."""
        self._holder.kill()
        for child in self._started:
            child.wait()  # the first process cannot end before all others were waited for
        self._holder.wait()
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._thread.stop()


class Rig:
    """Connected hosts. `Rig.start` creates a rig, and a ``with`` statement stops it at its end.

    Attributes:
        nodes: Hosts ``n0``, ``n1`` and so on. Those of the far zone come last.
        far: Hosts of the far zone.
        store: Host for the store.
    """

    def __init__(
        self,
        nodes: Sequence[RigHost],
        store: RigHost,
        switch: _NamespaceThread,
        *,
        far: int = 0,
        link_mbit: float = 0.0,
    ) -> None:
        """Connect the hosts that `start` created, with bridges in the namespace of ``switch``."""
        self.nodes, self.store = tuple(nodes), store
        self.far = self.nodes[len(self.nodes) - far :]
        self._switch, self._stack = switch, ExitStack()
        self._connect()
        if far:
            self._connect_far(link_mbit)

    @classmethod
    def start(
        cls,
        *,
        nodes: int = 4,
        rate_mbit: float = 200,
        store_mbit: float = 200,
        far: int = 0,
        link_mbit: float = 0.0,
        disk_bytes: int = GIB,
        limit: timedelta = LIMIT,
    ) -> Self:
        """Create a rig.

        Args:
            nodes: Number of nodes. The host of the store is added to them.
            rate_mbit: Rate of each node's link in each direction, in Mbit/s.
            store_mbit: Rate of the store's link in each direction, in Mbit/s.
            far: Number of nodes in the far zone.
            link_mbit: Rate of the link between the zones in each direction, in Mbit/s.
            disk_bytes: Size of each host's disk in bytes. Written data takes memory.
            limit: Time limit, after which all hosts are killed.

        Raises:
            RigError: This machine cannot have a rig. The message says why.
        """
        if reason := find_obstacle():
            raise RigError(reason)
        with ExitStack() as stack:  # stops the created hosts after an error
            switch = _NamespaceThread("switch", NEWNET)
            stack.callback(switch.stop)

            def make_host(name: str, number: int, rate: float) -> RigHost:
                host = RigHost(name, number, rate, disk_bytes=disk_bytes, limit=limit)
                stack.callback(host.stop)
                return host

            hosts = [make_host(f"n{i}", i + 1, rate_mbit) for i in range(nodes)]
            store = make_host("store", STORE_NUMBER, store_mbit)
            rig = cls(hosts, store, switch, far=far, link_mbit=link_mbit)
            rig._stack = stack.pop_all()
        return rig

    @property
    def hosts(self) -> tuple[RigHost, ...]:
        """All nodes, and the host of the store."""
        return (*self.nodes, self.store)

    def _connect(self) -> None:
        """Connect all hosts to the bridge."""
        lines = ["link add bridge type bridge", "link set bridge up"]
        for host in self.hosts:
            lines.append(f"link add {host.name} type veth peer name eth0 netns {host.holder}")
            lines.append(f"link set {host.name} master bridge up")
        self._switch.call(_run_batch, "ip", lines)
        for host in self.hosts:
            own = ["link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up"]
            host.call(_run_batch, "ip", own)
            self.shape(host, host.rate_mbit)

    def shape(self, host: RigHost, rate_mbit: float) -> None:
        """Change the rate of a host's link in both directions."""
        host.rate_mbit = rate_mbit
        for call, device in ((host.call, "eth0"), (self._switch.call, host.name)):
            # A burst smaller than a segment of TCP offload (64 KiB) would split each segment.
            tbf = f"tbf rate {rate_mbit}mbit burst 128kb latency 20ms"
            call(_run_batch, "tc", [f"qdisc replace dev {device} root {tbf}"])

    def _connect_far(self, mbit: float) -> None:
        """Move the hosts of the far zone to a second bridge, and connect both bridges."""
        lines = ["link add far type bridge", "link set far up"]
        lines.append(f"link add {TO_FAR} type veth peer name {TO_NEAR}")
        lines += [f"link set {TO_FAR} master bridge up", f"link set {TO_NEAR} master far up"]
        lines += [f"link set {host.name} master far" for host in self.far]
        self._switch.call(_run_batch, "ip", lines)
        tbf = f"tbf rate {mbit}mbit burst 128kb latency 50ms"
        for device in (TO_FAR, TO_NEAR):
            self._switch.call(_run_batch, "tc", [f"qdisc replace dev {device} root {tbf}"])

    def read_cpu_seconds(self) -> float:
        """Return the CPU time of the nodes' living processes, and of their ended children."""
        return sum(read_cpu_seconds(pid) for node in self.nodes for pid in node.list_pids())

    def read_link_bytes(self) -> tuple[int, int]:
        """Return the bytes of TCP payload that the link between the zones has sent.

        The first number is for the direction to the far zone, the second one for the other.
        """
        sent, returned = (
            self._switch.call(_read_payload_size, device) for device in (TO_FAR, TO_NEAR)
        )
        return sent, returned

    def unplug(self, host: RigHost) -> None:
        """Disconnect a host. Its peers receive nothing, and do not see closed connections."""
        self._switch.call(_run_batch, "ip", [f"link set {host.name} down"])

    def plug(self, host: RigHost) -> None:
        """Connect a host that was disconnected."""
        self._switch.call(_run_batch, "ip", [f"link set {host.name} up"])

    def stop(self) -> None:
        """Stop all hosts."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _find_visible_folders() -> list[Path]:
    """Return the folders of the code and of Python that the mounts of a host would hide."""
    needed = (REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
    hidden = {
        folder
        for folder in needed
        if any(folder.is_relative_to(mount) for mount in (MOUNT_POINT, TEMPORARY, SHARED_MEMORY))
    }
    return [folder for folder in hidden if hidden.isdisjoint(folder.parents)]


def _make_environment() -> dict[str, str]:
    """Return the environment of this process without its proxies."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return {**kept, "TMPDIR": str(TEMPORARY)}


def _read_namespace(pid: int) -> str:
    """Return the identity of a process's PID namespace, or an empty string if it has ended."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""


def _has_ended(pid: int) -> bool:
    """Decide whether a process has ended. Its parent may not have waited for it yet."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, threads = fields[0], int(fields[17])
        return state in "ZX" and threads <= 1  # the first thread may end before the others
    return True


def _read_payload_size(device: str) -> int:
    """Return the number of bytes that a queue has sent, without the headers of its packets."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", device, "root"]
    (queue,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return queue["bytes"] - HEADERS * queue["packets"]


def _run_command(*words: str) -> None:
    """Run a command."""
    _run_with_input(words, "")


def _run_batch(tool: str, lines: Sequence[str]) -> None:
    """Run a tool of iproute2 with lines of commands."""
    _run_with_input([tool, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def _run_with_input(words: Sequence[str], text: str) -> None:
    """Run a command with a text as its standard input."""
    completed = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if completed.returncode:
        fault = completed.stderr.strip() or completed.returncode
        raise RigError(f"{' '.join(words)}: {fault}")
