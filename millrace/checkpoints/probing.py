"""Find out whether a job could save to a place, before anything depends on it.

What a save does is done once: an object is created, read back, overwritten, read back and deleted,
under the job's own prefix. Only asking for the permissions would be faster, and proves less; Google
is asked for them besides, for what the trial does not do: upload a large part in pieces.
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
"""Bytes by which the rate is measured."""
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


def probe(
    store: Store,
    job: str,
    *,
    size: int = 0,
    within: timedelta | None = None,
    timeout: timedelta = REQUEST_TIMEOUT,
) -> ProbeResult:
    """Try what a save does, and leave nothing behind.

    Args:
        store: Where to.
        job: Whose checkpoints they would be.
        size: Bytes of one, if the time and the room for it shall be looked at.
        within: The time that it may take, such as the cooldown.
        timeout: How long each request is tried.
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
        url: Where it is.
        tried: Tries it, under `translate_errors`; returns the bytes a second of an upload.
        size: As of `probe`.
        within: As of `probe`.
        folder: Whose disk must have room, if it is one of this machine.
    """
    try:
        rate = tried()
    except ProbeFailedError as failed:
        return ProbeResult(failed.verdict, str(failed))
    expected = size / rate
    free = None if folder is None else shutil.disk_usage(folder).free
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


class ProbeFailedError(Exception):
    """The verdict is out, and is no yes."""

    def __init__(self, verdict: ProbeVerdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


def _try_save(store: Store, job: str, key: str) -> float:
    """Do what a save does; bytes a second of the upload."""
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
            f"{store.make_url(key)} could not be deleted ({failures[0].reason}): allow it, or what "
            "no checkpoint needs any more stays forever. Delete this object by hand.",
        )
    return rate


def _try_save_at_google(store: Store, job: str, key: str) -> float:
    """Return the verdict, with permissions that Google lacks, also those for a large part."""
    try:
        rate = _try_save(store, job, key)
    except ProbeFailedError as failed:
        if failed.verdict not in (ProbeVerdict.DENIED, ProbeVerdict.READ_ONLY):
            raise
        with suppress(errors.MillraceError):  # it refuses to say that, too
            if lacking := _find_missing_permissions(store):
                raise _make_permission_error(failed.verdict, str(failed), lacking) from failed
        raise
    try:
        lacking = _find_missing_permissions(store)
    except errors.MillraceError:
        return rate  # what was tried came through, and nobody knows better
    if lacking and all("multipart" in name for name in lacking):
        reason = f"{store.url} takes small objects, and no large ones."
        raise _make_permission_error(ProbeVerdict.READ_ONLY, reason, lacking)
    return rate  # if it lacks what was done a moment ago, the grant is on a prefix


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
    """Refuse a place that gives back something else than it was given."""
    if body != written:
        raise ProbeFailedError(
            ProbeVerdict.WRONG,
            f"{url} is not what was written a moment ago: this store is broken, or "
            "something between here and there changes bytes or keeps old ones.",
        )


@contextmanager
def translate_errors(denied: ProbeVerdict) -> Generator[None]:
    """Tell apart why a store does not do what it is asked."""
    try:
        yield
    except errors.MillraceError as error:
        said = ProbeVerdict(classify_error(error).value)
        advice = " Create it, or correct the URL." if said is ProbeVerdict.NOT_FOUND else ""
        verdict = denied if said is ProbeVerdict.DENIED else said
        raise ProbeFailedError(verdict, f"{error}{advice}") from error
