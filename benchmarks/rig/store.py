"""A lean S3 server that counts what it sends and does faults on demand.

It is there to be outrun by nothing: bodies go from the page cache to the socket by ``sendfile``.
It serves one bucket over plain HTTP: GetObject with Range and If-Match, HeadObject, ListObjectsV2,
PutObject (small ones: the body is read whole), DeleteObject. Requests must be signed, in the header
or in the query (presigned): the signature is checked, and its time.

What it counts: requests by operation, and of each object the GetObject requests and the bytes of
body that were handed to the socket. (Of a body that a client broke off, the socket may have taken
more than the client.) `FaultKind` says what may go wrong.

``python -m benchmarks.rig.store --folder FOLDER`` runs one. `Store` starts one, and speaks to it by
paths of its own (``/_counts``) that are neither signed nor counted.
"""

import argparse
import http.client
import json
import os
import secrets
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from obstore.store import S3Store

from benchmarks.rig.hosts import Host
from benchmarks.rig.store_faults import Fault, FaultKind
from benchmarks.rig.store_server import Server
from millrace.testing.key import Key
from millrace.testing.process import REPOSITORY

__all__ = ["Counts", "Fault", "FaultKind", "Head", "ObjectCounts", "Store"]

BUCKET = "rig"
REGION = "us-east-1"
SECRET = "RIG_STORE_SECRET"
PATIENCE = 30.0  # seconds that it may take to answer us


@dataclass(frozen=True, slots=True)
class ObjectCounts:
    """Requests for one object: GetObject requests, and bytes of body."""

    gets: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Head:
    """Description of an object: bytes, and the ETag (the MD5, in quotes)."""

    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a store since it was reset.

    Attributes:
        requests: By operation, ``GetObject``; those that were refused too.
        bytes: Of bodies of objects, that were sent.
        objects: By key.
        fired: Faults that were done, by kind.
        pending: Faults that still wait for their request.
    """

    requests: dict[str, int]
    bytes: int
    objects: dict[str, ObjectCounts]
    fired: dict[str, int]
    pending: int


class Store:
    """A running store. Made by `Store.start`; a context manager that stops it.

    Attributes:
        endpoint: ``http://ADDRESS:PORT``.
        bucket: The one bucket.
        key: What to sign with.
    """

    def __init__(
        self, process: subprocess.Popen[Any], address: str, port: int, key: Key, host: Host | None
    ) -> None:
        """Describe a store that runs already; `start` runs it."""
        self.endpoint = f"http://{address}:{port}"
        self.bucket = BUCKET
        self.key = key
        self._process, self._address, self._port, self._host = process, address, port, host

    @classmethod
    def start(cls, folder: Path, host: Host | None = None) -> Self:
        """Start a store; it serves when this returns.

        Args:
            folder: Its files are objects, and further objects go there; of the host, if there is
                one. Made if missing.
            host: Where it runs; None: on the loopback of this machine.
        """
        key = Key("RIG", secrets.token_hex(16))
        address = "127.0.0.1" if host is None else host.address
        command = [sys.executable, "-m", "benchmarks.rig.store"]
        command += ["--folder", str(folder), "--address", address]
        # It ends with its standard input, should we be killed.
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        secret = {SECRET: key.secret_access_key}
        if host is None:
            environment = {**os.environ, **secret}
            process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes)
        else:
            process = host.popen(command, env=secret, **pipes)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait()
            raise RuntimeError("The store ended before it was ready.")
        return cls(process, address, json.loads(line)["port"], key, host)

    def __enter__(self) -> Self:
        """Nothing: it runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def config(self) -> dict[str, Any]:
        """Return the arguments of `obstore.store.S3Store` for a client that can reach the store."""
        return {
            "bucket": self.bucket,
            "endpoint": self.endpoint,
            "region": REGION,
            "access_key_id": self.key.access_key_id,
            "secret_access_key": self.key.secret_access_key,
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }

    def client(self, **options: Any) -> S3Store:
        """Return a client, for where the store can be reached: not from outside of a rig."""
        return S3Store(**self.config(), **options)

    def generate(self, key: str, size: int, seed: int = 0) -> Head:
        """Make or replace an object of ``size`` random bytes; not counted."""
        body = json.dumps({"key": key, "size": size, "seed": seed})
        return Head(**self._ask("POST", "/_generate", body.encode()))

    def put(self, key: str, body: bytes) -> Head:
        """Make or replace an object; not counted."""
        return Head(**self._ask("PUT", f"/_object?{urlencode({'key': key})}", body))

    def head(self, key: str) -> Head:
        """Describe an object; not counted."""
        return Head(**self._ask("GET", f"/_object?{urlencode({'key': key})}"))

    def order(self, fault: Fault) -> None:
        """Let the next requests that it fits meet a fault."""
        self._ask("POST", "/_faults", json.dumps(asdict(fault)).encode())

    def counts(self) -> Counts:
        """Return the counts since the last `reset`."""
        found = self._ask("GET", "/_counts")
        objects = {key: ObjectCounts(**value) for key, value in found["objects"].items()}
        return Counts(**{**found, "objects": objects})

    def reset(self) -> None:
        """No faults, counts of zero; bodies that are stalled go on."""
        self._ask("POST", "/_reset")

    def _ask(self, method: str, path: str, body: bytes = b"") -> Any:
        if self._host is None:
            return _ask(self._address, self._port, method, path, body)
        return self._host.call(_ask, self._address, self._port, method, path, body)


def _ask(address: str, port: int, method: str, path: str, body: bytes) -> Any:
    connection = http.client.HTTPConnection(address, port, timeout=PATIENCE)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        said = answer.read()
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise RuntimeError(f"The store says {answer.status} to {method} {path}: {said.decode()}")
    return json.loads(said)


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rig.store", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the objects")
    parser.add_argument("--address", default="127.0.0.1", help="where to listen")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    key = Key("RIG", os.environ.pop(SECRET))
    server = Server(asked.address, asked.folder, BUCKET, key)
    print(json.dumps({"port": server.server_port}), flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
