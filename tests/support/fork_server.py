"""Python processes forked from one that has imported what they need.

An import of torch takes seconds, and one of Millrace's command line takes one. A `ForkServer`
imports its modules once. Each process that it starts then runs code of its own, with its own
arguments, environment, streams and limits, and can be killed as any other process.

``python -m tests.support.fork_server MODULE...`` is the server; its standard input is a socket.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from millrace.testing.process import REPOSITORY

_SIZE = struct.Struct("!I")
_CODE = struct.Struct("!i")


class ForkedProcess:
    """A process that a fork server has started, with the interface of `subprocess.Popen`.

    Attributes:
        pid: Process id.
        returncode: Exit code, or the negative number of the signal that killed it.
        stdin: Its standard input, or None.
        stdout: Its standard output, or None.
    """

    def __init__(self, pid: int, ended: int, stdin: IO[Any] | None, stdout: IO[Any] | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout = stdin, stdout
        self._ended = ended

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._take_code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code."""
        code = self._take_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[Any, None]:
        """Close the input, and return all that the process prints until its end."""
        killer = threading.Timer(timeout, self.kill) if timeout else None
        if killer:
            killer.start()
        if self.stdin is not None:
            self.stdin.close()
        said = None
        if self.stdout is not None:
            with self.stdout as stream:
                said = stream.read()
        self.wait()
        if killer:
            expired = not killer.is_alive()
            killer.cancel()
            if expired:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return said, None

    def __enter__(self) -> "ForkedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()

    def _take_code(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            told = os.read(self._ended, _CODE.size)
            os.close(self._ended)
            self.returncode = _CODE.unpack(told)[0] if told else -signal.SIGKILL
        return self.returncode


class ForkServer:
    """A process that has imported some modules, and forks. It ends with the process that made it.

    Args:
        modules: Modules that the processes need.
    """

    def __init__(self, *modules: str) -> None:
        self._line, other = socket.socketpair()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        # A library's pool of threads does not survive a fork.
        single = {"OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", *modules],
            cwd=REPOSITORY,
            env=os.environ | single,
            stdin=other,
        )
        other.close()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the server and all its processes; a fork of this process leaves them alone."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)  # forks of this process hold it too
            self._process.wait()

    def start(
        self,
        code: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        stdin: bool = False,
        stderr: IO[Any] | int | None = None,
        text: bool = True,
        new_session: bool = False,
    ) -> ForkedProcess:
        """Start a process whose standard output is a pipe.

        Args:
            code: Source that it runs as ``__main__``.
            arguments: Its ``sys.argv[1:]``.
            env: All of its environment. None: this process's.
            cwd: Its working directory.
            stdin: Make its standard input a pipe, instead of an empty file.
            stderr: A file, `subprocess.STDOUT`, or None for this process's.
            text: Open its streams as text; without it they are unbuffered.
            new_session: Make it the leader of a session.
        """
        theirs: list[int] = []
        mine: list[int] = []
        if stdin:
            reading, writing = os.pipe()
            theirs.append(reading)
            mine.append(writing)
        else:
            theirs.append(os.open(os.devnull, os.O_RDONLY))
        out, output = os.pipe()
        theirs.append(output)
        if stderr == subprocess.STDOUT:
            theirs.append(os.dup(output))
        elif stderr is None:
            theirs.append(os.dup(2))
        else:
            theirs.append(os.dup(stderr if isinstance(stderr, int) else stderr.fileno()))
        ended, ending = os.pipe()
        theirs.append(ending)
        asked = json.dumps(
            {
                "code": code,
                "arguments": arguments,
                "env": dict(os.environ if env is None else env),
                "cwd": str(cwd),
                "session": new_session,
                "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            }
        ).encode()
        try:
            with self._lock:
                socket.send_fds(self._line, [_SIZE.pack(len(asked))], theirs)
                self._line.sendall(asked)
                told = self._line.recv(_CODE.size, socket.MSG_WAITALL)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        assert told, "the fork server has ended"
        kind, buffering = ("", -1) if text else ("b", 0)
        return ForkedProcess(
            _CODE.unpack(told)[0],
            ended,
            os.fdopen(mine[0], "w" + kind, buffering) if stdin else None,
            os.fdopen(out, "r" + kind, buffering),
        )


@functools.cache
def get_fork_server(*modules: str) -> ForkServer:
    """Return the fork server of these modules; start it at the first call."""
    return ForkServer(*modules)


RUN_MODULE = """
import runpy, sys
name = sys.argv.pop(1)
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""
"""Runs the module that its first argument names, as ``python -m`` does."""


def _serve(line: socket.socket) -> None:
    children: dict[int, tuple[int, int]] = {}  # by pidfd: process id, pipe of the exit code
    waiting = selectors.DefaultSelector()
    waiting.register(line, selectors.EVENT_READ)
    try:
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not line:
                    waiting.unregister(key.fileobj)
                    os.close(key.fd)
                    pid, ending = children.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(BrokenPipeError):
                        os.write(ending, _CODE.pack(code))
                    os.close(ending)
                    continue
                head, streams, _, _ = socket.recv_fds(line, _SIZE.size, 4)
                if not head:
                    return
                body = line.recv(_SIZE.unpack(head)[0], socket.MSG_WAITALL)
                pid = os.fork()
                if not pid:
                    _become(json.loads(body), streams, [line.fileno(), *children])
                for stream in streams[:3]:
                    os.close(stream)
                watch = os.pidfd_open(pid)
                children[watch] = pid, streams[3]
                waiting.register(watch, selectors.EVENT_READ)
                line.sendall(_CODE.pack(pid))
    finally:
        for pid, _ in children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _become(asked: dict[str, Any], streams: list[int], server: list[int]) -> NoReturn:
    """Be the process that was asked for."""
    code = 1
    try:
        for number, stream in enumerate(streams[:3]):
            os.dup2(stream, number)
        os.closerange(3, max(streams + server) + 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked["session"]:
            os.setsid()
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(asked["files"]))
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        sys.argv = ["-c", *asked["arguments"]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(asked["code"], main.__dict__)
        code = 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            code = ended.code or 0
        else:
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:  # noqa: BLE001 - printed as an interpreter prints it
        traceback.print_exc()
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End as an interpreter does: wait for threads, and call what is registered."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code & 0xFF)


def main() -> None:
    """Import the modules, and fork."""
    line = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork has only one of them"
    signal.signal(signal.SIGINT, lambda *_: None)  # the end of the parent ends it
    gc.collect()
    gc.freeze()
    _serve(line)


if __name__ == "__main__":
    main()
