"""Two requests by hand, for stores of S3's kind: those that obstore has no words for.

Create an object whose SHA-256 is known already: obstore signs every body with a digest that it
computes itself, 0.6 to 0.9 CPU seconds a GB that a ledger's digest makes needless. And ask for the
SHA-256 that the store has kept of an object.

Source: "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)",
Amazon S3 API reference.
"""

import base64
import hashlib
import hmac
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from obstore.exceptions import AlreadyExistsError, GenericError

from millrace.errors import StoppedError
from millrace.storage.clients import full_key
from millrace.storage.open import Store

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

_PIECE = 1024 * 1024  # bytes given to the socket at a time: the timeout is for each
_TIMEOUT = 30.0  # seconds without a byte moved, as obstore's
_CONNECTIONS = 16
_EMPTY = hashlib.sha256().hexdigest()  # of no body
_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}  # obstore goes through them


def can_sign(store: Store) -> bool:
    """Tell whether we can sign for a store: it has a key pair, and nothing else that we ignore."""
    given = store.spec.credentials is not None and bool(store.endpoint or store.region)
    special = store.spec.options or not _PROXIES.isdisjoint(map(str.lower, os.environ))
    return store.speaks_s3 and given and not special


def create_signed(
    store: Store,
    key: str,
    data: bytes | bytearray | memoryview,
    sha256: str,
    stopped: Callable[[], bool] | None = None,
) -> None:
    """Create an object if there is none under its key. One try of one request.

    The store checks the body against the digest that is signed.

    Args:
        store: One that `can_sign`.
        key: The object's key.
        data: Its bytes, contiguous.
        sha256: Their digest, in hexadecimal.
        stopped: Asked before each MiB is sent: whether to break off.

    Raises:
        StoppedError: It was broken off: there is no such object by this request.
        AlreadyExistsError: There is one, or another create is being decided (409).
        GenericError: Any other fault, worded as obstore words it. Also a key that would be another.
    """
    if not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise GenericError(f"Error parsing Path: {key!r} has an empty or a relative segment")
    headers = {
        "content-length": str(len(data)),
        "if-none-match": "*",
        "x-amz-checksum-sha256": base64.b64encode(bytes.fromhex(sha256)).decode(),
        "x-amz-content-sha256": sha256,
    }
    answer = _ask(store, "PUT", key, headers, _pieces(memoryview(data), stopped))
    if answer.status >= 300:
        said = answer.data[:1000].decode("utf-8", "replace")
        message = f"Server returned non-2xx status code: {answer.status}: {said}"
        raise (AlreadyExistsError if answer.status in {409, 412} else GenericError)(message)


def kept_sha256(store: Store, key: str) -> str:
    """Return the SHA-256 that the store has kept of a whole object. One try of one request.

    Stores keep the digest that an object was uploaded with (S3 does, for ``create`` with a digest
    among others). One that is made of the digests of an upload's parts is another thing.

    Args:
        store: Where it is.
        key: Which.

    Returns:
        It, in hexadecimal; empty if none is kept, or if the store cannot be asked.
    """
    if not can_sign(store):
        return ""
    headers = {"x-amz-checksum-mode": "ENABLED", "x-amz-content-sha256": _EMPTY}
    try:
        answer = _ask(store, "HEAD", key, headers)
    except GenericError:
        return ""
    kept = answer.headers.get("x-amz-checksum-sha256", "")
    whole = answer.headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT"
    if answer.status != 200 or not whole:
        return ""
    try:
        digest = base64.b64decode(kept, validate=True)
    except ValueError:  # that of parts: their number follows it
        return ""
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else ""


def etag_is_md5(store: Store, key: str) -> bool:
    """Tell whether an ETag that looks like an MD5 is that of the object's bytes.

    It is not where the store encrypts with a key of its key service or of the caller. One try of
    one request.

    Args:
        store: Where it is.
        key: Which object.

    Returns:
        Whether it is; False if the store cannot be asked.
    """
    if not can_sign(store):
        return False
    try:
        answer = _ask(store, "HEAD", key, {"x-amz-content-sha256": _EMPTY})
    except GenericError:
        return False
    service = answer.headers.get("x-amz-server-side-encryption", "")
    own_key = answer.headers.get("x-amz-server-side-encryption-customer-algorithm", "")
    return answer.status == 200 and not service.startswith("aws:kms") and not own_key


def _ask(
    store: Store,
    method: str,
    key: str,
    headers: dict[str, str],
    body: Iterator[memoryview] | None = None,
) -> "BaseHTTPResponse":
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    endpoint = store.endpoint or f"https://s3.{store.region}.amazonaws.com"
    path = quote(f"/{store.location.bucket}/{full_key(store, key)}", safe="/-_.~")
    headers = {**headers, "host": urlsplit(endpoint).netloc}
    try:
        return _pool(str(store.spec.ca_file) if store.spec.ca_file else None).request(
            method,
            f"{endpoint}{path}",
            body=body,  # pyright: ignore[reportArgumentType] - any buffer does
            headers={**_signed(method, headers, path, store), "user-agent": "millrace"},
            retries=False,
            redirect=False,
        )
    except HTTPError as error:
        raise GenericError(f"{type(error).__name__}: {error}") from error


def _pieces(data: memoryview, stopped: Callable[[], bool] | None) -> Iterator[memoryview]:
    for at in range(0, len(data), _PIECE):
        if stopped is not None and stopped():
            raise StoppedError("The upload was called off.")
        yield data[at : at + _PIECE]


@lru_cache(maxsize=8)
def _pool(ca_file: str | None) -> "PoolManager":
    """Kept connections; they carry no credentials of their own."""
    from urllib3 import PoolManager, Timeout  # noqa: PLC0415

    timeout = Timeout(connect=_TIMEOUT, read=_TIMEOUT)
    return PoolManager(maxsize=_CONNECTIONS, timeout=timeout, ca_certs=ca_file)


def _signed(method: str, headers: dict[str, str], path: str, store: Store) -> dict[str, str]:
    """Return the headers of a request, and the signature over them all."""
    credentials, region = store.spec.credentials, store.region or "us-east-1"
    assert credentials is not None
    now = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    headers = {**headers, "x-amz-date": now}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token.get_secret_value()
    names = sorted(headers)
    lines = [f"{name}:{headers[name]}" for name in names]
    request = "\n".join(
        [method, path, "", *lines, "", ";".join(names), headers["x-amz-content-sha256"]]
    )
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode()).hexdigest()])
    secret = f"AWS4{credentials.secret_access_key.get_secret_value()}".encode()
    for word in scope.split("/"):
        secret = hmac.digest(secret, word.encode(), "sha256")
    signature = hmac.digest(secret, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key_id}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return headers
