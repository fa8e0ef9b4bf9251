"""Find out whether a job could save to a destination, before anything depends on it.

The destination is tried: an object is created, read back, overwritten, read back and deleted under
the job's own prefix. A query of permissions is faster, and proves less. Google is asked for its
permissions too, because the trial uploads no large part in pieces.
"""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from millrace import errors
from millrace.audit.outcomes import classify_error
from millrace.keys import CheckpointKeys
from millrace.storage import Backend, Store

if TYPE_CHECKING:
    from millrace.checkpoints import Destination

REQUEST_TIMEOUT = timedelta(seconds=20)
"""How long each request of a probe is tried, by default."""


class ProbeVerdict(StrEnum):
    """Verdict on whether a job could save to a destination. Only the first is a yes."""

    READY = "ready"
    READ_ONLY = "read only"  # the credentials may list, and not write, overwrite or delete
    DENIED = "denied"  # they are unknown there, or may nothing
    NOT_FOUND = "not found"  # no such bucket
    THROTTLED = "throttled"  # it asks to come later
    UNREACHABLE = "unreachable"  # it does not answer, or is broken
    WRONG = "wrong"  # it does not give back what it was given
    NO_SPACE = "no space"  # a disk without room for the checkpoint
    TOO_SLOW = "too slow"  # the checkpoint would not be there in time
    UNKNOWN = "unknown"  # something else, which is no yes

    @property
    def exit_code(self) -> int:
        """Exit code of `millrace checkpoint probe`: 0 if ready, else from 11 on in this order."""
        return 0 if self is ProbeVerdict.READY else 10 + list(ProbeVerdict).index(self)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        verdict: In a word.
        reason: In a sentence; what to do, if it is no yes.
        rate: Bytes a second of one upload; 0 if none came through.
        expected: Seconds that a checkpoint of the stated size takes at this rate; 0 if none was
            stated.
    """

    verdict: ProbeVerdict
    reason: str
    rate: float = 0.0
    expected: float = 0.0

    @property
    def is_ready(self) -> bool:
        """True if the verdict is a yes."""
        return self.verdict is ProbeVerdict.READY


def check_destination(destination: "Destination", job: str) -> None:
    """Refuse a destination that a job cannot save to, before anything is read.

    Raises:
        DeniedError: The probe of the destination failed.
    """
    found = probe(destination, job)
    if not found.is_ready:
        raise errors.DeniedError(f"{destination.url}: {found.verdict}: {found.reason}")


def probe(
    destination: "Destination",
    job: str,
    *,
    size: int = 0,
    within: timedelta | None = None,
    timeout: timedelta = REQUEST_TIMEOUT,
) -> ProbeResult:
    """Try what a save does, and leave nothing behind.

    Args:
        destination: Destination of the checkpoints.
        job: Job of the checkpoints.
        size: Bytes of a checkpoint, to check the time and the room for it.
        within: Longest time that a checkpoint may take, such as that of the cooldown.
        timeout: Longest time that each request is tried.

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
    # If it lacks what was done a moment ago, the grant is on a prefix.
    lacking = _find_missing_permissions(store)
    if lacking and all("multipart" in name for name in lacking):
        reason = f"{url} takes small objects, and no large ones.{_advise_permissions(lacking)}"
        return ProbeResult(ProbeVerdict.READ_ONLY, reason)
    expected = size / rate
    free = _find_free_space(store)
    if free is not None and free < size:
        reason = f"{url} has room for {free:,} bytes, and a checkpoint has {size:,}."
        return ProbeResult(ProbeVerdict.NO_SPACE, reason, rate, expected)
    if within is not None and expected > within.total_seconds():
        reason = (
            f"At {rate / 1e6:.1f} MB/s a checkpoint of {size:,} bytes takes {expected:.0f} s, and "
            f"{within.total_seconds():.0f} s are allowed: let the cooldown last longer, or more "
            "members upload."
        )
        return ProbeResult(ProbeVerdict.TOO_SLOW, reason, rate, expected)
    reason = f"{url} takes, gives back, overwrites and deletes objects."
    return ProbeResult(ProbeVerdict.READY, reason, rate, expected)


def _make_refusal(error: errors.MillraceError, store: Store | None) -> ProbeResult:
    """Return the verdict that an error of the trial means, and what to do about it."""
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
    """Return the permissions that Google says are missing; none if nothing is known."""
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
