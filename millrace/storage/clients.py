"""Open other clients for the same store and credentials: boto3 and fsspec.

Each function imports its client. So a process that needs neither client starts faster.
"""

import math
import os
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypedDict, cast

from millrace.errors import ConfigurationError
from millrace.storage.locations import Backend
from millrace.storage.obstore_clients import CONNECT_TIMEOUT, READ_TIMEOUT
from millrace.storage.open import Store

if TYPE_CHECKING:
    import boto3
    from fsspec.spec import AbstractFileSystem  # pyright: ignore[reportMissingTypeStubs]
    from mypy_boto3_s3 import S3Client


MAX_ANSWER_SIZE = 32 << 20
"""Largest size of an unstreamed answer in bytes. A page of 1,000 keys has at most 4 MB."""

_MAX_CONNECTIONS = 64  # that a client keeps open: a copy uses one in each of about 36 threads
_MAX_RECEIVED = 1 << 20  # bytes of a timed body that are received at once


class KeyPair(TypedDict, total=False):
    """A key pair under boto3's names."""

    aws_access_key_id: str
    aws_secret_access_key: str
    aws_session_token: str


def make_boto3_client(
    store: Store, *, max_attempts: int = 5, deadline: float = math.inf
) -> "S3Client":
    """Return a boto3 client of the store, for multipart housekeeping and bucket settings.

    The client sends checksums only where an operation requires one. Newer versions of boto3 send
    them as trailers by default, which R2 refuses.

    Args:
        store: Store that is compatible with S3.
        max_attempts: Number of tries of a request.
        deadline: Time by the monotonic clock after which no body is read further, although its
            bytes still arrive.

    Raises:
        ConfigurationError: The store does not speak S3.
    """
    if not store.is_s3_compatible:
        raise ConfigurationError(
            f"{store.url} is not compatible with S3, so boto3 cannot open it: use s3:// or r2://."
        )
    import boto3  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    config = Config(
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        connect_timeout=CONNECT_TIMEOUT.total_seconds(),
        read_timeout=READ_TIMEOUT.total_seconds(),
        retries={"mode": "standard", "total_max_attempts": max_attempts},
        max_pool_connections=_MAX_CONNECTIONS,
        # obstore does not read the endpoints of ~/.aws/config.
        ignore_configured_endpoint_urls=True,  # pyright: ignore[reportCallIssue] - not in the stub
        s3={"addressing_style": "path"} if store.endpoint else {},
    )
    session: Any = boto3
    if not store.spec.credentials:
        session = _make_session(
            tuple((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
        )
    client: S3Client = session.client(
        "s3",
        endpoint_url=store.endpoint,
        region_name=store.region,
        verify=str(store.spec.ca_file) if store.spec.ca_file else None,
        config=config,
        **make_key_pair(store),
    )
    _limit_answers(client, deadline)
    return client


@lru_cache(maxsize=1)  # a session takes 0.15 s
def _make_session(environment: tuple[tuple[str, str], ...]) -> "boto3.Session":
    """Return a session with the credentials of the environment as it is.

    boto3's own session keeps the first credentials that it finds, so a process whose environment
    changes would go on with the old ones.
    """
    import boto3  # noqa: PLC0415

    return boto3.Session()


def _limit_answers(client: "S3Client", deadline: float) -> None:
    """Limit the answers that a client reads to `MAX_ANSWER_SIZE` bytes, and refuse shorter ones.

    botocore reads listings and the bodies of errors whole, without a limit. It does not compare
    their length with the announced one, and reads an empty body as an empty listing.
    """
    from botocore import awsrequest  # noqa: PLC0415
    from botocore.exceptions import HTTPClientError, ResponseStreamingError  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    make_response: Any = awsrequest.AWSResponse
    events: Any = client.meta.events
    session = cast("Any", client)._endpoint.http_session  # noqa: SLF001

    def send(request: Any, **_: object) -> object:
        is_streamed, request.stream_output = request.stream_output, True
        response = session.send(request)
        raw = response.raw if deadline == math.inf else _TimedBody(response.raw, deadline)
        if is_streamed and response.status_code < 300:
            return make_response(response.url, response.status_code, response.headers, raw)
        try:
            parts = read_parts(raw)
        except HTTPError as error:
            raise ResponseStreamingError(error=error) from error
        body = _ReadBody(parts)
        return make_response(response.url, response.status_code, response.headers, body)

    def read_parts(raw: Any) -> list[bytes]:
        parts, size = list[bytes](), 0
        for part in raw.stream(1 << 20):
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_SIZE:
                raw.close()
                raise HTTPClientError(error=f"an answer of more than {MAX_ANSWER_SIZE} bytes")
        if raw.length_remaining:
            raise ResponseStreamingError(error=f"{raw.length_remaining} bytes are missing")
        return parts

    events.register_last("before-send.s3", send)


class _TimedBody:
    """Body of an answer that is read until a deadline.

    A timeout of a socket is one for each of its reads, so it never ends a body of single bytes.

    Args:
        raw: Body, a response of urllib3.
        deadline: End by the monotonic clock.
    """

    def __init__(self, raw: Any, deadline: float) -> None:
        self._raw, self._deadline = raw, deadline

    def read(self, size: int | None = None) -> bytes:
        """Read a number of bytes, or all that is left; fewer at the end of the body.

        Raises:
            HTTPError: The deadline has passed.
        """
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        parts, left = list[bytes](), math.inf if size is None else size
        while left:
            if time.monotonic() >= self._deadline:
                self.close()
                raise HTTPError("the answer took too long")
            part = self._raw.read1(min(left, _MAX_RECEIVED))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def stream(self, size: int) -> Iterator[bytes]:
        """Yield the body in parts of a size."""
        while part := self.read(size):
            yield part

    @property
    def length_remaining(self) -> int | None:
        """Number of announced bytes that were not read; None if no length was announced."""
        return self._raw.length_remaining

    def close(self) -> None:
        """Close the connection, unless the body was read to its end."""
        self._raw.close()


class _ReadBody:
    """Body of an answer that is in memory."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def stream(self) -> Iterator[bytes]:
        """Return the parts of the body."""
        return iter(self._parts)


def make_full_key(store: Store, key: str) -> str:
    """Return the key of an object in the bucket, which includes the store's prefix."""
    return f"{store.location.prefix}/{key}" if store.location.prefix else key


def make_key_pair(store: Store) -> KeyPair:
    """Return the store's credentials under boto3's names; empty without a key pair."""
    credentials = store.spec.credentials
    if credentials is None:
        return {}
    pair: KeyPair = {
        "aws_access_key_id": credentials.access_key_id,
        "aws_secret_access_key": credentials.secret_access_key.get_secret_value(),
    }
    if credentials.session_token:
        pair["aws_session_token"] = credentials.session_token.get_secret_value()
    return pair


def open_filesystem(store: Store) -> "tuple[AbstractFileSystem, str]":
    """Return an fsspec file system for pyarrow, datasets and pandas, and the store's folder in it.

    S3 and R2 need s3fs. A folder has the local file system.

    Returns:
        The file system, and the store's folder. A file's path is ``f"{folder}/{key}"``.

    Raises:
        ConfigurationError: The store is neither S3, nor R2, nor a folder.
    """
    location = store.location
    folder = f"{location.bucket}/{location.prefix}".rstrip("/")
    match location.backend:
        case Backend.FILE:
            import fsspec  # noqa: PLC0415 # pyright: ignore[reportMissingTypeStubs]

            return fsspec.filesystem("file"), location.bucket  # pyright: ignore[reportUnknownMemberType]
        case Backend.S3 | Backend.R2:
            return _open_s3fs(store), folder
        case Backend.GS | Backend.MEMORY:
            raise ConfigurationError(
                f"Millrace has no fsspec file system for {store.url}. Use gcsfs for gs://, and a "
                "folder instead of memory://."
            )


def _open_s3fs(store: Store) -> "AbstractFileSystem":
    from s3fs import S3FileSystem  # pyright: ignore[reportMissingTypeStubs]  # noqa: PLC0415

    pair = make_key_pair(store)
    client: dict[str, Any] = {}
    if store.spec.ca_file:
        client["verify"] = str(store.spec.ca_file)
    if store.region:
        client["region_name"] = store.region
    return S3FileSystem(
        key=pair.get("aws_access_key_id"),
        secret=pair.get("aws_secret_access_key"),
        token=pair.get("aws_session_token"),
        endpoint_url=store.endpoint,
        client_kwargs=client,
        config_kwargs={
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "ignore_configured_endpoint_urls": True,
            **({"s3": {"addressing_style": "path"}} if store.endpoint else {}),
        },
        fixed_upload_size=True,  # R2 accepts only parts of equal size
        use_listings_cache=False,
        skip_instance_cache=True,  # the cache's key would hold the secret
    )
