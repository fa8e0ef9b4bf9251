"""Send signed requests to S3-compatible stores, which obstore does not offer.

`create_with_signature` and `put_with_signature` write an object whose bytes the store checks. Where
the connection is encrypted and the store checks a CRC-64/NVME (as R2 and S3 do), they compute no
SHA-256. A SHA-256 takes 0.7 to 2.7 CPU seconds per GB, and a CRC takes 0.1. obstore does not show
the headers of an answer, from which this module learns what the store checks.

`send_part` sends a part of a multipart upload.

`copy_with_signature` lets a store copy an object between its buckets.

`iterate_with_signature` and `head_with_signature` read, where obstore cannot be used.
`matches_stored_checksum` compares bytes with the checksum that a store keeps, and
`fetch_stored_sha256` returns a digest that it keeps.

Sources: "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)" and
"Checking object integrity in Amazon S3"; "S3 API compatibility", Cloudflare R2 documentation.
"""

import base64
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import unescape as unescape_xml

from obstore.exceptions import AlreadyExistsError, GenericError

from millrace.digest import Algorithm
from millrace.errors import StoppedError
from millrace.storage.answers import check_content_range, check_etag
from millrace.storage.clients import make_full_key
from millrace.storage.locations import Backend
from millrace.storage.obstore_clients import CONNECT_TIMEOUT, READ_TIMEOUT
from millrace.storage.open import Store

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

_CHUNK_SIZE = 1024 * 1024  # bytes per write to the socket: the timeout applies to each
_CONNECTIONS = 16
_MAX_ERROR_SIZE = 1000  # bytes of the body of an error that are read
_EMPTY = hashlib.sha256().hexdigest()  # digest of an empty body
_CRC_HEADER = "x-amz-checksum-crc64nvme"
_SHA256_HEADER = "x-amz-checksum-sha256"
_UNSIGNED = "UNSIGNED-PAYLOAD"
_NOT_SUPPORTED = {400, 403, 501}  # answers of stores without unsigned bodies, or for other reasons
_THROTTLED = {429, 503}
_crc_checks: dict[tuple[str, str], bool] = {}
"""True if a store checks CRCs of unsigned bodies, by its endpoint and its bucket.

The policy of a bucket can refuse unsigned bodies.
"""
_refused_trials: set[str] = set()
"""URLs of objects whose trial was refused, until the store has answered to their signed body."""
_COPIED = re.compile(rb"<ETag>([^<]*)</ETag>")
_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}  # variables that only obstore supports
_VARIABLES = {
    "AWS_REQUEST_PAYER",
    "AWS_S3_EXPRESS",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SKIP_SIGNATURE",
    "AWS_SSE_BUCKET_KEY_ENABLED",
    "AWS_SSE_CUSTOMER_KEY_BASE64",
    "AWS_SSE_KMS_KEY_ID",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
}
"""Variables that change the requests of obstore, and that this module does not read."""


def can_sign(store: Store) -> bool:
    """Decide whether this module can sign requests to a store.

    The store needs a key pair. Options, proxies and some variables of the environment are supported
    by obstore only.
    """
    given = store.spec.credentials is not None and bool(store.endpoint or store.region)
    has_proxy = not _PROXIES.isdisjoint(map(str.lower, os.environ))
    special = store.spec.options or has_proxy or not _VARIABLES.isdisjoint(os.environ)
    return store.is_s3_compatible and given and not special


def create_with_signature(
    store: Store,
    key: str,
    data: bytes | bytearray | memoryview,
    is_stopped: Callable[[], bool] | None = None,
) -> None:
    """Create an object if there is none under its key. One try, as `put_with_signature`.

    Args:
        store: Store for which `can_sign` returns true.
        key: Key of the object.
        data: Contiguous bytes of the object.
        is_stopped: Function that decides before each MiB whether to stop.

    Raises:
        StoppedError: ``is_stopped`` returned true. The request leaves no object.
        AlreadyExistsError: There is an object, or another create is undecided (409).
        GenericError: The request failed for another reason, or the key has relative segments.
    """
    answer = _put_body(store, key, data, {"if-none-match": "*"}, is_stopped)
    if answer.status in {409, 412}:
        raise AlreadyExistsError(_describe_failure("PUT", answer))
    _raise_failure("PUT", answer)


def put_with_signature(store: Store, key: str, data: bytes | bytearray | memoryview) -> None:
    """Write or replace an object. One try of one request, or of two.

    The store checks the body: against a CRC-64/NVME over TLS if the store is known to check it, and
    against a signed SHA-256 otherwise. A store checks CRCs if its answer to a PUT repeats them. The
    first PUT over TLS is a trial, and is sent again with a SHA-256 if the store refuses it. If the
    store ignores the CRC of a trial, TLS alone has protected the bytes of the trial.

    Args:
        store: Store for which `can_sign` returns true.
        key: Key of the object.
        data: Contiguous bytes of the object.

    Raises:
        GenericError: The request failed, or the key has relative segments.
    """
    _raise_failure("PUT", _put_body(store, key, data, {}))


def send_part(
    store: Store,
    key: str,
    upload_id: str,
    number: int,
    data: bytes | bytearray | memoryview,
    *,
    use_crc: bool,
    is_stopped: Callable[[], bool] | None = None,
) -> str:
    """Send a part of a multipart upload. One try of one request.

    Args:
        store: Store for which `can_sign` returns true.
        key: Key of the object.
        upload_id: Identifier of the upload, which has begun with the algorithm CRC64NVME if
            ``use_crc`` is true, and without one otherwise.
        number: Number of the part, from 1.
        data: Contiguous bytes of the part.
        use_crc: Whether the store checks a CRC-64/NVME, not a signed SHA-256.
        is_stopped: Function that decides before each MiB whether to stop.

    Returns:
        ETag of the part, without its quotes.

    Raises:
        StoppedError: ``is_stopped`` returned true.
        GenericError: The request failed.
    """
    if use_crc:
        checks = {"x-amz-content-sha256": _UNSIGNED, _CRC_HEADER: encode_crc64(data)}
    else:
        checks = {"x-amz-content-sha256": hashlib.sha256(data).hexdigest()}
    headers = {"content-length": str(len(data)), **checks}
    query = f"partNumber={number}&uploadId={quote(upload_id, safe='-_.~')}"
    body = _iterate_chunks(memoryview(data), is_stopped)
    answer = _send_request(store, "PUT", key, headers, body, query=query)
    _raise_failure("PUT", answer)
    return answer.headers.get("etag", "").strip('"')


def copy_with_signature(
    store: Store, key: str, source: Store, source_key: str, etag: str, *, overwrite: bool = True
) -> str:
    """Let a store copy an object with its attributes into another bucket. One try of one request.

    Args:
        store: Store to copy to, for which `can_sign` returns true.
        key: Key of the copy.
        source: Store of the object, at the same endpoint. The credentials of the other one read it.
        source_key: Key of the object.
        etag: ETag that the object must have.
        overwrite: Whether to replace an object that is there. Only S3 and R2 are asked not to:
            other endpoints ignore or refuse the condition.

    Returns:
        ETag of the copy, with its quotes.

    Raises:
        GenericError: The request failed. Its status is 412 if the object has another ETag, or
            there is one that may not be replaced.
    """
    name = f"/{source.location.bucket}/{make_full_key(source, source_key)}"
    headers = {
        "x-amz-content-sha256": _EMPTY,
        "x-amz-copy-source": quote(name, safe="/-_.~"),
        "x-amz-copy-source-if-match": etag,
        "content-length": "0",
    }
    if not overwrite and store.location.backend is Backend.R2:
        headers["cf-copy-destination-if-none-match"] = "*"
    elif not overwrite and store.endpoint is None:
        headers["if-none-match"] = "*"
    answer = _send_request(store, "PUT", key, headers)
    _raise_failure("PUT", answer)
    found = _COPIED.search(answer.data[:_MAX_ERROR_SIZE])
    if found is None:  # an error after the head of the answer
        raise GenericError(_describe_failure("PUT", answer))
    return unescape_xml(found[1].decode(), {"&quot;": '"'})


def _put_body(
    store: Store,
    key: str,
    data: bytes | bytearray | memoryview,
    conditions: Mapping[str, str],
    is_stopped: Callable[[], bool] | None = None,
) -> "BaseHTTPResponse":
    if not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise GenericError(f"Error parsing Path: {key!r} has an empty or a relative segment")

    def try_put(checksums: dict[str, str]) -> "BaseHTTPResponse":
        headers = {"content-length": str(len(data)), **conditions, **checksums}
        body = _iterate_chunks(memoryview(data), is_stopped)
        return _send_request(store, "PUT", key, headers, body)

    checks, bucket = _find_crc_check(store), (_get_endpoint(store), store.location.bucket)
    url = "/".join([*bucket, make_full_key(store, key)])
    if checks is not False and url not in _refused_trials:
        crc = encode_crc64(data)
        answer = try_put({"x-amz-content-sha256": _UNSIGNED, _CRC_HEADER: crc})
        if checks is None and answer.status < 300:
            _crc_checks[bucket] = answer.headers.get(_CRC_HEADER) == crc
        has_found_damage = b"<Code>BadDigest</Code>" in answer.data
        if checks is True or answer.status not in _NOT_SUPPORTED or has_found_damage:
            return answer
        _refused_trials.add(url)
    digest = hashlib.sha256(data)
    encoded = base64.b64encode(digest.digest()).decode()
    answer = try_put({"x-amz-content-sha256": digest.hexdigest(), _SHA256_HEADER: encoded})
    if answer.status not in _THROTTLED:  # as R2 answers to a second write within a second
        _refused_trials.discard(url)
    if checks is None and answer.status < 300:
        _crc_checks[bucket] = False
    return answer


def _raise_failure(method: str, answer: "BaseHTTPResponse") -> None:
    if answer.status >= 300:
        raise GenericError(_describe_failure(method, answer))


def _describe_failure(method: str, answer: "BaseHTTPResponse") -> str:
    """Return the text of an error as obstore writes it, which `millrace.storage.retry` parses."""
    return _describe_status(method, answer.status, answer.data[:1000].decode("utf-8", "replace"))


def _describe_status(method: str, status: int, body: str) -> str:
    return f"Error performing {method} - Server returned non-2xx status code: {status}: {body}"


def has_crc_check(store: Store) -> bool:
    """Decide whether an earlier answer has shown that a store checks a CRC-64/NVME over TLS."""
    return _find_crc_check(store) is True


def describe_body_check(store: Store) -> str:
    """Return a sentence about what a store checks of each upload, after an upload of 256 KiB.

    Returns:
        Sentence; empty if the store does not speak S3.
    """
    if not store.is_s3_compatible:
        return ""
    checksum = "CRC-64/NVME" if can_sign(store) and has_crc_check(store) else "signed SHA-256"
    return f"The store checks a {checksum} of each upload."


def _find_crc_check(store: Store) -> bool | None:
    """Return whether a CRC is enough for a store to check a body; None if it is not known yet."""
    endpoint = _get_endpoint(store)
    if not endpoint.startswith("https://"):
        return False  # a body without encryption and without a signature could be replaced
    return _crc_checks.get((endpoint, store.location.bucket))


def encode_crc64(data: bytes | bytearray | memoryview) -> str:
    """Return the CRC-64/NVME of bytes as S3's headers have it: in base64, high byte first."""
    import awscrt.checksums  # noqa: PLC0415 # pyright: ignore[reportMissingTypeStubs]

    crc: int = cast("Any", awscrt.checksums).crc64nvme(data)
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def matches_stored_checksum(store: Store, key: str, data: bytes | bytearray | memoryview) -> bool:
    """Decide whether the checksum that a store keeps with an object is that of bytes.

    The checksum is a CRC-64/NVME, or else a SHA-256. A CRC shows damage, and does not show a
    forgery. One try of one request.

    Returns:
        False if the store keeps no checksum, or if the request failed.
    """
    stored = _fetch_checksums(store, key)
    if crc := stored.get(_CRC_HEADER):
        return crc == encode_crc64(data)
    sha256 = stored.get(_SHA256_HEADER)
    return bool(sha256) and sha256 == base64.b64encode(hashlib.sha256(data).digest()).decode()


def fetch_stored_sha256(store: Store, key: str) -> str:
    """Return the SHA-256 that the store keeps with an object. One try of one request.

    A store keeps the SHA-256 of an upload that had one. A digest of the digests of parts is not
    returned.

    Args:
        store: Store of the object.
        key: Key of the object.

    Returns:
        Digest; empty if the store keeps none, or if the request failed.
    """
    stored = _fetch_checksums(store, key).get(_SHA256_HEADER, "")
    try:
        digest = base64.b64decode(stored, validate=True)
    except ValueError:  # a digest of parts ends with their number
        return ""
    whole = len(digest) == hashlib.sha256().digest_size
    return f"{Algorithm.SHA256}:{digest.hex()}" if whole else ""


def _fetch_checksums(store: Store, key: str) -> Mapping[str, str]:
    """Return the headers with the checksums of a whole object; empty if the request failed."""
    headers = _fetch_headers(store, key, {"x-amz-checksum-mode": "ENABLED"})
    return headers if headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT" else {}


def is_etag_md5(store: Store, key: str) -> bool:
    """Decide whether an ETag that looks like an MD5 is the MD5 of the object's bytes.

    Encryption with a key of a key service, or of the caller, changes the ETag. One try of one
    request.

    Args:
        store: Store of the object.
        key: Key of the object.

    Returns:
        Whether the ETag is the MD5; false if the request failed.
    """
    headers = _fetch_headers(store, key, {})
    return bool(headers) and shows_md5(headers)


def shows_md5(headers: Mapping[str, str]) -> bool:
    """Decide by the headers of an object whether its ETag is made of MD5s.

    Args:
        headers: Headers of the answer to a HEAD or a GET, with lower-case names.
    """
    service = headers.get("x-amz-server-side-encryption", "")
    own_key = headers.get("x-amz-server-side-encryption-customer-algorithm", "")
    return not service.startswith("aws:kms") and not own_key


def iterate_with_signature(
    store: Store,
    key: str,
    byte_range: str,
    etag: str | None,
    block_size: int,
    *,
    size: int | None = None,
) -> Generator[bytes]:
    """Yield the blocks of an object or of a range of bytes. One try of one request.

    Args:
        store: Store for which `can_sign` returns true.
        key: Key of the object.
        byte_range: Value of the header ``Range``; empty for the whole object.
        etag: ETag that the object must have.
        block_size: Largest size of a block.
        size: Size in bytes that the whole object must have, if a range is read.

    Raises:
        ChangedError: The object has another ETag or another size.
        GenericError: The request failed, or the body ended early.
    """
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    headers = {"x-amz-content-sha256": _EMPTY}
    headers |= {"range": byte_range} if byte_range else {}
    headers |= {"if-match": etag} if etag is not None else {}
    answer = _send_request(store, "GET", key, headers, preload=False)
    try:
        if answer.status >= 300:
            text = answer.read(_MAX_ERROR_SIZE).decode("utf-8", "replace")
            raise GenericError(_describe_status("GET", answer.status, text))
        check_etag(store, key, etag, answer.headers.get("etag"))
        check_content_range(store, key, size, answer.headers.get("content-range", ""))
        yield from answer.stream(block_size)
    except HTTPError as error:
        raise GenericError(f"{type(error).__name__}: {error}") from error
    finally:
        # A body that was read to its end leaves the connection open for the next request.
        if answer.status >= 300 or answer.length_remaining:
            answer.close()
        answer.release_conn()


def head_with_signature(store: Store, key: str) -> Mapping[str, str]:
    """Return the headers that describe an object. One try of one request.

    Raises:
        GenericError: The request failed.
    """
    answer = _send_request(store, "HEAD", key, {"x-amz-content-sha256": _EMPTY})
    _raise_failure("HEAD", answer)
    return answer.headers


def _fetch_headers(store: Store, key: str, headers: dict[str, str]) -> Mapping[str, str]:
    """Return the headers of the answer to a HEAD request; empty if the request failed."""
    if not can_sign(store):
        return {}
    try:
        answer = _send_request(store, "HEAD", key, {**headers, "x-amz-content-sha256": _EMPTY})
    except GenericError:
        return {}
    return answer.headers if answer.status == 200 else {}


def _send_request(
    store: Store,
    method: str,
    key: str,
    headers: dict[str, str],
    body: Iterator[memoryview] | None = None,
    *,
    query: str = "",
    preload: bool = True,
) -> "BaseHTTPResponse":
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    endpoint = urlsplit(_get_endpoint(store))
    name = quote(f"/{store.location.bucket}/{make_full_key(store, key)}", safe="/-_.~")
    path = endpoint.path + name
    headers = {**headers, "host": endpoint.netloc}
    headers = {**_sign_headers(method, headers, path, query, store), "user-agent": "millrace"}
    try:
        return _make_pool(str(store.spec.ca_file) if store.spec.ca_file else None).request(
            method,
            f"{endpoint.scheme}://{endpoint.netloc}{path}{query and '?' + query}",
            body=body,  # pyright: ignore[reportArgumentType] - urllib3 accepts any buffer
            headers=headers,
            retries=False,
            redirect=False,
            preload_content=preload,
            decode_content=False,  # the bytes of an object are those that were written
        )
    except HTTPError as error:
        raise GenericError(f"{type(error).__name__}: {error}") from error


def _get_endpoint(store: Store) -> str:
    return store.endpoint or f"https://s3.{store.region}.amazonaws.com"


def _iterate_chunks(
    data: memoryview, is_stopped: Callable[[], bool] | None
) -> Iterator[memoryview]:
    for at in range(0, len(data), _CHUNK_SIZE):
        if is_stopped is not None and is_stopped():
            raise StoppedError("The upload was stopped.")
        yield data[at : at + _CHUNK_SIZE]


@lru_cache(maxsize=8)
def _make_pool(ca_file: str | None) -> "PoolManager":
    """Return a pool of connections without credentials."""
    from urllib3 import PoolManager, Timeout  # noqa: PLC0415

    timeout = Timeout(connect=CONNECT_TIMEOUT.total_seconds(), read=READ_TIMEOUT.total_seconds())
    return PoolManager(maxsize=_CONNECTIONS, timeout=timeout, ca_certs=ca_file)


os.register_at_fork(after_in_child=_make_pool.cache_clear)  # a connection belongs to one process


def _sign_headers(
    method: str, headers: dict[str, str], path: str, query: str, store: Store
) -> dict[str, str]:
    """Return the headers of a request with their signature."""
    credentials, region = store.spec.credentials, store.region or "us-east-1"
    assert credentials is not None
    now = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    headers = {**headers, "x-amz-date": now}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token.get_secret_value()
    names = sorted(headers)
    lines = [f"{name}:{headers[name]}" for name in names]
    request = "\n".join(
        [method, path, query, *lines, "", ";".join(names), headers["x-amz-content-sha256"]]
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
