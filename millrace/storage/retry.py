"""Try a request again, with full jitter, until its time budget is spent.

obstore tries again by itself too, but neither with full jitter nor with regard to
``Retry-After``: a store's answer reaches us as a status and a body. So every verb that is one
request is tried by obstore once, and again here. Where a store of S3's kind said 429 or 503,
one HEAD of the same key by boto3 reads the header that obstore does not show, and every thread
that uses the store waits as long as it says.
"""

import errno
import logging
import random
import re
import shutil
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
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
from millrace.storage.clients import boto3_client, full_key
from millrace.storage.open import Backend, Store

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
_log = logging.getLogger(__name__)

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 10.0
_RETRIED_4XX = {408, 429}
_WARNED_AFTER = 3  # tries, or seconds
_WARNED_EVERY = 60.0  # seconds
_ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")
_SYSTEM = re.compile(r'\b(?:message|error): "([^"]+)"')
_METADATA = "/latest/api/token"  # of http://169.254.169.254
_WRITES = re.compile(r"Error performing (PUT|POST|DELETE|Put|Create|Upload|Delete)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_READS = re.compile(r"Error performing (GET|Get)")
_UNREADABLE = {"InvalidArgument", "InvalidObjectState", "InvalidRequest"}
"""What a store answers to a read of an object that is archived, or encrypted with a key of its
writer's (SSE-C)."""
_REFUSALS = {
    "InvalidAccessKeyId": "The store does not know the access key id.",
    "SignatureDoesNotMatch": "The secret does not belong to the access key id.",
    "ExpiredToken": "They were temporary, and have ended.",
    "RequestTimeTooSkewed": "The clock of this machine is wrong.",
}


class Tries:
    """The tries of one request: what is waited between them, and when there are no more.

    Args:
        store: Whose time budget (``spec.patience``) and throttle apply. The budget begins now.
        key: What the request is about, for the error's sentence.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._began = time.monotonic()
        self._deadline = self._began + store.spec.patience.total_seconds()
        self._failed = 0

    def wait_for_throttle(self) -> None:
        """Wait while the store has asked everybody to."""
        _wait_for_throttle(self._store, self._deadline)

    def wait_after(self, error: BaseException) -> None:
        """Wait until the request may be tried again, after it failed.

        Raises:
            NotFoundError, ExistsError, ChangedError, DeniedError: At once: it would fail again.
            UnavailableError: The budget is spent; the fault is its cause.
        """
        store, key = self._store, self._key
        fault = _final(error, store, key)
        if fault is not None:
            raise fault from error
        pause = _pause(self._failed)
        self._failed += 1
        self._warn(error)
        if _status(error) in {429, 503}:
            asked = _retry_after(store, key)
            if asked:
                _hold(store, asked)
                pause = 0.0
        if time.monotonic() + pause >= self._deadline or store.throttle.until >= self._deadline:
            spent = errors.UnavailableError(
                f"{store.url_of(key)}: given up after {self._failed} tries "
                f"({errors.one_line(error)}). Run it again when the store answers; "
                "nothing that was committed is lost."
            )
            spent.status = _status(error)
            raise spent from error
        time.sleep(pause)

    def _warn(self, error: BaseException) -> None:
        """Tell the user that the store does not answer, and that it is tried again."""
        now, shared, status = time.monotonic(), self._store.throttle, _status(error)
        if status == 429:  # it asks for a pause, and works
            return
        if self._failed < _WARNED_AFTER and now - self._began < _WARNED_AFTER:
            return
        if shared.warned is not None and now - shared.warned < _WARNED_EVERY:
            return
        shared.warned = now
        said = f"answers with status {status}" if status else f"does not answer ({_cause(error)})"
        _log.warning(
            "%s %s. Trying again for %.0f s.",
            self._store.endpoint or self._store.url,
            said,
            max(0.0, self._deadline - now),
        )


def trying(store: Store, key: str, call: Callable[[], T]) -> T:
    """Make one request, and again while it fails for reasons that pass.

    Args:
        store: Whose time budget (``spec.patience``) and throttle apply.
        key: What the request is about, for the error's sentence.
        call: One request through ``store.raw``. It may have been carried out although its
            answer was lost, so it must bear repeating.

    Raises:
        NotFoundError, ExistsError, ChangedError, DeniedError: At once.
        NoSpaceError: At once: the disk of a folder is full.
        ConfigurationError: At once: the key is no key.
        UnavailableError: The budget is spent; the last fault is its cause.
    """
    tries = Tries(store, key)
    while True:
        tries.wait_for_throttle()
        try:
            return call()
        except (BaseError, OSError, ValueError) as error:
            tries.wait_after(error)


def with_boto3(
    store: Store,
    key: str,
    call: "Callable[[S3Client], T]",
    *,
    client: "S3Client | None" = None,
) -> T:
    """Ask boto3 for something; tried again, and what goes wrong is said, as by the other verbs.

    Args:
        store: Of S3's kind.
        key: That it is about.
        call: What is asked.
        client: Of the store, that tries once, where many are asked: to make one takes a while.

    Raises:
        MillraceError: As of the other verbs.
    """
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    asked = client or boto3_client(store, tries=1)

    def request() -> T:
        try:
            return call(asked)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
            code = error.response.get("Error", {}).get("Code", "")
            raise GenericError(
                f"Error performing {error.operation_name} - Server returned non-2xx status code: "
                f"{status}: <Code>{code}</Code>"
            ) from error
        except BotoCoreError as error:
            system = _ERRNO.search(str(error.kwargs.get("error", "")))
            raise GenericError(f"{error} - {system[1]}" if system else str(error)) from error

    return trying(store, key, request)


def translated(error: BaseException, store: Store, key: str) -> errors.MillraceError:
    """Our error for obstore's, for what obstore has already tried again by itself."""
    final = _final(error, store, key)
    return final or errors.UnavailableError(f"{store.url_of(key)}: {errors.one_line(error)}")


def _pause(attempt: int) -> float:
    """Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/ ."""
    return random.uniform(0.0, min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2.0**attempt))


def _cause(error: BaseException) -> str:
    """Return the innermost cause of an error: what the system said, if obstore's dump has it."""
    system = _SYSTEM.findall(str(error))
    return system[-1] if system else errors.one_line(error).rpartition(" - ")[2]


def _status(error: BaseException) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _final(error: BaseException, store: Store, key: str) -> errors.MillraceError | None:
    """Our error for one that will not pass; None for one that may."""
    where = store.url_of(key)
    if known := _of_backend(error, store, where):
        return known
    status = _status(error)
    match error:
        case AlreadyExistsError() | FileExistsError():
            return errors.ExistsError(f"{where} is already there.")
        case FileNotFoundError() | NotADirectoryError():
            status = 404
        case PreconditionError() | NotModifiedError():
            status = 412
        case PermissionDeniedError() | UnauthenticatedError() | PermissionError():
            status = 403
        case OSError():
            return errors.MillraceError(f"{where}: {errors.one_line(error)}.")
        case _ if "DeleteObjects request failed for key" in str(error):
            # The store has answered, of this key at least; whoever must know asks of each.
            return errors.MillraceError(f"{where}: {errors.one_line(error)}.")
        case _ if refuses_key(error):
            return errors.ConfigurationError(
                f"{where}: this cannot be a key ({errors.one_line(error)}). Rename or remove it."
            )
        case ValueError():
            raise error
        case _:
            pass
    return None if status is None else _of_status(status, where, error, store)


def _of_backend(error: BaseException, store: Store, where: str) -> errors.MillraceError | None:
    """Return the error that only this kind of store knows: a full disk, or no credentials."""
    if store.location.backend is Backend.FILE:
        full = _number_of(error) in {errno.ENOSPC, errno.EDQUOT}
        return _no_space(store, where, error) if full else None
    return _without_credentials(error, store) if store.speaks_s3 else None


def refuses_key(error: BaseException) -> bool:
    """Return whether obstore cannot hold a key: an empty segment, ``..``, a control character."""
    words = ("Error parsing Path", "Could not parse path")
    return isinstance(error, InvalidPathError) or any(word in str(error) for word in words)


def _number_of(error: BaseException) -> int | None:
    """Return the operating system's number of an error; obstore writes it into the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def _no_space(store: Store, where: str, error: BaseException) -> errors.NoSpaceError:
    free = shutil.disk_usage(store.location.bucket).free
    why = "is full" if _number_of(error) == errno.ENOSPC else "has no room left in its quota"
    return errors.NoSpaceError(
        f"{where}: the disk {why}: {free:,} bytes are free. Free some, or choose another folder; "
        "nothing that was committed is lost."
    )


def _of_status(
    status: int, where: str, error: BaseException, store: Store
) -> errors.MillraceError | None:
    match status:
        case 404:
            return errors.NotFoundError(f"There is no {where}.")
        case 304 | 412:
            return errors.ChangedError(f"{where} is no longer the object that was meant.")
        case 400 | 403 if _is_unreadable(error):
            return errors.CorruptError(
                f"{where} cannot be read: whoever wrote it has encrypted it with a key of their "
                "own, or archived it. Delete it, or write it anew."
            )
        case 401 | 403:
            return _denied(where, error, store)
        case _ if 400 <= status < 500 and status not in _RETRIED_4XX:
            return errors.MillraceError(f"{where}: the store answered {errors.one_line(error)}")
        case _:
            return None


def _is_unreadable(error: BaseException) -> bool:
    """Tell whether a read was refused for what the object is, and not for who asks."""
    code = _CODE.search(str(error))
    return bool(code) and code[1] in _UNREADABLE and bool(_READS.search(str(error)))


def _denied(where: str, error: BaseException, store: Store) -> errors.DeniedError:
    """Return the error for refused credentials, which tells a wrong key from one that may less."""
    code = _CODE.search(str(error))
    why = _REFUSALS.get(code[1], "") if code else ""
    if not why and _WRITES.search(str(error)) and _may_list(store):
        why = "They may list this bucket: the key is right, but does not allow to write here."
    refused = errors.DeniedError(
        f"{where}: the store refuses these credentials. "
        f"{why or 'Check that they are for this bucket and prefix, and allow what is being done.'}"
    )
    refused.why = why
    return refused


def _may_list(store: Store) -> bool:
    """Ask the store, once, whether the credentials may list."""
    found = store.throttle.may_list
    if found is None:
        try:
            pages = obstore.list(store.raw, chunk_size=1)  # pyright: ignore[reportUnknownMemberType]
            next(iter(pages), None)
            found = True
        except (BaseError, OSError):
            found = False
        store.throttle.may_list = found
    return found


def _without_credentials(error: BaseException, store: Store) -> errors.DeniedError | None:
    """Return the error for a request that no credentials were found for.

    Without any, obstore asks the metadata service of EC2, which other machines do not have.
    """
    text = str(error)
    asked = _METADATA in text and (_status(error) or 0) < 500
    if not (asked or "Unable to locate credentials" in text):
        return None
    return errors.DeniedError(
        f"{store.url}: there are no credentials for this store. Set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or write `credentials` beside its url. (~/.aws is not read.)"
    )


def _wait_for_throttle(store: Store, deadline: float) -> None:
    while (rest := min(store.throttle.until, deadline) - time.monotonic()) > 0:
        time.sleep(rest)


def _hold(store: Store, pause: float) -> None:
    with store.throttle.lock:
        store.throttle.until = max(store.throttle.until, time.monotonic() + pause)


def _retry_after(store: Store, key: str) -> float:
    """Seconds that the store asks us to wait; 0 where it does not say."""
    if not store.speaks_s3:
        return 0.0
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    try:
        answer = boto3_client(store, tries=1).head_object(
            Bucket=store.location.bucket, Key=full_key(store, key)
        )["ResponseMetadata"]
    except ClientError as error:
        answer = error.response.get("ResponseMetadata", {})
    except BotoCoreError:
        return 0.0  # the jittered pause stands
    return seconds_of(answer.get("HTTPHeaders", {}).get("retry-after", ""))


def seconds_of(retry_after: str) -> float:
    """Return the seconds of a ``Retry-After`` header: a number or a date (RFC 9110)."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0
