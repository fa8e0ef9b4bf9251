"""Machines run for real: what they install and run, what they hold, and how they end themselves."""

import base64
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from pydantic import SecretStr

from millrace import errors
from millrace.progress import Event
from millrace.rentals import (
    OfferRequest,
    Program,
    Rental,
    RentalSettings,
    RentalTimeouts,
    StorageGrant,
    VastAccount,
    VastClient,
)
from millrace.rentals.guest.traffic import count_traffic
from millrace.rentals.progress_events import OutputPrinted
from millrace.storage import Right, StoreSpec
from millrace.testing.credentials import make_credentials
from millrace.testing.process import REPOSITORY
from millrace.testing.rgw import RGW, Key
from millrace.testing.vast import VastServer
from tests.prefect_server import wait_until
from tests.support.packages import link_requirements

SETTINGS = """
dataset: data/words
source:
  kind: jsonl
  include: ["*.jsonl"]
  columns: {txt: text}
  url: file://${PWD}/words
store:
  url: ${MILLRACE_STORE}
  endpoint: ${AWS_ENDPOINT_URL}
  credentials:
    access_key_id: ${MILLRACE_WRITE_ACCESS_KEY_ID}
    secret_access_key: ${MILLRACE_WRITE_SECRET_ACCESS_KEY}
    session_token: ${MILLRACE_WRITE_SESSION_TOKEN}
execution: {workers: 0}
"""
VENV = ".millrace/program/.venv"
UNTIL_SEEN = "while [ ! -e ~/seen ]; do sleep 0.1; done"


def read_line(event: Event) -> str:
    """Return the line that a machine has printed; empty for another event."""
    return event.text if isinstance(event, OutputPrinted) else ""


@pytest.fixture
def real(vast: VastServer) -> Iterator[str]:
    """A world whose machines are processes here; the account's key."""
    yield vast.reset(real=True, rate=1.0, strict=False)
    vast.reset()


def settings_of(
    vast: VastServer, key: str, store: StoreSpec, *, max_attempts: int = 5, **more: Any
) -> RentalSettings:
    return RentalSettings(
        name="fleet",
        store=store,
        account=VastAccount(api_key=SecretStr(key), server_url=vast.url),
        request=OfferRequest(max_hourly=2.0, max_total=5.0, max_lifetime=timedelta(hours=1)),
        timeouts=RentalTimeouts(poll_interval=timedelta(seconds=1), max_attempts=max_attempts),
        **more,
    )


def everything_of(entry: dict[str, Any]) -> Iterator[bytes]:
    """All that a machine can see of ours: its files, and the environments of its processes."""
    for folder, _, names in os.walk(entry["home"]):
        for name in names:
            path = Path(folder) / name
            if path.is_file() and not path.is_symlink() and "site-packages" not in path.parts:
                yield path.read_bytes()
    session = os.getsid(entry["process"])
    for found in Path("/proc").glob("[0-9]*"):
        environ = b""
        try:
            environ = (found / "environ").read_bytes()
        except OSError:
            continue
        mine = f"CONTAINER_ID={entry['id']}".encode() in environ
        if mine or (found.name.isdecimal() and _session(found) == session):
            yield environ


def _session(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return -1


class Counters:
    """The kernel's files that say what a machine has moved."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text("0f0a\n")
        (proc / "self/ns").mkdir(parents=True)
        (proc / "net").mkdir()
        self.enter("net:[4026531840]")

    def enter(self, namespace: str) -> None:
        """Have another network namespace."""
        (self.proc / "self/ns/net").unlink(missing_ok=True)
        (self.proc / "self/ns/net").symlink_to(namespace)

    def show(self, **interfaces: tuple[int, int]) -> None:
        lines = [f"{name:>6}: {down} 1 0 0 0 0 0 0 {up} 1 0 0 0 0 0 0"
                 for name, (down, up) in interfaces.items()]  # fmt: skip
        (self.proc / "net/dev").write_text("\n".join(["Inter-|", " face |", *lines]) + "\n")


def test_bytes_count_from_the_start_of_a_machine_and_over_its_restarts(tmp_path: Path) -> None:
    counters, state = Counters(tmp_path / "proc"), tmp_path / "traffic.json"

    def count() -> tuple[int, int]:
        return count_traffic(state, counters.proc)

    counters.show(lo=(5, 5), eth0=(110 * 10**9, 7 * 10**9))  # a host that has moved much
    assert count() == (0, 0)
    counters.show(lo=(10**9, 10**9), eth0=(110 * 10**9 + 300, 7 * 10**9 + 20))
    assert count() == (300, 20)
    counters.show(eth0=(110 * 10**9 + 300, 7 * 10**9 + 20), veth1=(40, 4))
    assert count() == (340, 24)
    counters.enter("net:[4026532000]")  # the container was restarted: its counters are new
    counters.show(eth0=(1000, 100))
    assert count() == (1340, 124)
    counters.show(eth0=(3, 1))  # likewise, and the namespace has the number of the one before
    assert count() == (1343, 125)
    state.write_text("{")
    assert count() == (0, 0)


def test_bytes_count_also_while_the_disk_is_full(tmp_path: Path) -> None:
    counters, state = Counters(tmp_path / "proc"), tmp_path / "traffic.json"
    counters.show(eth0=(1000, 100))
    assert count_traffic(state, counters.proc) == (0, 0)
    blocked = state.with_suffix(".part")
    blocked.mkdir()  # so the state cannot be written
    for more in (300, 700):
        counters.show(eth0=(1000 + more, 100 + more))
        assert count_traffic(state, counters.proc) == (more, more)
    blocked.rmdir()
    counters.show(eth0=(2000, 1100))
    assert count_traffic(state, counters.proc) == (1000, 1000)


def moved() -> int:
    """Bytes that this machine has received over all interfaces but the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if "lo:" not in line)


def test_a_machine_installs_a_program_and_runs_it_with_what_it_may_reach(
    vast: VastServer, rgw: RGW, bucket: str, repository: Path, tmp_path: Path,
) -> None:  # fmt: skip
    packages = tmp_path / "packages"  # the image has what a worker without extras needs, but for:
    link_requirements(packages, without={"orjson", "zstandard"})
    key = vast.reset(real=True, rate=1.0, strict=False, image=str(packages), index=True)
    role = rgw.create_role(f"machine-{secrets.token_hex(4)}")
    full = StoreSpec(
        url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full)
    )
    words = "\n".join(json.dumps({"text": f"word {number}"}) for number in range(1000))
    settings = settings_of(
        vast, key, full, role_arn=role,
        storage_grants=(StorageGrant(prefix="data/", access=Right.WRITE),),
        program=Program(
            repo_url=repository.as_uri(),
            command=("bash", "-c", f"millrace run settings.yaml && {UNTIL_SEEN}"),
            files={"settings.yaml": SETTINGS, "words/a.jsonl": words},
        ),
    )  # fmt: skip
    told: list[str] = []
    before = moved()
    account = VastClient(SecretStr(key), vast.url)
    with Rental(
        settings, vast=account, progress=lambda event: told.append(read_line(event))
    ) as rental:
        rental.wait_until_ready()
        (entry,) = vast.list_alive()
        held = b"\n".join(everything_of(entry))
        fetched = {one.name for one in Path(entry["home"]).glob(f"{VENV}/lib/*/site-packages/*")}
        (Path(entry["home"]) / "seen").touch()
        rental.wait_until_done()
    assert vast.list_alive() == []
    assert fetched >= {"orjson", "zstandard"}
    client = rgw.make_client(rgw.full)
    keys = {one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]}
    assert "data/words/manifest.json" in keys
    manifest = client.get_object(Bucket=bucket, Key="data/words/manifest.json")["Body"].read()
    assert b"1000" in manifest
    assert any("samples" in line for line in told)
    beat = client.get_object(Bucket=bucket, Key="_machines/fleet/000000/beat.json")["Body"].read()
    assert json.loads(beat)["received"] <= moved() - before  # not what the host has moved before

    # What it held: nothing of ours but credentials for two prefixes, that end with the rental.
    vast.reset()
    for secret in (key, rgw.full.secret_access_key, rgw.read_only.secret_access_key):
        assert secret.encode() not in held
    assert b"CONTAINER_ID=" in held
    assert b"PYTEST_CURRENT_TEST" not in held
    config = json.loads(base64.b64decode(entry["body"]["env"]["MILLRACE_CONFIG"]))
    for name, own, others in (
        ("store", "_machines/fleet/000000/x", ["_machines/fleet/000001/x", "_rentals/x", "data/x"]),
        ("write_store", "data/x", ["data2/x", "x", "_machines/fleet/000000/x", "_rentals/x"]),
    ):
        given = config[name]["credentials"]
        assert given["expires_at"]
        pair = Key(given["access_key_id"], given["secret_access_key"], given["session_token"])
        its = rgw.make_client(pair)
        its.put_object(Bucket=bucket, Key=own, Body=b"x")
        for other in others:
            with pytest.raises(ClientError, match=r"AccessDenied|403"):
                its.put_object(Bucket=bucket, Key=other, Body=b"x")
        with pytest.raises(ClientError, match=r"AccessDenied|403"):
            its.list_objects_v2(Bucket=bucket)
    assert config["read_store"] is None


@pytest.mark.soak
def test_a_machine_whose_image_has_everything_fetches_nothing(
    vast: VastServer, tmp_path: Path, repository: Path
) -> None:
    packages = sysconfig.get_path("purelib")
    key = vast.reset(real=True, rate=1.0, strict=False, image=packages)  # as the demo's machines
    program = Program(
        repo_url=repository.as_uri(), extras=("gradients",), command=("millrace", "run", "--help")
    )
    told: list[str] = []
    with Rental(
        settings_of(vast, key, StoreSpec(url=(tmp_path / "store").as_uri()), program=program),
        progress=lambda event: told.append(read_line(event)),
    ) as rental:
        rental.wait_until_done()
    vast.reset()
    assert any(line.startswith("Usage: ") for line in told)


def test_what_cannot_be_installed_is_said(
    vast: VastServer, real: str, tmp_path: Path, repository: Path
) -> None:
    store = StoreSpec(url=(tmp_path / "store").as_uri())
    program = Program(repo_url=repository.as_uri(), repo_ref="gone", command=("true",))
    rental = Rental(settings_of(vast, real, store, program=program, max_attempts=1))
    with pytest.raises(errors.MachineError, match="did not start"), rental:
        rental.wait_until_ready()
    (entry,) = vast.list_machines()
    setup = json.loads((tmp_path / "store/_machines/fleet/000000/setup.json").read_text())
    assert setup["state"] == "failed"
    assert re.search("has no gone: name a branch, a tag or a commit", setup["detail"])
    assert entry["destroyed"]


@pytest.mark.parametrize("gone", ["owner", "time", "unreadable"])
def test_a_machine_destroys_itself(vast: VastServer, real: str, tmp_path: Path, gone: str) -> None:
    number = vast.plant("millrace/x")
    (entry,) = [one for one in vast.list_alive() if one["id"] == number]
    beat = tmp_path / "owner.txt"
    if gone != "unreadable":
        beat.write_text("here")
    environment = {
        "MILLRACE_DEADLINE": "9999999999",
        "MILLRACE_LIFETIME": "1" if gone == "time" else "1000",
        "MILLRACE_HEARTBEAT_TIMEOUT": "1000" if gone == "time" else "1",
        "MILLRACE_OWNER_URL": beat.as_uri(),
        "MILLRACE_VAST_URL": vast.url,
        "CONTAINER_ID": str(number),
    }
    vast.fail_next(int(gone == "owner"), "error500", "delete")
    script = (REPOSITORY / "millrace/rentals/guest/watchdog.py").read_text()
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-c", script], env=environment, stdin=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert watchdog.stdin
    with watchdog.stdin as pipe:
        pipe.write(entry["key"].encode())
    try:
        wait_until(lambda: all(one["id"] != number for one in vast.list_alive()) or None, "its end")
    finally:
        os.killpg(watchdog.pid, signal.SIGKILL)
        watchdog.wait()
    (entry,) = [one for one in vast.list_machines() if one["id"] == number]
    assert entry["by"] == "itself"


LOOKS = """
import os, pathlib, sys
key, found = sys.stdin.read().encode(), []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for name in ("environ", "cmdline"):
        try:
            if key in (process / name).read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\\0", b" ").decode())
        except OSError:
            pass
watchdog = pathlib.Path("/proc") / os.environ["WATCHDOG"]
try:
    (watchdog / "mem").open("rb").close()
    found.append("its memory")
except PermissionError:
    pass
print(found)
"""


def test_what_runs_in_a_machine_cannot_read_the_key_that_destroys_it(tmp_path: Path) -> None:
    key = secrets.token_hex(32)
    guest = REPOSITORY / "millrace/rentals/guest"
    texts = {"MILLRACE_TRAFFIC": "traffic.py", "MILLRACE_WATCHDOG": "watchdog.py"}
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path),
        "CONTAINER_ID": "1", "CONTAINER_API_KEY": key, "MILLRACE_VAST_URL": "http://127.0.0.1:9",
        "MILLRACE_DEADLINE": "9999999999", "MILLRACE_LIFETIME": "1000",
        "MILLRACE_HEARTBEAT_TIMEOUT": "1000",
        "MILLRACE_OWNER_URL": (tmp_path / "owner.txt").as_uri(),
        "MILLRACE_INSTALL": base64.b64encode(b"print('installed')").decode(),
        **{
            name: base64.b64encode((guest / text).read_bytes()).decode()
            for name, text in texts.items()
        },
    }  # fmt: skip
    script = (guest / "onstart.sh").read_text()
    machine = subprocess.Popen(  # as the provider, whose own process ends with the script
        ["bash", "-c", script], env=environment, cwd=tmp_path, start_new_session=True
    )
    try:
        assert machine.wait() == 0
        watchdogs = wait_until(lambda: _watching(machine.pid), "the watchdog and its child")
        # As root of a container, which has no CAP_SYS_PTRACE.
        without = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
        for watchdog in watchdogs:
            looked = subprocess.run(
                [*without, "--", sys.executable, "-c", LOOKS], input=key, text=True, check=True,
                capture_output=True, env={"WATCHDOG": str(watchdog)},
            )  # fmt: skip
            assert looked.stdout.strip() == "[]", looked.stdout
    finally:
        os.killpg(machine.pid, signal.SIGKILL)


def _watching(session: int) -> list[int] | None:
    """The watchdog and the child that watches, once both are there and hidden."""
    found = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _session(process) == session
        and _runs_the_watchdog(_read(process / "cmdline").split(b"\0"))
        and _read(process / "stat").split(b") ")[-1][:1] != b"Z"
    ]
    return found if len(found) == 2 else None


def _runs_the_watchdog(command: list[bytes]) -> bool:
    """Tell Python from the copies of bash before their exec, which bear the whole script."""
    return command[0] == b"python3" and b"MILLRACE_WATCHDOG" in command[-2]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
