"""Hosts on one machine: each with a network link of a set rate, processes and a disk of its own.

::

    with Rig.start(nodes=4, rate_mbit=200, store_mbit=200) as rig:
        rig.nodes[0].run(["ping", "-c1", rig.store.address])

A host is a set of namespaces (network, mounts, processes, host name). A thread of ours lives in
them: what it starts is born in the host, what it opens or connects to is the host's. The links are
veth pairs into a bridge, shaped both ways with ``tc tbf``: a host's end its uplink, the bridge's
end its downlink. Every host has a tmpfs of its own at `DISK`, its ``/tmp`` is on it too: the same
path, another disk. All else is the machine's. The bridge is in a namespace too: the machine's own
network is neither touched nor reached.

Some of the nodes may be in a far zone: behind a second bridge, and one link, shaped both ways, that
leads from it to the first one, where the store is.

Nothing has a name outside, and the namespaces live as long as their processes, which end with
their owner (see `benchmarks.rig.holder`): a rig whose owner was killed leaves nothing behind.
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

P = ParamSpec("P")
T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[2]
HOLDER = Path(__file__).with_name("holder.py")
MOUNTED = Path("/mnt")  # there is one everywhere: nothing has to be made, or removed, outside
DISK = MOUNTED / "millrace"
NETWORK = "198.18.0."  # RFC 2544: for benchmarks
STORE = 200
TEMPORARY = Path("/tmp")
SHARED_MEMORY = Path("/dev/shm")
TO_FAR, TO_NEAR = "to-far", "to-near"  # the ends of the link between the zones
HEADERS = 66  # bytes of Ethernet, IPv4 and TCP with timestamps
GOODPUT = 1448 / 1514  # of a link's rate: the rest is TCP's and Ethernet's headers
LIMIT = timedelta(hours=1)
PATIENCE = 20.0  # seconds that a kill may take
GIB = 1 << 30

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000


class RigError(RuntimeError):
    """The rig cannot be had here, or a command in it failed."""


def missing() -> str:
    """Return what stands in a rig's way on this machine, as a sentence; empty if nothing does."""
    if sys.platform != "linux":
        return "The rig is made of Linux namespaces."
    if os.geteuid():
        return "The rig makes network namespaces: only root can."
    if lacking := [name for name in ("ip", "tc", "mount") if shutil.which(name) is None]:
        return f"The rig needs {', '.join(lacking)} (Debian: iproute2, mount)."
    return ""


class _Inside:
    """A thread that lives in new namespaces."""

    def __init__(self, name: str, namespaces: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.call(_unshare, namespaces)

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in there: its sockets, files and child processes are the host's."""
        return self._pool.submit(function, *args, **kwargs).result()

    def leave(self) -> None:
        """End the thread, and with it what only it kept."""
        self._pool.shutdown()


def _unshare(namespaces: int) -> None:
    # os.unshare is of Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(namespaces):
        fault = os.strerror(ctypes.get_errno())
        raise RigError(f"New namespaces are not allowed here: {fault}.")


class Host:
    """One machine of the rig.

    Attributes:
        name: ``n0`` and so on, or ``store``.
        address: Its IPv4 address.
        rate_mbit: The rate of its link, each way, in Mbit/s of Ethernet frames.
    """

    def __init__(
        self, name: str, number: int, rate_mbit: float, *, disk_bytes: int, limit: timedelta
    ) -> None:
        """Make its namespaces, its first process and its disk; `Rig` connects it."""
        self.name = name
        self.address = f"{NETWORK}{number}"
        self.rate_mbit = rate_mbit
        self._started: list[subprocess.Popen[Any]] = []
        self._inside = _Inside(name, NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET)
        try:
            self._holder = self.call(self._hold, limit)
        except BaseException:
            self._inside.leave()
            raise
        try:
            self.call(self._mount, disk_bytes)
        except BaseException:
            self.stop()
            raise

    def _hold(self, limit: timedelta) -> subprocess.Popen[bytes]:
        socket.sethostname(self.name)
        command = [sys.executable, "-I", "-S", str(HOLDER), str(limit.total_seconds())]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        assert holder.stdout is not None
        with holder.stdout as said:
            said.readline()  # it runs: what it was started from may be covered now
        return holder

    def _mount(self, size: int) -> None:
        tmpfs = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "rig"]
        _command("mount", "--make-rprivate", "/")
        _command("mount", "-t", "proc", "proc", "/proc")
        _command(*tmpfs, str(SHARED_MEMORY))
        aside = {SHARED_MEMORY / str(n): place for n, place in enumerate(_kept())}
        for held, place in aside.items():
            held.mkdir()
            _command("mount", "--bind", str(place), str(held))
        _command(*tmpfs, str(MOUNTED))
        (DISK / "tmp").mkdir(parents=True)
        (DISK / "tmp").chmod(0o1777)
        _command("mount", "--bind", str(DISK / "tmp"), str(TEMPORARY))
        for held, place in aside.items():
            place.mkdir(parents=True)
            _command("mount", "--bind", str(held), str(place))
            _command("umount", str(held))
            held.rmdir()

    @property
    def holder(self) -> int:
        """The process id of its first process, as the machine outside counts."""
        return self._holder.pid

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the host: the sockets and files that it opens are the host's.

        One at a time, and it must not start threads: they could not be born in there.
        """
        return self._inside.call(function, *args, **kwargs)

    def popen(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in the host, in the repository's folder and a session of its own.

        Args:
            command: The program and its arguments.
            env: Added to the environment.
            options: As of `subprocess.Popen`.
        """
        asked: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "cwd": REPOSITORY,
            "env": {**_environment(), **(env or {})},
            "start_new_session": True,
            **options,
        }
        child = self.call(subprocess.Popen, [str(word) for word in command], **asked)
        self._started = [one for one in self._started if one.poll() is None]
        self._started.append(child)
        return child

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 60.0,
        given: str = "",
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command in the host to its end; what it printed.

        Args:
            command: The program and its arguments.
            timeout: Seconds after which it is killed.
            given: What it reads from its standard input.
            env: Added to the environment.

        Raises:
            RigError: It failed, or took too long.
        """
        pipe = subprocess.PIPE
        with self.popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
            try:
                out, fault = child.communicate(given, timeout=timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                raise RigError(f"{command[0]} took more than {timeout} s on {self.name}.") from None
            except BaseException:
                child.kill()
                raise
        if child.returncode:
            said = fault.strip() or out.strip()
            raise RigError(f"{command[0]} ended with {child.returncode} on {self.name}: {said}")
        return out

    def pids(self) -> list[int]:
        """Its processes but the first and those that have ended, as the machine outside counts."""
        ours = _namespace(self.holder)
        found = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [
            pid
            for pid in found
            if pid != self.holder and _namespace(pid) == ours and not _ended(pid)
        ]

    def kill(self) -> None:
        """SIGKILL all that runs in it. Its disk and its link stay: something may start anew.

        Peers see closed connections. For a machine that vanishes, `unplug` it first.

        Raises:
            RigError: Something did not go within 20 s.
        """
        self.signal("KILL")
        until = time.monotonic() + PATIENCE
        while any(one.poll() is None for one in self._started) or self.pids():
            if time.monotonic() > until:
                raise RigError(f"Something on {self.name} outlives SIGKILL.")
            time.sleep(0.005)
        self._started.clear()

    def signal(self, name: str) -> None:
        """Send a signal to all that runs in it: ``STOP`` freezes the host, ``CONT`` thaws it."""
        self.call(_command, "sh", "-c", f"kill -{name} -1 2>/dev/null || true")

    def stop(self) -> None:
        """Kill what runs in it, and give all that it is made of back."""
        self._holder.kill()
        for one in self._started:
            one.wait()  # the first process cannot go before every other has been waited for
        self._holder.wait()
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._inside.leave()


class Rig:
    """Hosts that see each other. Made by `Rig.start`; a context manager that takes it down.

    Attributes:
        nodes: The hosts ``n0``, ``n1`` and so on; those of the far zone come last.
        far: The hosts of the far zone.
        store: The host for the store.
    """

    def __init__(
        self,
        nodes: Sequence[Host],
        store: Host,
        switch: _Inside,
        *,
        far: int = 0,
        link_mbit: float = 0.0,
    ) -> None:
        """Connect hosts by bridges in ``switch``; `start` makes them."""
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
        """Make a rig.

        Args:
            nodes: How many, besides the store's.
            rate_mbit: The rate of each node's link, each way, in Mbit/s.
            store_mbit: The rate of the store's.
            far: How many of the nodes are in the far zone.
            link_mbit: The rate of the link that leads there, each way.
            disk_bytes: The most that a host's disk holds: memory, once it is written.
            limit: When all hosts are killed, whatever happens.

        Raises:
            RigError: There can be none here; the sentence says why.
        """
        if reason := missing():
            raise RigError(reason)
        with ExitStack() as stack:  # takes down what there is if the rest of it fails
            switch = _Inside("switch", NEWNET)
            stack.callback(switch.leave)

            def host(name: str, number: int, rate: float) -> Host:
                made = Host(name, number, rate, disk_bytes=disk_bytes, limit=limit)
                stack.callback(made.stop)
                return made

            made = [host(f"n{i}", i + 1, rate_mbit) for i in range(nodes)]
            store = host("store", STORE, store_mbit)
            rig = cls(made, store, switch, far=far, link_mbit=link_mbit)
            rig._stack = stack.pop_all()
        return rig

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All of them: the nodes, and the store."""
        return (*self.nodes, self.store)

    def _connect(self) -> None:
        lines = ["link add bridge type bridge", "link set bridge up"]
        for host in self.hosts:
            lines.append(f"link add {host.name} type veth peer name eth0 netns {host.holder}")
            lines.append(f"link set {host.name} master bridge up")
        self._switch.call(_batch, "ip", lines)
        for host in self.hosts:
            up = ["link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up"]
            host.call(_batch, "ip", up)
            self.shape(host, host.rate_mbit)

    def shape(self, host: Host, rate_mbit: float) -> None:
        """Give a host's link another rate, both ways."""
        host.rate_mbit = rate_mbit
        for call, device in ((host.call, "eth0"), (self._switch.call, host.name)):
            # The burst takes a whole segment of TCP offload (64 KiB), else each is cut up here.
            tbf = f"tbf rate {rate_mbit}mbit burst 128kb latency 20ms"
            call(_batch, "tc", [f"qdisc replace dev {device} root {tbf}"])

    def _connect_far(self, mbit: float) -> None:
        lines = ["link add far type bridge", "link set far up"]
        lines.append(f"link add {TO_FAR} type veth peer name {TO_NEAR}")
        lines += [f"link set {TO_FAR} master bridge up", f"link set {TO_NEAR} master far up"]
        lines += [f"link set {host.name} master far" for host in self.far]
        self._switch.call(_batch, "ip", lines)
        tbf = f"tbf rate {mbit}mbit burst 128kb latency 50ms"
        for device in (TO_FAR, TO_NEAR):
            self._switch.call(_batch, "tc", [f"qdisc replace dev {device} root {tbf}"])

    def crossed(self) -> tuple[int, int]:
        """Payload that has crossed the link, in bytes of TCP: to the far zone, and back."""
        there, back = (self._switch.call(_payload, device) for device in (TO_FAR, TO_NEAR))
        return there, back

    def unplug(self, host: Host) -> None:
        """Pull a host's cable: its peers hear nothing more, not even a closed connection."""
        self._switch.call(_batch, "ip", [f"link set {host.name} down"])

    def plug(self, host: Host) -> None:
        """Put the cable back."""
        self._switch.call(_batch, "ip", [f"link set {host.name} up"])

    def stop(self) -> None:
        """Take the rig down."""
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


def _kept() -> list[Path]:
    """Return the folders that hosts must see though they have their own: our code, our Python."""
    ours = (REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
    hidden = {
        place
        for place in ours
        if any(place.is_relative_to(folder) for folder in (MOUNTED, TEMPORARY, SHARED_MEMORY))
    }
    return [place for place in hidden if hidden.isdisjoint(place.parents)]


def _environment() -> dict[str, str]:
    """Ours, less what leads out of the rig."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return {**kept, "TMPDIR": str(TEMPORARY)}


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""


def _ended(pid: int) -> bool:
    """Tell whether all that is left of a process is its exit code, or nothing."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, threads = fields[0], int(fields[17])
        return state in "ZX" and threads <= 1  # the first thread ends before the others
    return True


def _payload(device: str) -> int:
    """Bytes that a queue has sent, without the headers of its packets."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", device, "root"]
    (queue,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return queue["bytes"] - HEADERS * queue["packets"]


def _command(*words: str) -> None:
    _fed(words, "")


def _batch(tool: str, lines: Sequence[str]) -> None:
    _fed([tool, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def _fed(words: Sequence[str], text: str) -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RigError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
