"""Running machines: reports of simulated ones, and processes of real ones."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from millrace.testing.vast.machines import StandInInstance
from millrace.testing.vast.world import World


def write_report(one: StandInInstance, name: str, body: Any) -> None:
    """Write a report of a simulated machine into its folder."""
    order = one.order
    assert order is not None
    path = Path(order["store"]["url"].removeprefix("file://")) / order["prefix"] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = body if isinstance(body, str) else json.dumps(body)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def run_onstart(one: StandInInstance, home: Path, world: World) -> "subprocess.Popen[bytes]":
    """Run the onstart of a real machine in its own folder and process namespace.

    The environment is clean. All processes that the onstart starts end with it.
    """
    home.mkdir(parents=True, exist_ok=True)
    variables = {
        name: value for name, value in one.body["env"].items() if re.fullmatch(r"\w+", name)
    }
    environment = {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "CONTAINER_ID": str(one.id),
        "CONTAINER_API_KEY": one.key,
        "GPU_COUNT": "0",
        **variables,
        **{f"VAST_TCP_PORT_{port}": str(one.port) for port in one.ports},
        **_make_image_environment(world),
    }
    script = f"{one.body['onstart']}\nwait\nexec sleep infinity"
    with (home / "onstart.log").open("ab") as log:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *_find_namespace_command(),
             "bash", "-c", script],
            cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def _make_image_environment(world: World) -> dict[str, str]:
    """Return environment variables for an image that has packages, including setuptools.

    pip finds the packages of the image. It contacts no index unless the world has one.
    """
    if not world.image:
        return {}
    packages = {"PYTHONPATH": world.image}
    if world.index:
        return packages
    return packages | {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # false disables the isolation
        "PIP_CONFIG_FILE": os.devnull,
    }


@cache
def _find_namespace_command() -> tuple[str, ...]:
    """Return the command prefix for a new process namespace; empty if there can be none."""
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    for ways in (apart, ("unshare", "--user", "--map-root-user", *apart[1:])):
        if subprocess.run([*ways, "true"], capture_output=True, check=False).returncode == 0:
            return ways
    return ()


def end_process(one: StandInInstance) -> None:
    """Kill the process of a real machine, and remove its folder."""
    if one.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        one.process = None
    if one.home is not None:
        shutil.rmtree(one.home, ignore_errors=True)
