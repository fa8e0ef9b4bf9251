"""Probe a destination by a trial of the requests that a save makes.

The probe creates, reads, overwrites, reads again and deletes an object under the job's prefix. A
query for permissions would be faster, but proves less. For Google, the permissions are queried,
too, since the trial makes no multipart upload.
"""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Protocol

from millrace import errors
from millrace.audit.outcomes import classify_error
from millrace.keys.checkpoints import CheckpointKeys
from millrace.storage import Backend, Store
from millrace.storage.signed import describe_body_check

REQUEST_TIMEOUT = timedelta(seconds=20)
"""Longest time that each request of a probe is retried, by default."""


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


_ERRORS: dict[ProbeVerdict, type[errors.MillraceError]] = {
    ProbeVerdict.NOT_FOUND: errors.NotFoundError,
    ProbeVerdict.THROTTLED: errors.UnavailableError,
    ProbeVerdict.UNREACHABLE: errors.UnavailableError,
    ProbeVerdict.TOO_SLOW: errors.UnavailableError,
    ProbeVerdict.WRONG: errors.CorruptError,
    ProbeVerdict.NO_SPACE: errors.NoSpaceError,
}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        verdict: Verdict.
        reason: Sentence with the reason. If the destination is not ready, it names the remedy.
        rate: Rate of one upload, in bytes per second; 0 if no upload succeeded.
        expected: Expected seconds of the upload of a checkpoint at this rate; 0 without a size.
        body_check: Sentence about the checksum of each upload that the store checks, as the trial
            has shown; empty for other destinations than S3, and without an upload.
    """

    verdict: ProbeVerdict
    reason: str
    rate: float = 0.0
    expected: float = 0.0
    body_check: str = ""

    @property
    def is_ready(self) -> bool:
        """True if a job can save to the destination."""
        return self.verdict is ProbeVerdict.READY

    def check(self, url: str) -> None:
        """Raise an error, unless the destination is ready.

        Args:
            url: URL of the destination.

        Raises:
            UnavailableError, NotFoundError, NoSpaceError, CorruptError, DeniedError: By the
                verdict.
        """
        if not self.is_ready:
            kind = _ERRORS.get(self.verdict, errors.DeniedError)
            raise kind(f"{url}: {self.verdict}: {self.reason}")


class ProbedDestination(Protocol):
    """Destination that can be probed, such as each one of `millrace.checkpoints`."""

    @property
    def url(self) -> str:
        """URL of the destination, without credentials."""
        ...

    @property
    def store(self) -> Store | None:
        """Store of the destination; None for the Hub."""
        ...

    def try_save(self, job: str, *, timeout: timedelta) -> float:
        """Make the requests of a save with a sample, and return its bytes per second."""
        ...


def check_checkpoint_destination(destination: ProbedDestination, job: str) -> None:
    """Refuse a destination to which a job cannot save checkpoints, see `ProbeResult.check`."""
    probe(destination, job).check(destination.url)


def probe(
    destination: ProbedDestination,
    job: str,
    *,
    size: int = 0,
    members: int = 1,
    within: timedelta | None = None,
    timeout: timedelta = REQUEST_TIMEOUT,
) -> ProbeResult:
    """Try the requests of a save, and leave no object.

    Args:
        destination: Destination of the checkpoints.
        job: Name of the job.
        size: Size of a checkpoint in bytes, to check its time and space; 0 to check neither.
        members: Number of members that upload it together.
        within: Longest time of an upload, such as that of the cooldown.
        timeout: Limit on the time for retries of each request.

    Raises:
        ConfigurationError: No job can have this name.
    """
    CheckpointKeys(job)
    url, store = destination.url, destination.store
    if store is not None:
        store = store.with_retry_timeout(timeout)
    try:
        rate = destination.try_save(job, timeout=timeout)
    except errors.MillraceError as error:
        return _make_refusal(error, store)
    body_check = describe_body_check(store) if store is not None else ""
    # If the trial used a permission that Google does not list, the grant is for a prefix only.
    lacking = _find_missing_permissions(store)
    if lacking and all("multipart" in name for name in lacking):
        reason = f"{url} accepts small objects, but no large ones.{_advise_permissions(lacking)}"
        return ProbeResult(ProbeVerdict.READ_ONLY, reason)
    expected = size / members / rate
    free = _find_free_space(store)
    if free is not None and free < size:
        reason = (
            f"{url} has {free:,} bytes free, and a checkpoint has {size:,}: free some, or choose "
            "another folder."
        )
        return ProbeResult(ProbeVerdict.NO_SPACE, reason, rate, expected, body_check)
    if within is not None and expected > within.total_seconds():
        whole = f"a checkpoint of {size:,} bytes"
        share = whole if members == 1 else f"a share of one in {members} of {whole}"
        reason = (
            f"At {rate / 1e6:.1f} MB/s {share} takes {expected:.0f} s, and "
            f"{within.total_seconds():.0f} s are allowed: make the cooldown longer, or let more "
            "members upload."
        )
        return ProbeResult(ProbeVerdict.TOO_SLOW, reason, rate, expected, body_check)
    reason = f"{url} stores, returns, overwrites and deletes objects."
    return ProbeResult(ProbeVerdict.READY, reason, rate, expected, body_check)


def _make_refusal(error: errors.MillraceError, store: Store | None) -> ProbeResult:
    """Return the verdict for an error of the trial, and the remedy."""
    verdict = (
        ProbeVerdict.READ_ONLY
        if isinstance(error, errors.ReadOnlyError)
        else ProbeVerdict(classify_error(error).value)
    )
    reason = str(error)
    if verdict is ProbeVerdict.NOT_FOUND:
        reason += " Create it, or correct the URL."
    elif isinstance(error, errors.DeniedError):
        reason += _advise_permissions(_find_missing_permissions(store))
    return ProbeResult(verdict, reason)


def _find_missing_permissions(store: Store | None) -> frozenset[str]:
    """Return the permissions that Google does not list; none if Google does not answer."""
    if store is None or store.location.backend is not Backend.GS:
        return frozenset()
    with suppress(ImportError, errors.MillraceError):
        from millrace.audit.permissions import WRITE_PERMISSIONS, query_permissions  # noqa: PLC0415

        return WRITE_PERMISSIONS - query_permissions(store)
    return frozenset()


def _advise_permissions(lacking: Iterable[str]) -> str:
    """Return a sentence about the missing permissions, after a space; empty if none is missing."""
    names = ", ".join(sorted(lacking))
    return (
        f" On the bucket the credentials lack {names}: grant Storage Object User there."
        if names
        else ""
    )


def _find_free_space(store: Store | None) -> int | None:
    """Return the free bytes of the disk of a folder; None for other destinations."""
    if store is None or store.location.backend is not Backend.FILE:
        return None
    return shutil.disk_usage(store.location.bucket).free
