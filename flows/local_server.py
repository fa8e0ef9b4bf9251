"""A Prefect server for one command, where none is configured."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from urllib.request import urlopen

from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from blocks.setup import check_server
from millrace.errors import UnavailableError

_START_TIMEOUT = 300.0  # seconds: a busy machine imports the server for more than a minute
_POLL_INTERVAL = 0.2
_EXIT_TIMEOUT = 10.0
# The server ends with the process that holds its standard input.
_SERVER_SCRIPT = """\
import os, sys, threading
def watch():
    while os.read(0, 4096):
        pass
    os._exit(0)
threading.Thread(target=watch, daemon=True).start()
import uvicorn
uvicorn.run("prefect.server.api.server:create_app", factory=True, host="127.0.0.1",
            port=int(sys.argv[1]), log_level="error", lifespan="on")
"""


@contextlib.contextmanager
def start_local_server() -> Generator[None]:
    """Serve the Prefect API to this process while the block lasts, unless a server is configured.

    Prefect starts one by itself, too. That one ends at a Ctrl-C, before the flow run has reported
    its end to it, and is given up after 20 seconds.

    Raises:
        UnavailableError: The server does not start, or the configured one does not answer.
        ConfigurationError, DeniedError: The configured one is none, or wants a password.
    """
    if PREFECT_API_URL.value():
        check_server()
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        **get_current_settings().to_environment_variables(exclude_unset=True),
    }
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER_SCRIPT, str(port)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for the flow run, which ends it in order
        )
        try:
            url, deadline = f"http://127.0.0.1:{port}/api", time.monotonic() + _START_TIMEOUT
            while not _is_ready(url):
                if process.poll() is None and time.monotonic() < deadline:
                    time.sleep(_POLL_INTERVAL)
                    continue
                printed.seek(0)
                last = printed.read().decode(errors="replace").strip().splitlines()[-1:]
                raise UnavailableError(
                    f"The Prefect server of this command does not start: {''.join(last)} Start "
                    "one with `prefect server start`, and name it in PREFECT_API_URL."
                )
            with temporary_settings({PREFECT_API_URL: url}):
                try:
                    yield
                finally:
                    APILogHandler().flush()  # while there is a server to take the last lines
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_TIMEOUT)
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310 - on loopback
            return answer.status == 200
    except OSError:
        return False
