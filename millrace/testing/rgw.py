"""Real Ceph RGW on one machine, the S3 server of the tests.

One monitor, one OSD (BlueStore on a sparse file, or in memory) and one gateway run as root, on
127.0.0.1 only, with all data in one folder. ``python -m millrace.testing.rgw FOLDER`` runs a
cluster in the foreground.

RGW 16.2 differs from the S3 documentation as follows:

- Of several ``PUT`` with ``If-None-Match: *``, exactly one succeeds (412 for the others).
  ``If-Match`` answers 412 for any ETag. Conditions on ``CompleteMultipartUpload`` are ignored.
- ``x-amz-checksum-*`` is ignored; ``Content-MD5`` and ``x-amz-content-sha256`` are checked.
- STS session policies are enforced (the intersection of the policies of role and session). The JSON
  of a policy must have no spaces: RGW reads the ``+`` of the form as a plus sign, and then answers
  400 ``Unknown``. A policy has at most 2048 characters. A session lasts from 900 to 3600 seconds.
- Under a session policy, ``DeleteObjects`` is always denied: with 403 for the whole request, or for
  each key if the policy allows ``s3:DeleteObject`` on the ARN of the bucket. ``DeleteObject``
  works.
- Under a session policy, ``ListMultipartUploads`` has no ``s3:prefix``, so a condition on the
  prefix always denies it. ``ListObjectsV2`` has it.
- Under a session policy, GET and HEAD outside of the prefix answer 404 for a missing object, and
  403 for an existing one.
- The read-only limit of a subuser holds for objects only. The subuser can create buckets, and can
  assume each role that trusts its user, with all rights of the role.
- A garbage collector frees the space of deleted objects, here after about 5 to 10 seconds.
"""

import argparse
import contextlib
import dataclasses
import json
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from millrace.testing.key import Key, connect
from millrace.testing.process import Child, find_free_ports

__all__ = ["RGW", "Key"]

APT_LINE = "apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-mgr ceph-base"
PROGRAMS = (
    "ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin",
)  # fmt: skip
MIB = 1 << 20
GIB = 1 << 30

CONFIGURATION = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:127.0.0.1:{monitor}/0]
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
admin socket =
run dir = {folder}/run
log file = {folder}/log/$name.log
mon cluster log file = {folder}/log/cluster.log
crash dir = {folder}/crash
paxos propose interval = 0.02
paxos min wait = 0.01
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail warn = 2
mon data avail crit = 1
debug mon = 0/0
debug osd = 0/0
debug ms = 0/0
debug bluestore = 0/0
debug rocksdb = 0/0
debug paxos = 0/0

[mon.a]
mon data = {folder}/mon

[osd]
osd data = {folder}/osd
osd memory target = 1500000000
osd objectstore = {object_store}
memstore device bytes = {capacity}
bluestore block create = true
bluestore block size = {capacity}
bluestore fsck on mount = false

[client.rgw]
rgw crypt require ssl = false
rgw frontends = beast endpoint=127.0.0.1:{gateway} tcp_nodelay=1
rgw data = {folder}/rgw
rgw dns name = localhost
rgw sts key = {sts_key}
rgw s3 auth use sts = true
rgw gc obj min wait = 5
rgw gc processor period = 5
rgw dynamic resharding = false
rgw multipart min part size = {min_part}
debug rgw = 1/1
"""


class RGW:
    """Running cluster, started by `RGW.start`. As a context manager, it stops at the exit.

    Attributes:
        endpoint: URL of the gateway, ``http://127.0.0.1:PORT``.
        full: Key of the owner of each bucket that `create_bucket` creates.
        read_only: Key of a subuser of the owner, who can read and list, but not write objects.
        other: Key of a second user, who owns no bucket.
    """

    def __init__(self, folder: Path, state: dict[str, str]) -> None:
        """Represent the cluster of a folder. Use `start` to start one."""
        self.folder = folder
        self.endpoint = f"http://127.0.0.1:{state['gateway']}"
        self.full = Key("full", state["full"])
        self.read_only = Key("readonly", state["readonly"])
        self.other = Key("other", state["other"])
        self._children: list[Child] = []

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        min_part: int = 5 * MIB,
        capacity: int = 40 * GIB,
        in_memory: bool = False,
    ) -> Self:
        """Start a new cluster, or restart the existing cluster of ``folder`` with its data.

        The cluster accepts requests when the method returns. A new cluster takes about 8 s, a
        stopped one 5 s, and a killed one 10 s.

        Args:
            folder: Folder of all data of the cluster. It is created if missing.
            min_part: Smallest size of the parts of an upload, except the last, in bytes.
            capacity: Size of the disk, a sparse file, in bytes. The OSD aborts when it is full.
            in_memory: Whether the OSD keeps the objects in memory, so that requests cost less. The
                objects are written to the disk by `stop`, and lost by `kill`.

        Raises:
            RuntimeError: The Debian packages are missing, or the cluster does not start.
        """
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise RuntimeError(
                f"Ceph is not installed here (no {', '.join(missing)}). Install it with: {APT_LINE}"
            )
        folder = folder.absolute()
        noted = folder / "state.json"
        fresh = not noted.exists()
        if fresh:
            noted_state = _create_cluster(
                folder,
                min_part=min_part,
                capacity=capacity,
                object_store="memstore" if in_memory else "bluestore",
            )
        else:
            noted_state = json.loads(noted.read_text())
        rgw = cls(folder, noted_state)
        try:
            rgw._run(noted_state, fresh=fresh)
        except BaseException:
            rgw.kill()
            raise
        if fresh:
            whole = noted.with_suffix(".new")
            whole.write_text(json.dumps(noted_state))
            whole.rename(noted)
        return rgw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def create_bucket(self, name: str) -> str:
        """Create a bucket of `full` unless it exists, and return its name."""
        self.make_client(self.full).create_bucket(Bucket=name)
        return name

    def make_client(self, key: Key, *, service: str = "s3") -> Any:
        """Return a boto3 client of S3 or STS, with path-style URLs and without retries."""
        return connect(self.endpoint, key, service=service)

    def create_role(self, name: str) -> str:
        """Create a role with all rights that `full` can assume, and return its ARN.

        The session policy of ``assume_role`` limits the rights of the credentials.
        """
        trust = {
            "Effect": "Allow",
            "Principal": {"AWS": ["arn:aws:iam:::user/full"]},
            "Action": ["sts:AssumeRole"],
        }
        everything = {"Effect": "Allow", "Action": ["s3:*"], "Resource": "arn:aws:s3:::*"}
        named = f"--role-name={name}"
        made = self._admin(
            "role", "create", named, "--path=/", f"--assume-role-policy-doc={_format_policy(trust)}"
        )
        self._admin(
            "role-policy",
            "put",
            named,
            "--policy-name=all",
            f"--policy-doc={_format_policy(everything)}",
        )
        return json.loads(made)["Arn"]

    def assume_role(self, role: str, *statements: dict[str, Any], seconds: int = 900) -> Key:
        """Return temporary credentials of a role. Statements limit their rights."""
        session: dict[str, Any] = {"Policy": _format_policy(*statements)} if statements else {}
        given = self.make_client(self.full, service="sts").assume_role(
            RoleArn=role, RoleSessionName="session", DurationSeconds=seconds, **session
        )["Credentials"]
        return Key(given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"])

    def list_requests(self) -> list[str]:
        """Return the lines of the gateway's access log, one per request, in order of time.

        A line reads ``127.0.0.1 - USER [TIME] "GET /bucket/key HTTP/1.1" 200 BYTES RANGE "-"
        "AGENT" - latency=Ns``. All requests answered before the call are included.
        """
        mark = f"/?mark={uuid.uuid4().hex}"
        with contextlib.closing(urlopen(f"{self.endpoint}{mark}")):
            pass
        log = self.folder / "log" / "client.rgw.log"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            text = log.read_text(errors="replace")
            if mark in text:
                seen = [line.split(": ", 2)[2] for line in text.splitlines() if " beast: " in line]
                return [line for line in seen if '"GET /?mark=' not in line]
            time.sleep(0.01)
        raise RuntimeError(f"RGW does not write its log {log}")

    def stop(self) -> None:
        """Stop the servers gracefully. `start` on the same folder restarts the cluster."""
        for child in reversed(self._children):
            child.stop()
        self._children.clear()

    def kill(self) -> None:
        """Kill all processes with SIGKILL, like a power failure."""
        for child in reversed(self._children):
            child.kill()
        self._children.clear()

    def is_running(self) -> bool:
        """Decide whether all processes of the cluster are running."""
        return bool(self._children) and all(child.is_running() for child in self._children)

    def _run(self, state: dict[str, str], *, fresh: bool) -> None:
        self._spawn("ceph-mon", "-i", "a")
        if fresh:
            _run_tool(self.folder, "ceph", "osd", "new", state["osd"])
            _run_tool(self.folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", state["osd"])
        self._spawn("ceph-osd", "-i", "0")
        if fresh:
            self._create_users(state)
        gateway = self._spawn("radosgw", "-n", "client.rgw")
        port = int(state["gateway"])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and gateway.is_running():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return
            time.sleep(0.05)
        raise RuntimeError(f"radosgw does not listen at {self.endpoint}:\n{gateway.read_tail()}")

    def _create_users(self, state: dict[str, str]) -> None:
        for uid in ("full", "other"):
            self._admin(
                "user", "create", f"--uid={uid}", f"--display-name={uid}",
                f"--access-key={uid}", f"--secret-key={state[uid]}", "--max-buckets=100000",
            )  # fmt: skip
        self._admin(
            "subuser", "create", "--uid=full", "--subuser=full:readonly", "--access=read",
            "--key-type=s3", "--access-key=readonly", f"--secret-key={state['readonly']}",
        )  # fmt: skip

    def _admin(self, *arguments: str) -> str:
        return _run_tool(self.folder, "radosgw-admin", "-n", "client.rgw", *arguments)

    def _spawn(self, program: str, *arguments: str) -> Child:
        log = self.folder / "log" / f"{program}.err"
        command = [program, "-c", str(self.folder / "ceph.conf"), *arguments, "-f"]
        child = Child(command, log=log, folder=self.folder)
        self._children.append(child)
        return child


def _create_cluster(
    folder: Path, *, min_part: int, capacity: int, object_store: str
) -> dict[str, str]:
    """Create the files that the three servers need before their first start."""
    if folder.exists() and any(folder.iterdir()):
        raise RuntimeError(
            f"{folder} is neither empty nor the folder of a cluster: use another folder."
        )
    for name in ("mon", "osd", "rgw", "run", "log", "crash"):
        (folder / name).mkdir(parents=True)
    monitor, gateway = find_free_ports(2)
    fsid = str(uuid.uuid4())
    state = {
        "gateway": str(gateway),
        "osd": str(uuid.uuid4()),
        "full": secrets.token_hex(20),
        "readonly": secrets.token_hex(20),
        "other": secrets.token_hex(20),
    }
    (folder / "ceph.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            fsid=fsid,
            monitor=monitor,
            gateway=gateway,
            capacity=capacity,
            object_store=object_store,
            min_part=min_part,
            sts_key=secrets.token_hex(8),
        )
    )
    keyring = str(folder / "keyring")
    for name, caps in {
        "mon.": {"mon": "allow *"},
        "client.admin": {"mon": "allow *", "osd": "allow *"},
        "client.rgw": {"mon": "allow rw", "osd": "allow rwx"},
        "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
    }.items():
        pairs = [word for who, what in caps.items() for word in ("--cap", who, what)]
        create = [] if (folder / "keyring").exists() else ["--create-keyring"]
        _run_tool(folder, "ceph-authtool", keyring, *create, "-n", name, "--gen-key", *pairs)
    monmap = str(folder / "monmap")
    address = f"[v2:127.0.0.1:{monitor}]"
    _run_tool(folder, "monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
    _run_tool(folder, "ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
    return state


def _run_tool(folder: Path, program: str, *arguments: str) -> str:
    """Run a tool of Ceph against the cluster of ``folder``, and return its output."""
    done = subprocess.run(
        [program, *arguments, "-c", str(folder / "ceph.conf")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program} {arguments[0]} failed ({done.returncode}): {done.stderr}")
    return done.stdout


def _format_policy(*statements: dict[str, Any]) -> str:
    document = {"Version": "2012-10-17", "Statement": list(statements)}
    return json.dumps(document, separators=(",", ":"))


def main() -> int:
    """Run a cluster until SIGINT or SIGTERM. A line of JSON on stdout has its URL and keys."""
    parser = argparse.ArgumentParser(
        prog="python -m millrace.testing.rgw", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="folder of all data of the cluster")
    parser.add_argument("--bucket", action="append", default=[], help="bucket to create")
    parser.add_argument("--in-memory", action="store_true", help="keep the objects in memory")
    options = parser.parse_args()
    with RGW.start(options.folder, in_memory=options.in_memory) as rgw:
        for bucket in options.bucket:
            rgw.create_bucket(bucket)
        ends = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, ends | {signal.SIGCHLD})
        keys = {"full": rgw.full, "read_only": rgw.read_only, "other": rgw.other}
        shown = {name: dataclasses.asdict(key) for name, key in keys.items()}
        print(json.dumps({"endpoint": rgw.endpoint, **shown}), flush=True)
        while signal.sigwait(ends | {signal.SIGCHLD}) not in ends:
            if not rgw.is_running():
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
