"""Retry requests with full jitter, within a time budget.

obstore's own retries have no full jitter and ignore ``Retry-After``, since obstore exposes only
the status and the body of an answer. Therefore obstore tries each request once, and this module
retries. After 429 or 503 from an S3-compatible store, boto3 reads the header with one HEAD of the
same key. All threads that use the store then wait for the requested time.
"""

import errno
import logging
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    InvalidPathError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from millrace import errors
from millrace.formatting import clean_text
from millrace.retry_after import parse_retry_after
from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.storage.forks import note_folder_used
from millrace.storage.locations import Backend
from millrace.storage.open import Store

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
_stopped = ContextVar[threading.Event | None]("stopped", default=None)
"""Event after which a thread retries no request."""
_log = logging.getLogger(__name__)

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_LOOP = "File system loop found: "
_FILE = re.compile(
    r"(?:file|dir|operation on|found:|to) (/.*?)(?:#\d+)?(?:: | points to )", re.DOTALL
)
_FILE_NAME = re.compile(r'Path "/?(.*?)"', re.DOTALL)
_MAKES_FILE = re.compile(r"#\d+(?:'|: )|Unable to (create|rename|copy) ")
_CHANGES_FOLDER = re.compile(rf"{_MAKES_FILE.pattern}|Unable to delete ")
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 10.0
_RETRIED_4XX = {408, 429}
_WARNING_DELAY = 3  # tries, or seconds, before the first warning
_WARNING_INTERVAL = 60.0  # seconds between warnings
_ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")
_SYSTEM = re.compile(r'\b(?:message|error): "([^"]+)"')
_METADATA = "/latest/api/token"  # of http://169.254.169.254
_WRITES = re.compile(r"Error performing (PUT|POST|DELETE|Put|Create|Upload|Delete)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_READS = re.compile(r"Error performing (GET [^\s?]+ |Get)")  # a listing has a query
_KEY_LENGTH = re.compile(r"Credential access key has length (\d+), should be (\d+)")  # of R2
_NO_ASCII = re.compile(
    r'Metadata value for "+([^"]+)"+ contained non UTF-8'
    r'|Non ascii characters found in S3 metadata for key "([^"]+)"'
    r"|(\S+) header contained non UTF-8"
)
"""Refusal of an object's attribute by obstore, or by boto3."""
_INVALID = "Parameter validation failed"  # by boto3, which has sent nothing
_NO_LENGTH = "Generic GCS error: Content-Length Header missing"
"""Refusal by obstore of an answer of Google without the length of the body."""
_PROVIDER = "External GCP credential provider"
_TRANSIENT = {
    "BadDigest",  # the bytes have changed on their way to the store
    "XAmzContentSHA256Mismatch",
    "IncompleteBody",  # the bytes have not arrived, or not in time
    "RequestTimeout",
    "RequestTimeoutException",
    "PriorRequestNotComplete",
    "OperationAborted",  # by another request for the same object
}
"""Codes of refusals with a status of 4xx after which the same request can succeed."""
_NO_FILE = {errno.ENOTDIR, errno.EISDIR}
_CORRECT_PERMISSIONS = (
    "Correct the permissions of the file and of its folders, or choose another folder."
)
_NEEDS_FOLDER = (
    "In a folder, the key of an object cannot be the beginning of other keys. Choose another key."
)
_FILE_REMEDIES = {
    errno.EACCES: _CORRECT_PERMISSIONS,
    errno.EPERM: _CORRECT_PERMISSIONS,
    errno.EROFS: _CORRECT_PERMISSIONS,
    errno.ENOTDIR: _NEEDS_FOLDER,
    errno.EISDIR: _NEEDS_FOLDER,
    errno.ENAMETOOLONG: "The key is invalid. Choose a shorter key.",
    errno.ELOOP: "Remove the link, which leads to itself or to a folder above it.",
}
"""Remedies of errors of the operating system that another try cannot mend."""
_UNREADABLE = {"InvalidArgument", "InvalidObjectState", "InvalidRequest"}
"""Codes of refused reads of archived objects, and of objects with customer keys (SSE-C)."""
_REFUSALS = {
    "InvalidAccessKeyId": "The store does not know the access key id.",
    "SignatureDoesNotMatch": "The secret does not belong to the access key id.",
    "ExpiredToken": "They were temporary, and have expired.",
    "RequestTimeTooSkewed": "The clock of this machine is wrong.",
}


class RetryLoop:
    """Pauses between the tries of one request, and the end of its time budget.

    Args:
        store: Store with the time budget (``spec.retry_timeout``) and the throttle. The budget
            begins now.
        key: Key of the request, for error messages.
        is_fork_safe: Whether a forked process can make the request.

    Raises:
        ConfigurationError: The process was forked.
    """

    def __init__(self, store: Store, key: str, *, is_fork_safe: bool = False) -> None:
        if not is_fork_safe:
            require_client(store)
        if store.location.backend is Backend.FILE:
            note_folder_used()
        self._store, self._key = store, key
        self._started_at = time.monotonic()
        self._deadline = self._started_at + store.spec.retry_timeout.total_seconds()
        self._failures = 0

    def wait_for_throttle(self) -> None:
        """Wait until the end of the pause that the store asked for."""
        _wait_for_throttle(self._store, self._key, self._deadline)

    def wait_after_error(self, error: BaseException) -> None:
        """Wait until a failed request may be tried again.

        Raises:
            NotFoundError, ExistsError, ChangedError, DeniedError: At once: a retry cannot help.
            StoppedError: The event of `limit_retries` is set.
            UnavailableError: The budget is spent. Its cause is the last fault.
        """
        store, key = self._store, self._key
        fault = _translate_final_error(error, store, key)
        if fault is not None:
            raise fault from error
        pause = draw_backoff(self._failures)
        self._failures += 1
        self._warn(error)
        if _parse_status(error) in {429, 503}:
            requested_pause = _fetch_retry_after(store, key)
            if requested_pause:
                _extend_throttle(store, requested_pause)
                pause = 0.0
        if time.monotonic() + pause >= self._deadline or store.throttle.resume_at >= self._deadline:
            exhausted = errors.UnavailableError(
                f"{clean_text(store.make_url(key))}: given up after {self._failures} tries "
                f"({errors.format_error(error)}). Run it again when the store answers; "
                "nothing that was committed is lost."
            )
            exhausted.status = _parse_status(error)
            raise exhausted from error
        _sleep(pause, store, key)

    def _warn(self, error: BaseException) -> None:
        """Log that the store does not answer, and that the request is tried again."""
        now, shared, status = time.monotonic(), self._store.throttle, _parse_status(error)
        if status == 429:  # the store works, and asks for a pause
            return
        if self._failures < _WARNING_DELAY and now - self._started_at < _WARNING_DELAY:
            return
        if shared.warned_at is not None and now - shared.warned_at < _WARNING_INTERVAL:
            return
        shared.warned_at = now
        problem = (
            f"answers with status {status}" if status else f"does not answer ({_find_cause(error)})"
        )
        _log.warning(
            "%s %s. Trying again for %.0f s.",
            self._store.endpoint or self._store.url,
            problem,
            max(0.0, self._deadline - now),
        )


def call_with_retries(
    store: Store, key: str, call: Callable[[], T], *, is_fork_safe: bool = False
) -> T:
    """Make one request, and repeat it while it fails for transient reasons.

    Args:
        store: Store whose time budget (``spec.retry_timeout``) and throttle apply.
        key: Key of the request, for error messages.
        call: Function that makes one request through ``store.raw``. The request must be
            repeatable, since it may have succeeded although its answer was lost.
        is_fork_safe: Whether the request is made without obstore, so that a forked process can
            make it.

    Raises:
        NotFoundError, ExistsError, ChangedError, DeniedError: At once.
        NoSpaceError: At once: the disk of a folder is full.
        ConfigurationError: At once: the key is invalid, the file of a key cannot be read, or the
            process was forked.
        UnavailableError: The budget is spent. Its cause is the last fault.
    """
    retries = RetryLoop(store, key, is_fork_safe=is_fork_safe)
    while True:
        retries.wait_for_throttle()
        try:
            return call()
        except (BaseError, OSError, ValueError) as error:
            retries.wait_after_error(error)


def require_client(store: Store) -> None:
    """Check that obstore can make requests to a store.

    Raises:
        ConfigurationError: The process was forked.
    """
    if store.has_lost_client:
        raise errors.ConfigurationError(
            f"This process was forked after {store.url} was opened. Its client of the store would "
            "hang. Start processes by `spawn`."
        )


def call_boto3(
    store: Store,
    key: str,
    call: "Callable[[S3Client], T]",
    *,
    client: "S3Client | None" = None,
) -> T:
    """Make a request by boto3, with the retries and errors of the other functions.

    An answer that ends early, stalls or cannot be parsed is a transient fault.

    Args:
        store: Store that is compatible with S3.
        key: Key of the request.
        call: Function that makes the request.
        client: Client that tries each request once. Pass the same client for many requests,
            since the construction of a client is slow.

    Raises:
        MillraceError: The request failed, with the errors of `call_with_retries`.
    """
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
    from botocore.parsers import ResponseParserError  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    chosen_client = client or make_boto3_client(store, max_attempts=1)

    def send_request() -> T:
        try:
            return call(chosen_client)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
            answer = error.response.get("Error", {})
            code, message = answer.get("Code", ""), answer.get("Message", "")
            raise GenericError(
                f"Error performing {error.operation_name} - Server returned non-2xx status code: "
                f"{status}: <Code>{code}</Code><Message>{message}</Message>"
            ) from error
        except BotoCoreError as error:
            system = _ERRNO.search(str(error.kwargs.get("error", "")))
            raise GenericError(f"{error} - {system[1]}" if system else str(error)) from error
        except (HTTPError, ResponseParserError) as error:
            raise GenericError(f"{type(error).__name__}: {error}") from error

    return call_with_retries(store, key, send_request, is_fork_safe=True)


def translate_error(error: BaseException, store: Store, key: str) -> errors.MillraceError:
    """Return Millrace's error for an error that obstore raised after its own retries."""
    final = _translate_final_error(error, store, key)
    return final or errors.UnavailableError(f"{store.make_url(key)}: {errors.format_error(error)}")


def draw_backoff(attempt: int) -> float:
    """Draw a pause with full jitter.

    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    return random.uniform(0.0, min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2.0**attempt))


def _find_cause(error: BaseException) -> str:
    """Return the innermost cause of an error, such as the system's message in obstore's dump."""
    system = _SYSTEM.findall(str(error))
    return system[-1] if system else errors.format_error(error).rpartition(" - ")[2]


def _parse_status(error: BaseException) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _translate_final_error(
    error: BaseException, store: Store, key: str
) -> errors.MillraceError | None:
    """Return Millrace's error for a permanent error of obstore; None for a transient one."""
    where = clean_text(store.make_url(key))
    known = _translate_backend_error(error, store, where) or _translate_range(error, where)
    if known := known or _translate_attribute(error, where):
        return known
    status = _parse_status(error)
    match error:
        case _ if _find_code(error) in _TRANSIENT or _PROVIDER in str(error):
            status = None  # of a provider: a token is read again
        case AlreadyExistsError() | FileExistsError():
            return errors.ExistsError(f"{where} already exists.")
        case FileNotFoundError() | NotADirectoryError():
            status = 404
        case PreconditionError() | NotModifiedError():
            status = 412
        case PermissionDeniedError() | UnauthenticatedError() | PermissionError():
            status = 403
        case OSError() if status is None:  # a writer of obstore has answers of a store in these
            return errors.MillraceError(f"{where}: {errors.format_error(error)}.")
        case _ if "DeleteObjects request failed for key" in str(error):
            # The store has refused one key. A caller may delete each key with its own request.
            return errors.MillraceError(f"{where}: {errors.format_error(error)}.")
        case _ if is_key_error(error):
            return errors.ConfigurationError(
                f"{where}: the key is invalid ({errors.format_error(error)}). "
                "Rename the object, or delete it with the store's own tools."
            )
        case ValueError():
            raise error
        case _:
            pass
    return None if status is None else _translate_status(status, where, error, store)


def _translate_backend_error(
    error: BaseException, store: Store, where: str
) -> errors.MillraceError | None:
    """Return the error of a folder, a bucket or credentials that are missing; None for others."""
    if store.location.backend is Backend.FILE:
        return _translate_file_error(error, store, where)
    if not store.is_s3_compatible:
        return None
    if _find_code(error) == "NoSuchBucket":
        return errors.NotFoundError(
            f"{store.url}: there is no such bucket. Create it, or correct the URL."
        )
    return _translate_missing_credentials(error, store) or _translate_redirect(error, store)


def _translate_file_error(
    error: BaseException, store: Store, where: str
) -> errors.MillraceError | None:
    """Return the error of a file or a folder that another try cannot mend; None for others."""
    number, text = _parse_errno(error), errors.format_error(error)
    if number in errors.FULL_DISK:
        return _make_no_space_error(store, where, error)
    if number in _NO_FILE and not _MAKES_FILE.search(text):
        return errors.NotFoundError(f"There is no {where}.")
    if is_key_error(error) and (name := _FILE_NAME.search(str(error))):
        return errors.ConfigurationError(
            f"{where}: no key can be {clean_text(ascii(name[1]))}, which has a control character, "
            "is not UTF-8, or has an empty or a relative segment. Rename the file, or choose "
            "another key."
        )
    number = errno.ELOOP if _LOOP in text else number
    remedy = _FILE_REMEDIES.get(number or 0)
    if remedy is None:
        return None
    found = _FILE.search(text)
    message = f"{clean_text(found[1] if found else where)}: {os.strerror(number or 0)}. {remedy}"
    is_refused = remedy == _CORRECT_PERMISSIONS and _CHANGES_FOLDER.search(text)
    return errors.DeniedError(message) if is_refused else errors.ConfigurationError(message)


def translate_write_error(error: OSError, store: Store, key: str) -> errors.MillraceError:
    """Return Millrace's error for a file that cannot be written, with what is in its way.

    Args:
        error: Error of the operating system.
        store: Folder of the file.
        key: Key of the file.
    """
    path = Path(store.location.bucket, key)
    folders = {str(one) for one in path.parents}
    number = error.errno or 0
    if number == errno.EEXIST and error.filename in folders:  # a file where a folder is needed
        number = errno.ENOTDIR
    remedy = _FILE_REMEDIES.get(number)
    if remedy is None:
        return translate_error(error, store, key)
    named = error.filename if error.filename in folders else str(path)
    message = f"{clean_text(named)}: {os.strerror(number)}. {remedy}"
    is_refused = remedy == _CORRECT_PERMISSIONS
    return errors.DeniedError(message) if is_refused else errors.ConfigurationError(message)


def _translate_range(error: BaseException, where: str) -> errors.MillraceError | None:
    """Return the error of a range that begins after the end of its object; None for others."""
    said = str(error)
    if _parse_status(error) == 416 or "range was invalid" in said or "Invalid range" in said:
        return errors.CorruptError(f"{where} ends before the requested range of bytes.")
    return None


def _translate_attribute(error: BaseException, where: str) -> errors.MillraceError | None:
    """Return the error of an object whose attributes no client sends or reads; None for others."""
    said = str(error)
    if found := _NO_ASCII.search(said):
        return errors.MillraceError(
            f"{where}: {clean_text(next(filter(None, found.groups())))} of its metadata has other "
            "characters than ASCII, which clients of S3 refuse. Write the object again, with other "
            "metadata."
        )
    if _NO_LENGTH in said:
        return errors.MillraceError(
            f"{where}: the store does not send the length of the object. Google decompresses an "
            "object with `Content-Encoding: gzip`, and sends no length. Give the object the "
            "metadata `Cache-Control: no-transform`, or write it without a Content-Encoding."
        )
    if said.startswith(_INVALID):
        return errors.MillraceError(f"{where}: {errors.format_error(error)}")
    return None


def is_key_error(error: BaseException) -> bool:
    """Decide whether obstore refuses a key.

    obstore refuses keys with an empty segment, ``..`` or a control character.
    """
    words = ("Error parsing Path", "Could not parse path")
    return isinstance(error, InvalidPathError) or any(word in str(error) for word in words)


def _parse_errno(error: BaseException) -> int | None:
    """Return the operating system's number of an error, which obstore writes into the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def _make_no_space_error(store: Store, where: str, error: BaseException) -> errors.NoSpaceError:
    free = shutil.disk_usage(store.location.bucket).free
    why = "is full" if _parse_errno(error) == errno.ENOSPC else "has reached its quota"
    return errors.NoSpaceError(
        f"{where}: the disk {why}: {free:,} bytes are free. Free some, or choose another folder; "
        "nothing that was committed is lost."
    )


def _translate_status(
    status: int, where: str, error: BaseException, store: Store
) -> errors.MillraceError | None:
    match status:
        case 404:
            return errors.NotFoundError(f"There is no {where}.")
        case 304 | 412:
            return errors.ChangedError(
                f"{where} was replaced: its ETag is no longer the one that was requested."
            )
        case 400 | 403 if _is_unreadable(error):
            return errors.CorruptError(
                f"{where} cannot be read: the object is archived, or encrypted with another key. "
                "Delete the object, or write it again."
            )
        case _ if status in {401, 403} or _KEY_LENGTH.search(str(error)):
            return _make_denied_error(where, error, store)
        case _ if (400 <= status < 500 or status == 501) and status not in _RETRIED_4XX:
            return errors.MillraceError(
                f"{where}: the store refused the request: {errors.format_error(error)}"
            )
        case _:
            return None


def _find_code(error: BaseException) -> str:
    """Return the code of S3 in the body of an answer; empty if there is none."""
    match = _CODE.search(str(error))
    return match[1] if match else ""


def _is_unreadable(error: BaseException) -> bool:
    """Decide whether a read was refused because of the object, not of the credentials."""
    said = str(error)
    is_read = bool(_READS.search(said)) and not _KEY_LENGTH.search(said)
    return is_read and _find_code(error) in _UNREADABLE


def _make_denied_error(where: str, error: BaseException, store: Store) -> errors.DeniedError:
    """Return the error for refused credentials, with the reason if one can be found."""
    why = _REFUSALS.get(_find_code(error), "")
    if length := _KEY_LENGTH.search(str(error)):
        why = (
            f"The access key id has {length[1]} characters, and must have {length[2]}. Check that "
            "the id and the secret are not swapped, and that they are of a key of this store."
        )
    if not why and _WRITES.search(str(error)) and _can_list(store):
        why = "They may list this bucket, but not write here: give them that right."
    refused = errors.DeniedError(
        f"{where}: the store refuses these credentials. "
        f"{why or 'Check that they are for this bucket and prefix, and allow this request.'}"
    )
    refused.reason = why
    return refused


def _can_list(store: Store) -> bool:
    """Decide whether the credentials may list. One request per store; the answer is kept."""
    found = store.throttle.can_list
    if found is None:
        try:
            pages = obstore.list(store.raw, chunk_size=1)  # pyright: ignore[reportUnknownMemberType]
            next(iter(pages), None)
            found = True
        except (BaseError, OSError):
            found = False
        store.throttle.can_list = found
    return found


def _translate_missing_credentials(error: BaseException, store: Store) -> errors.DeniedError | None:
    """Return the error for missing credentials; None for other errors.

    Without credentials, obstore asks the metadata service of EC2, which other machines lack.
    """
    text = str(error)
    has_asked_metadata = _METADATA in text and (_parse_status(error) or 0) < 500
    if not (has_asked_metadata or "Unable to locate credentials" in text):
        return None
    return errors.DeniedError(
        f"{store.url}: there are no credentials for this store. Set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or write `credentials` beside its URL. (~/.aws is not read.)"
    )


def _translate_redirect(error: BaseException, store: Store) -> errors.ConfigurationError | None:
    """Return the error of a redirect to another region; None for other errors.

    obstore describes such an answer of S3 without its status.
    """
    if _parse_status(error) != 301 and "Received redirect without LOCATION" not in str(error):
        return None
    return errors.ConfigurationError(
        f"{store.url}: the bucket is in another region than {store.region or 'us-east-1'}, or has "
        "another endpoint. Correct `region` (or AWS_REGION), or `endpoint`."
    )


def _wait_for_throttle(store: Store, key: str, deadline: float) -> None:
    while (remaining := min(store.throttle.resume_at, deadline) - time.monotonic()) > 0:
        _sleep(remaining, store, key)


@contextmanager
def limit_retries(stopped: threading.Event) -> Generator[None]:
    """Retry no request of this thread after an event, until the context ends."""
    token = _stopped.set(stopped)
    try:
        yield
    finally:
        _stopped.reset(token)


def _sleep(seconds: float, store: Store, key: str) -> None:
    """Wait before the next try.

    Raises:
        StoppedError: The event of `limit_retries` is set.
    """
    stopped = _stopped.get()
    if stopped is None:
        time.sleep(seconds)
    elif stopped.wait(seconds):
        raise errors.StoppedError(f"{store.make_url(key)}: the request was cancelled.")


def _extend_throttle(store: Store, pause: float) -> None:
    with store.throttle.lock:
        store.throttle.resume_at = max(store.throttle.resume_at, time.monotonic() + pause)


def _fetch_retry_after(store: Store, key: str) -> float:
    """Return the seconds that the store asks clients to wait; 0 without a `Retry-After` header."""
    if not store.is_s3_compatible:
        return 0.0
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    try:
        answer = make_boto3_client(store, max_attempts=1).head_object(
            Bucket=store.location.bucket, Key=make_full_key(store, key)
        )["ResponseMetadata"]
    except ClientError as error:
        answer = error.response.get("ResponseMetadata", {})
    except BotoCoreError:
        return 0.0  # the caller waits for its jittered pause
    return parse_retry_after(answer.get("HTTPHeaders", {}).get("retry-after", ""))
