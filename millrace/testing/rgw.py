"""A real Ceph RGW on one machine: the S3 server that the tests hold everything against.

One monitor, one OSD (BlueStore on a sparse file, or in memory) and one gateway, as root, on
127.0.0.1 only, everything under one folder. ``python -m millrace.testing.rgw FOLDER`` runs one in
the foreground.

What RGW 16.2 does that a reader of the S3 documentation would not expect:

- ``PUT`` with ``If-None-Match: *`` has exactly one winner (412 for the others); ``If-Match``
  answers 412 whatever the ETag; conditions on ``CompleteMultipartUpload`` are ignored.
- ``x-amz-checksum-*`` is ignored; ``Content-MD5`` and ``x-amz-content-sha256`` are checked.
- STS session policies are enforced (the intersection of the role's and the session's), but the
  policy must be JSON without a blank: RGW reads the form's ``+`` as a plus sign, and then answers
  400 ``Unknown``. At most 2048 characters; a session lasts from 900 to 3600 seconds.
- Under a session policy ``DeleteObjects`` is always denied: with 403 as a whole, or, when the
  policy allows ``s3:DeleteObject`` on the bucket's own ARN, key by key. ``DeleteObject`` works.
- Under a session policy ``ListMultipartUploads`` carries no ``s3:prefix``, so a condition on the
  prefix always denies it. ``ListObjectsV2`` does carry it.
- Under a session policy, an object that is not there is 404 to GET and HEAD outside of the prefix
  too; one that is there is 403.
- A read-only subuser acts for its user outside of objects: it may create buckets, and it may
  assume each role that trusts the user, with all that the role allows.
- Deleted data is given back by a garbage collector, here after about 5 to 10 seconds.
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
    """A running cluster. Made by `RGW.start`; a context manager that stops it.

    Attributes:
        endpoint: Where it listens, ``http://127.0.0.1:PORT``.
        full: The owner of every bucket that `create_bucket` makes.
        read_only: A subuser of that owner: reads and lists, writes no object.
        other: A second user, who owns nothing.
    """

    def __init__(self, folder: Path, state: dict[str, str]) -> None:
        """Describe the cluster of a folder; `start` runs it."""
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
        """Start a cluster, or the one that an earlier start has left in ``folder``, data and all.

        It serves when this returns: after about 8 s, 5 s on a folder that was stopped in order,
        10 s on one that was killed.

        Args:
            folder: Where everything of it is kept. Made if missing.
            min_part: The smallest part, but for the last, of a multipart upload, in bytes.
            capacity: The size of the disk, a sparse file, in bytes. Never fill it: the OSD aborts.
            in_memory: Whether the OSD keeps the objects in memory: a request costs less. They are
                on the disk after `stop`, and lost after `kill`.

        Raises:
            RuntimeError: The Debian packages are missing, or the cluster does not come up.
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
            noted_state = _make(
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
        """Nothing: it runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def create_bucket(self, name: str) -> str:
        """Make a bucket that `full` owns, and return its name. Made already is made."""
        self.make_client(self.full).create_bucket(Bucket=name)
        return name

    def make_client(self, key: Key, *, service: str = "s3") -> Any:
        """Return a boto3 client, path-style and without retries (or ``service="sts"``)."""
        return connect(self.endpoint, key, service=service)

    def create_role(self, name: str) -> str:
        """Make a role that `full` may assume, allowed everything, and return its ARN.

        The session policy given to ``assume_role`` is what restricts the credentials.
        """
        trust = {
            "Effect": "Allow",
            "Principal": {"AWS": ["arn:aws:iam:::user/full"]},
            "Action": ["sts:AssumeRole"],
        }
        everything = {"Effect": "Allow", "Action": ["s3:*"], "Resource": "arn:aws:s3:::*"}
        named = f"--role-name={name}"
        made = self._admin(
            "role", "create", named, "--path=/", f"--assume-role-policy-doc={_policy(trust)}"
        )
        self._admin(
            "role-policy", "put", named, "--policy-name=all", f"--policy-doc={_policy(everything)}"
        )
        return json.loads(made)["Arn"]

    def assume_role(self, role: str, *statements: dict[str, Any], seconds: int = 900) -> Key:
        """Return temporary credentials of a role, limited to ``statements`` (none: all)."""
        session: dict[str, Any] = {"Policy": _policy(*statements)} if statements else {}
        given = self.make_client(self.full, service="sts").assume_role(
            RoleArn=role, RoleSessionName="session", DurationSeconds=seconds, **session
        )["Credentials"]
        return Key(given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"])

    def list_requests(self) -> list[str]:
        """Return the gateway's own access log so far, one line a request, the oldest first.

        A line reads ``127.0.0.1 - USER [TIME] "GET /bucket/key HTTP/1.1" 200 BYTES RANGE "-"
        "AGENT" - latency=Ns``. A request that was answered before the call is in the list.
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
        """Stop it in order; `start` on the same folder runs it again."""
        for child in reversed(self._children):
            child.stop()
        self._children.clear()

    def kill(self) -> None:
        """End every process with SIGKILL at once, as a power cut would."""
        for child in reversed(self._children):
            child.kill()
        self._children.clear()

    def is_running(self) -> bool:
        """Decide whether all processes of the server run."""
        return bool(self._children) and all(child.is_running() for child in self._children)

    def _run(self, state: dict[str, str], *, fresh: bool) -> None:
        self._spawn("ceph-mon", "-i", "a")
        if fresh:
            _tool(self.folder, "ceph", "osd", "new", state["osd"])
            _tool(self.folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", state["osd"])
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
        return _tool(self.folder, "radosgw-admin", "-n", "client.rgw", *arguments)

    def _spawn(self, program: str, *arguments: str) -> Child:
        log = self.folder / "log" / f"{program}.err"
        command = [program, "-c", str(self.folder / "ceph.conf"), *arguments, "-f"]
        child = Child(command, log=log, folder=self.folder)
        self._children.append(child)
        return child


def _make(folder: Path, *, min_part: int, capacity: int, object_store: str) -> dict[str, str]:
    """Write what the three servers need before their first start."""
    if folder.exists() and any(folder.iterdir()):
        raise RuntimeError(f"{folder} is neither empty nor a cluster of ours: name another folder.")
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
        _tool(folder, "ceph-authtool", keyring, *create, "-n", name, "--gen-key", *pairs)
    monmap = str(folder / "monmap")
    address = f"[v2:127.0.0.1:{monitor}]"
    _tool(folder, "monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
    _tool(folder, "ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
    return state


def _tool(folder: Path, program: str, *arguments: str) -> str:
    """Run one of Ceph's tools against the cluster of ``folder``; what it printed."""
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


def _policy(*statements: dict[str, Any]) -> str:
    document = {"Version": "2012-10-17", "Statement": list(statements)}
    return json.dumps(document, separators=(",", ":"))


def main() -> int:
    """Run one in the foreground until SIGINT or SIGTERM; a line of JSON says when it is ready."""
    parser = argparse.ArgumentParser(
        prog="python -m millrace.testing.rgw", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="where everything of it is kept")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to make")
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
