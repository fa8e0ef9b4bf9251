"""A fast S3 server for tests and benchmarks, which counts its responses and injects faults.

It sends bodies with ``sendfile``, so that the server is not the bottleneck of a benchmark. It
serves one bucket over HTTP: GetObject with Range and If-Match, HeadObject, ListObjectsV2, PutObject
(which reads the whole body into memory) and DeleteObject. Requests must be signed, in a header or
in the query (presigned). The server checks the signature and its time.

It counts the requests of each operation. For each object, it counts the GetObject requests and the
bytes of bodies that were passed to the socket. If a client closes its connection early, this can be
more than the client received. `FaultKind` lists the faults.

``python -m benchmarks.rig.store --folder FOLDER`` runs a server. `RigStore` starts a server, and
controls it with requests to other paths, such as ``/_counts``. Such requests are neither signed nor
counted.
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

from benchmarks.rig.hosts import RigHost
from benchmarks.rig.store_faults import FaultKind, RigFault
from benchmarks.rig.store_server import Server
from millrace.testing.key import Key
from millrace.testing.process import REPOSITORY

__all__ = ["Counts", "FaultKind", "Head", "ObjectCounts", "RigFault", "RigStore"]

BUCKET = "rig"
REGION = "us-east-1"
SECRET = "RIG_STORE_SECRET"
RESPONSE_TIMEOUT = 30.0  # seconds, of a control request


@dataclass(frozen=True, slots=True)
class ObjectCounts:
    """Counts of one object.

    Attributes:
        gets: Number of GetObject requests.
        bytes: Number of bytes of bodies that were sent.
    """

    gets: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Head:
    """Description of an object.

    Attributes:
        size: Size in bytes.
        etag: ETag: the MD5 in double quotes.
    """

    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a store since its last reset.

    Attributes:
        requests: Number of requests by operation, such as ``GetObject``. Refused ones count too.
        bytes: Number of bytes of objects' bodies that were sent.
        objects: Counts of each object by its key.
        fired: Number of injected faults by kind.
        pending: Number of faults that no request has met yet.
    """

    requests: dict[str, int]
    bytes: int
    objects: dict[str, ObjectCounts]
    fired: dict[str, int]
    pending: int


class RigStore:
    """Running store, started by `RigStore.start`. As a context manager, it stops at the exit.

    Attributes:
        endpoint: Endpoint URL: ``http://ADDRESS:PORT``.
        bucket: Name of the bucket.
        key: Access key for the signatures.
    """

    def __init__(
        self,
        process: subprocess.Popen[Any],
        address: str,
        port: int,
        key: Key,
        host: RigHost | None,
    ) -> None:
        """Describe a store that `start` has started."""
        self.endpoint = f"http://{address}:{port}"
        self.bucket = BUCKET
        self.key = key
        self._process, self._address, self._port, self._host = process, address, port, host

    @classmethod
    def start(cls, folder: Path, host: RigHost | None = None) -> Self:
        """Start a store, and wait until it accepts requests.

        Args:
            folder: Folder of the objects, on the disk of the host. Its files become objects. It is
                created if it does not exist.
            host: Host of the server. None stands for the loopback interface of this machine.
        """
        key = Key("RIG", secrets.token_hex(16))
        address = "127.0.0.1" if host is None else host.address
        command = [sys.executable, "-m", "benchmarks.rig.store"]
        command += ["--folder", str(folder), "--address", address]
        # The server ends with its standard input, so also if this process is killed.
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
        """Return the store, which is already running."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the store."""
        self.stop()

    def stop(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def make_config(self) -> dict[str, Any]:
        """Return the arguments of `obstore.store.S3Store` for a client of the store."""
        return {
            "bucket": self.bucket,
            "endpoint": self.endpoint,
            "region": REGION,
            "access_key_id": self.key.access_key_id,
            "secret_access_key": self.key.secret_access_key,
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }

    def make_settings(self, prefix: str = "") -> dict[str, Any]:
        """Return the settings of a store of Millrace, as JSON, for a prefix of the bucket."""
        return {
            "url": f"s3://{self.bucket}/{prefix}".rstrip("/"),
            "endpoint": self.endpoint,
            "region": REGION,
            "credentials": {
                "access_key_id": self.key.access_key_id,
                "secret_access_key": self.key.secret_access_key,
            },
        }

    def make_client(self, **options: Any) -> S3Store:
        """Return a client. It cannot reach the store of a rig from outside of the rig."""
        return S3Store(**self.make_config(), **options)

    def generate(self, key: str, size: int, seed: int = 0) -> Head:
        """Create or replace an object of ``size`` random bytes, without counting a request."""
        body = json.dumps({"key": key, "size": size, "seed": seed})
        return Head(**self._control("POST", "/_generate", body.encode()))

    def put(self, key: str, body: bytes) -> Head:
        """Create or replace an object, without counting a request."""
        return Head(**self._control("PUT", f"/_object?{urlencode({'key': key})}", body))

    def head(self, key: str) -> Head:
        """Return the size and the ETag of an object, without counting a request."""
        return Head(**self._control("GET", f"/_object?{urlencode({'key': key})}"))

    def inject_fault(self, fault: RigFault) -> None:
        """Inject a fault into the next requests that match it."""
        self._control("POST", "/_faults", json.dumps(asdict(fault)).encode())

    def read_counts(self) -> Counts:
        """Return the counts since the last `reset`."""
        found = self._control("GET", "/_counts")
        objects = {key: ObjectCounts(**value) for key, value in found["objects"].items()}
        return Counts(**{**found, "objects": objects})

    def reset(self) -> None:
        """Remove all faults, set all counts to zero, and continue stalled bodies."""
        self._control("POST", "/_reset")

    def _control(self, method: str, path: str, body: bytes = b"") -> Any:
        if self._host is None:
            return _send_request(self._address, self._port, method, path, body)
        return self._host.call(_send_request, self._address, self._port, method, path, body)


def _send_request(address: str, port: int, method: str, path: str, body: bytes) -> Any:
    """Send a control request, and return the JSON of its response."""
    connection = http.client.HTTPConnection(address, port, timeout=RESPONSE_TIMEOUT)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise RuntimeError(
            f"The store responded with {response.status} to {method} {path}: {content.decode()}"
        )
    return json.loads(content)


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rig.store", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the objects")
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    key = Key("RIG", os.environ.pop(SECRET))
    server = Server(options.address, options.folder, BUCKET, key)
    print(json.dumps({"port": server.server_port}), flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
