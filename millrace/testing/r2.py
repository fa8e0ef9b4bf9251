"""Stand-in of Cloudflare R2: a reverse proxy that applies the rules of R2 to another S3 server.

The proxy is a separate process with TLS. It streams in both directions with bounded memory. Signed
parts of a request are forwarded unchanged, so that the upstream can check them. The proxy refuses
the following, as R2 does:

- At the completion of a multipart upload: parts of different lengths or a last part that is larger
  than the others (400 InvalidPart), and parts that are too small (400 EntityTooSmall).
- ``aws-chunked``, streaming payloads and trailing checksums; ACLs, tags, object locks, KMS and the
  subresources that R2 does not support (501 NotImplemented); regions that R2 does not have (400).
- More than one write per second to a key (429 TooManyRequests). PutObject, CopyObject and
  CompleteMultipartUpload count when they reach the upstream, whatever the answer is.
- Requests beyond the rights of temporary credentials, which are JWTs of R2 (`r2_token`): another
  bucket, path, scope or action (403 AccessDenied), an expired token (403 ExpiredToken), or another
  endpoint (401). Allowed requests are signed again with the parent's key.
- A body of PutObject or UploadPart that differs from its ``x-amz-checksum-sha256`` or
  ``x-amz-checksum-crc64nvme`` (400 BadDigest). The last piece of the body is held back until the
  check, so the upstream never stores such an object. The answer repeats the CRC. So do HEAD and GET
  of the whole object with ``x-amz-checksum-mode: ENABLED``, while the ETag of the object is the
  same.

The proxy lacks conditions on CompleteMultipartUpload, other checksums, the SHA-256 in answers to
reads, and the CRC of a multipart upload or a copy. It injects `Faults` by a seed, and counts the
faults that fire.

``python -m millrace.testing.r2 --upstream URL --keys FILE`` runs a proxy.
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
    """Request that the proxy received."""

    method: str
    path: str
    """Encoded path of the request line, with the query."""
    operation: str
    """S3 operation, such as ``PutObject``."""
    arrived: float
    """Time of arrival by ``time.monotonic()``, a clock that all processes of a machine share."""
    status: int | None
    """Status of the answer; None if there was no answer."""
    fault: str | None
    """Kind of the fault that fired; None if no fault fired."""
    refused: str | None
    """Error code of the rule that refused the request; None if no rule did."""
    received: int
    """Bytes of the body received from the client."""
    sent: int
    """Bytes of the body sent to the client."""
    payload: str
    """Value of ``x-amz-content-sha256``: the signed SHA-256, or ``UNSIGNED-PAYLOAD``."""


class R2Proxy:
    """Running proxy, started by `R2Proxy.start`. As a context manager, it stops at the exit.

    Attributes:
        endpoint: URL of the proxy: ``https://localhost:PORT``, or ``http://`` without TLS.
        ca_file: Certificate of the authority that clients must trust; None without TLS.
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
        """Represent a proxy that is already running. Use `start` to start one."""
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
        """Start a proxy, and return when it accepts requests, after about half a second.

        Args:
            upstream: URL of the S3 server, ``http://HOST:PORT``.
            keys: Secrets of access keys, by ID. For an ID without a secret, temporary credentials
                are refused, and the sizes of the parts of uploads are not checked.
            folder: Folder of the certificates, the keys and the log. It is created if missing.
            tls: Whether the proxy serves HTTPS; plain HTTP is for benchmarks.
            rules: Rules of the proxy, which `reset` restores.
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
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> Path:
        """Return the path of the log, which has the errors of the process."""
        return self._child.log

    def get_key(self, access_key_id: str) -> Key:
        """Return the key with an ID, from the keys that the proxy was started with."""
        return Key(access_key_id, self._keys[access_key_id])

    def make_client(self, key: Key) -> Any:
        """Return a boto3 client for this proxy, with path-style URLs and without retries."""
        verify = None if self.ca_file is None else str(self.ca_file)
        return connect(self.endpoint, key, region="auto", verify=verify)

    def make_temporary_key(self, parent: Key, bucket: str, **options: Any) -> Key:
        """Create temporary credentials for this endpoint, with options of `r2_token.mint`."""
        return r2_token.mint(parent, bucket=bucket, audience=self.host, **options)

    def set_faults(self, faults: Faults) -> None:
        """Inject random faults from now on, with a generator that starts from their seed."""
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
        """Fail the next ``n`` matching requests with a fault.

        Args:
            kind: Kind of the fault. A request that it cannot happen to (a cut HEAD) does not count.
            n: Number of requests.
            method: HTTP method of the requests; None for any.
            key_contains: Text in the ``bucket/key`` of the requests.
            operation: S3 operation, such as ``CompleteMultipartUpload``; None for any.
            retry_after: Header Retry-After of 429 and 503, in seconds.
            stall_seconds: Duration of a stall.
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
        """Change some of the `Rules` until the next `reset`."""
        self._ask("/rules", rules)

    def set_delays(self, share: float, seconds: float, seed: int = 0) -> None:
        """Delay a random share of the answers to GetObject, with a generator of a given seed."""
        self._ask("/delays", {"share": share, "seconds": seconds, "seed": seed})

    def count_delayed(self) -> int:
        """Return the number of delayed answers since the last `reset`."""
        return self._ask("/delayed")

    def count_fired(self) -> dict[str, int]:
        """Return the number of faults of each kind that fired."""
        return self._ask("/counts")

    def count_pending(self) -> int:
        """Return the number of faults of `fail_next` that have not fired yet."""
        return self._ask("/pending")

    def count_refusals(self) -> dict[str, int]:
        """Return the number of refusals by S3 error code. Upstream failures are ``BadGateway``."""
        return self._ask("/refusals")

    def list_requests(self) -> list[R2RequestRecord]:
        """Return the last 100,000 requests since the last `reset`, in the order of arrival."""
        return self._ask("/requests")

    def reset(self) -> None:
        """Clear faults, counts and requests, restore the rules, and end stalled requests."""
        self._ask("/reset")

    def stop(self) -> None:
        """Stop the proxy."""
        self._child.stop()

    def kill(self) -> None:
        """Kill the proxy with SIGKILL."""
        self._child.kill()

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return ask(self._control + path, body)


def main() -> None:
    """Run a proxy until the process ends. A line of JSON on stdout has its ports."""
    parser = argparse.ArgumentParser(prog="python -m millrace.testing.r2", description=main.__doc__)
    parser.add_argument("--upstream", required=True, help="http://HOST:PORT of the S3 server")
    parser.add_argument("--keys", type=Path, help="JSON file with secrets by access key ID")
    parser.add_argument("--certificate", help="PEM file; plain HTTP by default")
    parser.add_argument("--key", help="PEM file of the certificate's key")
    parser.add_argument("--port", type=int, default=0, help="0 means any free port")
    parser.add_argument("--control-port", type=int, default=0, help="0 means any free port")
    parser.add_argument("--min-part", type=int, default=Rules().min_part, help="bytes")
    parser.add_argument(
        "--write-interval", type=float, default=Rules().write_interval, help="seconds"
    )
    options = parser.parse_args()
    keys: dict[str, str] = json.loads(options.keys.read_text()) if options.keys else {}
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
