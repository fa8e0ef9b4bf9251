"""Errors, each with a sentence that says what a person can do about it.

Transient faults are retried where they happen. What is raised is one of these, and
every message is a sentence for whoever started the run.
"""


class MillraceError(Exception):
    """The base of everything that Millrace raises on purpose."""


class ConfigurationError(MillraceError):
    """Something that was asked for cannot be: the message says what to write instead."""


class NotFoundError(MillraceError):
    """No such object."""


class ExistsError(MillraceError):
    """A create-if-absent met an object that is already there."""


class DeniedError(MillraceError):
    """The credentials do not allow it, or are not known to the store.

    Attributes:
        reason: A sentence that tells which of the two, where the store says so; else empty.
    """

    reason: str = ""


class ReadOnlyError(DeniedError):
    """The credentials may list objects, and not write, overwrite or delete them."""


class ChangedError(MillraceError):
    """An object is no longer the one that was meant (its ETag, size or time differs)."""


class UnavailableError(MillraceError):
    """The store could not be reached, or kept failing until the time budget was spent.

    Attributes:
        status: The HTTP status of its last answer, if it answered.
    """

    status: int | None = None


class ConflictError(MillraceError):
    """Something else was committed under this name: two runs disagree about its content."""


class HeldError(MillraceError):
    """Another process does what was to be done, and lives."""


class QuarantineError(MillraceError):
    """Too many rows of a source make no sample, or none does."""


class CorruptError(MillraceError):
    """Bytes that were read are not the bytes that were recorded."""


class VersionError(CorruptError):
    """A record that another version of Millrace wrote: it is not damaged."""


class ArchiveError(MillraceError):
    """An archive is damaged, is larger than allowed, or holds what is not unpacked."""


class NoSpaceError(MillraceError):
    """The disk is too small for what is to come."""


class StoppedError(MillraceError):
    """The caller called off what it had begun."""


class BudgetError(MillraceError):
    """The money, or the time, that was granted for rented machines is spent."""


class MachineError(MillraceError):
    """No rented machine came up, or what ran on one failed."""


class WorkerError(MillraceError):
    """A worker process ended without finishing what it was given."""


def format_error(error: BaseException) -> str:
    """Return the first paragraph of an error's message, on one line.

    obstore appends a dump of its own structures below it, which helps nobody at a terminal.
    """
    text = str(error).split("\n\nDebug source", 1)[0]
    return " ".join(text.split()) or type(error).__name__
