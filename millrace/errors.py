"""Errors that Millrace raises on purpose.

Each message has the problem, its location, and the remedy. Transient faults are retried where they
happen, and become errors only when the retries end.
"""

import errno

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of the system's errors of a full disk, and of a quota that is used up."""


class MillraceError(Exception):
    """Base of all errors that Millrace raises on purpose."""


class ConfigurationError(MillraceError):
    """A setting or an argument is invalid. The message names a valid value."""


class NotFoundError(MillraceError):
    """An object, a folder or a bucket does not exist."""


class ExistsError(MillraceError):
    """A create-if-absent found an existing object."""


class DeniedError(MillraceError):
    """The store refuses the credentials, or the credentials lack a right.

    Attributes:
        reason: Sentence with the reason; empty if the store gives none.
    """

    reason: str = ""


class ReadOnlyError(DeniedError):
    """The credentials may list objects, but not write, overwrite or delete them."""


class ChangedError(MillraceError):
    """An object was replaced: its ETag, size or time differs from that of an earlier request."""


class UnavailableError(MillraceError):
    """A store, or something awaited in it, was not available within the time budget.

    Another call may succeed.

    Attributes:
        status: HTTP status of the last answer; None without an answer.
    """

    status: int | None = None


class UploadGoneError(UnavailableError):
    """An upload was completed or aborted by another request. The object may have been written."""


class NoProgressError(MillraceError):
    """A training goes on without effect: the aggregator takes no worker's gradient."""


class ConflictError(MillraceError):
    """Another record was committed under the same key, so two runs disagree."""


class HeldError(MillraceError):
    """Another live process holds the lease for the same work."""


class QuarantineError(MillraceError):
    """Too many rows of a source, or all of them, could not become samples."""


class CorruptError(MillraceError):
    """Bytes do not match their digest, their record or their format."""


class VersionError(CorruptError):
    """Another version of Millrace wrote a record. The record is not damaged."""


class ArchiveError(MillraceError):
    """An archive is damaged, too large, or has entries that Millrace refuses to unpack."""


class NoSpaceError(MillraceError):
    """A disk has too little free space."""


class StoppedError(MillraceError):
    """The caller stopped the call, or ended the run that it belongs to."""


class BudgetError(MillraceError):
    """The budget of money or time for rented machines is spent."""


class MachineError(MillraceError):
    """A rented machine did not start, or its program failed."""


class WorkerError(MillraceError):
    """A worker process ended before it had finished its work."""


def format_error(error: BaseException) -> str:
    """Return the first paragraph of an error's message, on one line.

    The paragraphs after the first are obstore's dump of its own structures.
    """
    text = str(error).split("\n\nDebug source", 1)[0]
    return " ".join(text.split()) or type(error).__name__
