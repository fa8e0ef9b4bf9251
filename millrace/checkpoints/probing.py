"""Probe of a destination: a trial of the requests that a save makes.

The probe creates an object under the job's prefix, reads it, overwrites it, reads it again and
deletes it. A query for permissions would be faster, but proves less. Google is also asked for
permissions, since the trial makes no multipart upload.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from millrace import errors
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.probes import make_write_probe_key
from millrace.storage import Backend, Store, classify_error, create, delete, list_objects, put, read

SAMPLE_SIZE = 4 << 20
"""Size in bytes of the upload that measures the rate."""
REQUEST_TIMEOUT = timedelta(seconds=20)
"""Default limit on the time for retries of each request of a probe."""


class ProbeVerdict(StrEnum):
    """Verdict on whether a job could save to a destination."""

    READY = "ready"
    READ_ONLY = "read only"  # the credentials may list, but not write, overwrite or delete
    DENIED = "denied"  # the credentials are unknown, or have no right
    NOT_FOUND = "not found"  # no such bucket
    THROTTLED = "throttled"  # the store asks for a pause
    UNREACHABLE = "unreachable"  # the store does not answer, or is broken
    WRONG = "wrong"  # the store returns other bytes than were written
    NO_SPACE = "no space"  # the disk has too little space for the checkpoint
    TOO_SLOW = "too slow"  # the upload would exceed the time limit
    UNKNOWN = "unknown"  # any other error

    @property
    def exit_code(self) -> int:
        """Exit code of `millrace checkpoint probe`: 0 if ready, else from 11 on in this order."""
        return 0 if self is ProbeVerdict.READY else 10 + list(ProbeVerdict).index(self)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        verdict: Verdict.
        reason: Sentence with the reason, and what to do if the destination is not ready.
        rate: Rate of one upload, in bytes per second; 0 if no upload succeeded.
        expected: Seconds that the upload of a checkpoint takes at this rate; 0 without a size.
    """

    verdict: ProbeVerdict
    reason: str
    rate: float = 0.0
    expected: float = 0.0

    @property
    def is_ready(self) -> bool:
        """True if a job can save to the destination."""
        return self.verdict is ProbeVerdict.READY


def probe(
    store: Store,
    job: str,
    *,
    size: int = 0,
    within: timedelta | None = None,
    timeout: timedelta = REQUEST_TIMEOUT,
) -> ProbeResult:
    """Try the requests of a save, and leave no object.

    Args:
        store: Store to save to.
        job: Name of the job.
        size: Size of a checkpoint in bytes, to check its time and space; 0 to check neither.
        within: Longest time of an upload, such as that of the cooldown.
        timeout: Limit on the time for retries of each request.
    """
    key = make_write_probe_key(CheckpointKeys(job).job, secrets.token_hex(8))
    hurried = store.with_retry_timeout(timeout)
    folder = store.location.bucket if store.location.backend is Backend.FILE else None
    tried = _try_save_at_google if store.location.backend is Backend.GS else _try_save
    return run_probe(
        store.url, lambda: tried(hurried, job, key), size=size, within=within, folder=folder
    )


def run_probe(
    url: str,
    tried: Callable[[], float],
    *,
    size: int,
    within: timedelta | None,
    folder: str | None = None,
) -> ProbeResult:
    """Return the verdict on a destination, from the results of trying it.

    Args:
        url: URL of the destination.
        tried: Function that makes the trial under `translate_errors`, and returns the rate of an
            upload in bytes per second.
        size: Size of a checkpoint in bytes, as for `probe`.
        within: Longest time of an upload, as for `probe`.
        folder: Folder of this machine whose disk needs space; None for a bucket.
    """
    try:
        rate = tried()
    except ProbeFailedError as failed:
        return ProbeResult(failed.verdict, str(failed))
    expected = size / rate
    free = None if folder is None else shutil.disk_usage(folder).free
    if free is not None and free < size:
        reason = (
            f"{url} has {free:,} bytes free, and a checkpoint has {size:,}: free some, or choose "
            "another folder."
        )
        return ProbeResult(ProbeVerdict.NO_SPACE, reason, rate, expected)
    if within is not None and expected > within.total_seconds():
        reason = (
            f"At {rate / 1e6:.1f} MB/s a checkpoint of {size:,} bytes takes {expected:.0f} s, and "
            f"{within.total_seconds():.0f} s are allowed: make the cooldown longer, or let more "
            "members upload."
        )
        return ProbeResult(ProbeVerdict.TOO_SLOW, reason, rate, expected)
    reason = f"{url} stores, returns, overwrites and deletes objects."
    return ProbeResult(ProbeVerdict.READY, reason, rate, expected)


class ProbeFailedError(Exception):
    """A trial has shown that the destination is not ready.

    Args:
        verdict: Verdict on the destination.
        reason: Sentence with the reason, and what to do.
    """

    def __init__(self, verdict: ProbeVerdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


def _try_save(store: Store, job: str, key: str) -> float:
    """Make the requests of a save, and return the rate of the upload in bytes per second."""
    with translate_errors(ProbeVerdict.DENIED):
        next(list_objects(store, f"{job}/"), None)
    body, other = os.urandom(SAMPLE_SIZE), secrets.token_bytes(16)
    with translate_errors(ProbeVerdict.READ_ONLY):
        try:
            began = time.monotonic()
            create(store, key, body)
            rate = len(body) / max(time.monotonic() - began, 1e-6)
            check_same(store.make_url(key), read(store, key, max_size=SAMPLE_SIZE), body)
            put(store, key, other)
            check_same(store.make_url(key), read(store, key, max_size=SAMPLE_SIZE), other)
        except BaseException:
            with suppress(errors.MillraceError):
                delete(store, [key])
            raise
        failures = delete(store, [key])
    if failures:
        raise ProbeFailedError(
            ProbeVerdict.READ_ONLY,
            f"{store.make_url(key)} could not be deleted ({failures[0].reason}): allow deletion, "
            "so that old checkpoints can be removed. Delete this object by hand.",
        )
    return rate


def _try_save_at_google(store: Store, job: str, key: str) -> float:
    """Make the requests of a save, and check the permissions that only large uploads need."""
    try:
        rate = _try_save(store, job, key)
    except ProbeFailedError as failed:
        if failed.verdict not in (ProbeVerdict.DENIED, ProbeVerdict.READ_ONLY):
            raise
        with suppress(errors.MillraceError):  # Google may not answer this either
            if lacking := _find_missing_permissions(store):
                raise _make_permission_error(failed.verdict, str(failed), lacking) from failed
        raise
    try:
        lacking = _find_missing_permissions(store)
    except errors.MillraceError:
        return rate  # the trial succeeded, and Google does not answer
    if lacking and all("multipart" in name for name in lacking):
        reason = f"{store.url} accepts small objects, but no large ones."
        raise _make_permission_error(ProbeVerdict.READ_ONLY, reason, lacking)
    return rate  # a permission that the trial used is granted for a prefix only


def _find_missing_permissions(store: Store) -> frozenset[str]:
    try:
        from millrace.storage.permissions import WRITE_PERMISSIONS, query_permissions  # noqa: PLC0415
    except ImportError as error:
        raise errors.ConfigurationError(
            "To ask Google what the credentials may do, install google-auth: "
            "pip install 'millrace[gcs]'."
        ) from error
    return WRITE_PERMISSIONS - query_permissions(store)


def _make_permission_error(
    verdict: ProbeVerdict, reason: str, permissions: Iterable[str]
) -> ProbeFailedError:
    names = ", ".join(sorted(permissions))
    advice = f"On the bucket the credentials lack {names}: grant Storage Object User there."
    return ProbeFailedError(verdict, f"{reason} {advice}")


def check_same(url: str, body: bytes, written: bytes) -> None:
    """Compare the bytes that a destination returned with those that were written.

    Raises:
        ProbeFailedError: The bytes differ.
    """
    if body != written:
        raise ProbeFailedError(
            ProbeVerdict.WRONG,
            f"{url} does not have the bytes that were just written: the store is broken, or a "
            "proxy changes or caches them. Use another store, or no proxy.",
        )


@contextmanager
def translate_errors(denied: ProbeVerdict) -> Generator[None]:
    """Turn the errors of a trial into `ProbeFailedError` with a verdict.

    Args:
        denied: Verdict for refused credentials.
    """
    try:
        yield
    except errors.MillraceError as error:
        said = ProbeVerdict(classify_error(error).value)
        advice = " Create it, or correct the URL." if said is ProbeVerdict.NOT_FOUND else ""
        verdict = denied if said is ProbeVerdict.DENIED else said
        raise ProbeFailedError(verdict, f"{error}{advice}") from error
