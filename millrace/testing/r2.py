"""Cloudflare R2, as strict as the real one, in front of another S3 server.

A reverse proxy, a process of its own: TLS, streaming both ways with bounded memory. What is
signed goes on unchanged, so the upstream checks it. The proxy adds what R2 refuses:

- Parts of a multipart upload that differ in length, or a last one that is larger (400 InvalidPart),
  or that are too small (400 EntityTooSmall), when the upload is completed.
- ``aws-chunked``, streaming payloads and trailing checksums; ACLs, tags, object locks, KMS and
  the subresources that R2 lacks (501 NotImplemented); another region than R2's (400).
- More than one write a second to a key (429 TooManyRequests): PutObject, CopyObject and
  CompleteMultipartUpload count once the upstream has them, whatever it answers.
- Temporary credentials (`r2_token`): R2's JWT, checked in full, held to its bucket,
  paths, scope and actions (403 AccessDenied), its time (403 ExpiredToken) and its endpoint (401).
  The request is then signed anew with the parent's key.
- A body that is not what ``x-amz-checksum-sha256`` or ``x-amz-checksum-crc64nvme`` says, of
  PutObject and UploadPart (400 BadDigest). Its last piece is held back until then, so the upstream
  never has the object. The answer repeats the CRC, as do HEAD and GET of the whole object with
  ``x-amz-checksum-mode: ENABLED``, as long as the object has the same ETag.

What it does not add: conditions on CompleteMultipartUpload, other checksums, the SHA-256 on the way
back, the CRC of a multipart upload or a copy. `Faults` are injected on top, seeded, and counted
when they fire.

``python -m millrace.testing.r2 --upstream URL --keys FILE`` runs one.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypedDict

from millrace.testing import r2_token
from millrace.testing.faults import Fault, Faults
from millrace.testing.key import Key, connect
from millrace.testing.process import Child, ask, start_module
from millrace.testing.r2_rules import Rules
from millrace.testing.r2_server import Proxy, serve
from millrace.testing.tls import make_certificates

__all__ = ["Fault", "Faults", "R2Proxy", "R2RequestRecord", "Rules"]


class R2RequestRecord(TypedDict):
    """A request that the proxy saw, in the order of arrival."""

    method: str
    path: str
    """Path of the request line, encoded, with its query."""
    operation: str
    """Name of the operation in S3, such as ``PutObject``."""
    arrived: float
    """Time of ``time.monotonic()``, whose clock all processes of a machine share."""
    status: int | None
    """None if nothing was answered."""
    fault: str | None
    """The kind that fired."""
    refused: str | None
    """The code of the rule that refused it."""
    received: int
    """Bytes of body that came from the client."""
    sent: int
    """Bytes of body that went to the client."""
    payload: str
    """Value of ``x-amz-content-sha256``: a SHA-256 that was signed, or ``UNSIGNED-PAYLOAD``."""


class R2Proxy:
    """A running proxy. Made by `R2Proxy.start`; a context manager that stops it.

    Attributes:
        endpoint: ``https://localhost:PORT``, or ``http://`` without TLS.
        ca_file: What a client must trust; None without TLS.
    """

    def __init__(
        self,
        child: Child,
        *,
        port: int,
        control: int,
        ca_file: Path | None,
        keys: Mapping[str, str],
    ) -> None:
        """Describe a proxy that runs already; `start` runs it."""
        scheme = "http" if ca_file is None else "https"
        self.endpoint = f"{scheme}://localhost:{port}"
        self.host = f"localhost:{port}"
        self.ca_file = ca_file
        self._keys = dict(keys)
        self._child = child
        self._control = f"http://127.0.0.1:{control}"

    @classmethod
    def start(
        cls,
        upstream: str,
        keys: Mapping[str, str],
        folder: Path,
        *,
        tls: bool = True,
        rules: Rules | None = None,
    ) -> Self:
        """Start a proxy; it serves when this returns, after about half a second.

        Args:
            upstream: Where the S3 server listens, ``http://HOST:PORT``.
            keys: The secret of each access key id that it knows. Without its secret, an id is the
                parent of no temporary credential, and its uploads are not held to equal parts.
            folder: Where the certificates, the keys and the log are kept. Made if missing.
            tls: Without it: plain HTTP, for benchmarks.
            rules: Rules bent; `reset` comes back to these.
        """
        rules = rules or Rules()
        folder.mkdir(parents=True, exist_ok=True)
        secrets = folder / "keys.json"
        secrets.touch(mode=0o600)
        secrets.write_text(json.dumps(dict(keys)))
        arguments = ["--upstream", upstream, "--keys", str(secrets.absolute())]
        arguments += ["--min-part", str(rules.min_part)]
        arguments += ["--write-interval", str(rules.write_interval)]
        ca_file = None
        if tls:
            files = make_certificates(folder.absolute())
            ca_file = files.ca
            arguments += ["--certificate", str(files.certificate), "--key", str(files.key)]
        child = start_module("millrace.testing.r2", *arguments, log=folder / "r2.log")
        ready = child.read_announcement()
        return cls(child, port=ready["port"], control=ready["control"], ca_file=ca_file, keys=keys)

    def __enter__(self) -> Self:
        """Nothing: it runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    @property
    def log(self) -> Path:
        """Return the errors that the process printed; empty if there are none."""
        return self._child.log

    def get_key(self, access_key_id: str) -> Key:
        """Return one of the keys that the server was started with."""
        return Key(access_key_id, self._keys[access_key_id])

    def make_client(self, key: Key) -> Any:
        """Return a boto3 client of this server, path-style and without retries."""
        verify = None if self.ca_file is None else str(self.ca_file)
        return connect(self.endpoint, key, region="auto", verify=verify)

    def make_temporary_key(self, parent: Key, bucket: str, **options: Any) -> Key:
        """Make temporary credentials for this endpoint; ``options`` as in `r2_token.mint`."""
        return r2_token.mint(parent, bucket=bucket, audience=self.host, **options)

    def set_faults(self, faults: Faults) -> None:
        """Inject faults by chance from now on, from the start of their seed."""
        self._ask("/faults", asdict(faults))

    def fail_next(
        self,
        kind: Fault | str,
        n: int = 1,
        method: str | None = None,
        key_contains: str = "",
        *,
        operation: str | None = None,
        retry_after: float | None = None,
        stall_seconds: float = 30.0,
    ) -> None:
        """Let the next ``n`` matching requests meet a fault, whatever the chance.

        Args:
            kind: A `Fault`. A request that it cannot befall (a cut HEAD) waits for another.
            n: How many.
            method: An HTTP method; None: any.
            key_contains: Part of ``bucket/key``.
            operation: One of S3's, ``CompleteMultipartUpload``; None: any.
            retry_after: Seconds, the header of 429 and 503.
            stall_seconds: How long a stall lasts.
        """
        self._ask(
            "/fail-next",
            {
                "kind": Fault(kind).value,
                "times": n,
                "method": method,
                "key_contains": key_contains,
                "operation": operation,
                "retry_after": retry_after,
                "stall_seconds": stall_seconds,
            },
        )

    def set_rules(self, **rules: Any) -> None:
        """Bend some of the `Rules` until the next `reset`."""
        self._ask("/rules", rules)

    def set_delays(self, share: float, seconds: float, seed: int = 0) -> None:
        """Let a share of the answers to GetObject come later, from the start of the seed."""
        self._ask("/delays", {"share": share, "seconds": seconds, "seed": seed})

    def count_delayed(self) -> int:
        """Return the number of answers that came later since the last `reset`."""
        return self._ask("/delayed")

    def count_fired(self) -> dict[str, int]:
        """Return how often each kind of fault fired."""
        return self._ask("/counts")

    def count_pending(self) -> int:
        """Return the number of faults of `fail_next` that wait for their request."""
        return self._ask("/pending")

    def count_refusals(self) -> dict[str, int]:
        """Return the refusals by S3's error code; ``BadGateway``: the upstream failed."""
        return self._ask("/refusals")

    def list_requests(self) -> list[R2RequestRecord]:
        """Return the last 100,000 requests since the last `reset`, in order of arrival."""
        return self._ask("/requests")

    def reset(self) -> None:
        """Forget faults, counts and requests, restore the first rules, and end stalled requests."""
        self._ask("/reset")

    def stop(self) -> None:
        """End it."""
        self._child.stop()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._child.kill()

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return ask(self._control + path, body)


def main() -> None:
    """Run a proxy until it is ended; a line of JSON says on which ports."""
    parser = argparse.ArgumentParser(prog="python -m millrace.testing.r2", description=main.__doc__)
    parser.add_argument("--upstream", required=True, help="http://HOST:PORT of the S3 server")
    parser.add_argument("--keys", type=Path, help="JSON file: a secret for each access key id")
    parser.add_argument("--certificate", help="PEM file; without one, plain HTTP")
    parser.add_argument("--key", help="PEM file of the certificate's key")
    parser.add_argument("--port", type=int, default=0, help="0: any")
    parser.add_argument("--control-port", type=int, default=0, help="0: any")
    parser.add_argument("--min-part", type=int, default=Rules().min_part, help="bytes")
    parser.add_argument(
        "--write-interval", type=float, default=Rules().write_interval, help="seconds"
    )
    options = parser.parse_args()
    keys = json.loads(options.keys.read_text()) if options.keys else {}
    rules = Rules(min_part=options.min_part, write_interval=options.write_interval)
    certificate = (options.certificate, options.key) if options.certificate else None

    async def run() -> None:
        proxy = Proxy(options.upstream, keys, rules)
        await serve(
            proxy,
            port=options.port,
            control_port=options.control_port,
            certificate=certificate,
        )

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
