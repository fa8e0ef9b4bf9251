"""Registrations of workers that join and leave a run, and the roster of a window."""

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from millrace.digest import dump_canonical_json
from millrace.records import JsonInt, Record, RecordPart

KEY_PATTERN = "^[0-9a-f]{64}$"
"""Pattern of an Ed25519 public key: 32 bytes in hexadecimal digits."""

LARGEST_NUMBER = 10**9 - 1
"""Largest number of a registration."""


class Registration(Record):
    """Record by which a worker joins a run, or leaves it. The one with the highest number counts.

    Attributes:
        run: Name of the run.
        version: Version of the worker's program.
        uid: Name of the worker.
        number: Number of the registration, which rises with each one of the worker.
        leaves_after: Last window of the worker; None if the worker joins.
        key: Ed25519 public key of the worker. The key of its first registration holds for its name.
        signature: Signature of `signed_bytes` by that key, in hexadecimal digits.
    """

    record_kind: ClassVar[str] = "worker-registration"
    record_bytes: ClassVar[int] = 4096

    run: str
    version: str
    uid: str
    number: int = Field(ge=1, le=LARGEST_NUMBER)
    leaves_after: JsonInt | None = Field(default=None, ge=0)
    key: str = Field(pattern=KEY_PATTERN)
    signature: str = Field(default="", pattern="^([0-9a-f]{128})?$")

    @property
    def signed_bytes(self) -> bytes:
        """Bytes that the worker signs: all other fields, after a text that names their purpose."""
        fields = self.model_dump(mode="json", exclude={"signature"})
        return b"millrace worker-registration\n" + dump_canonical_json(fields)


class RosterStatus(StrEnum):
    """Status of a worker in the roster of a window."""

    WARMING_UP = "warming up"  # its gradients are checked, and usually not merged
    ESTABLISHED = "established"  # after its warm-up
    LEFT = "left"  # by its own registration
    REMOVED = "removed"  # after windows without a valid gradient


class RosterEntry(RecordPart):
    """Entry of a window's roster for a worker that has registered.

    Attributes:
        key: Public key of the worker.
        number: Number of its registration that was read last.
        leaves_after: Last window of the worker; None if it stays.
        since: First window of the worker, since it joined or since it joined again.
        ended: First window without the worker, since it has left or was removed; None before.
        status: Status of the worker.
        valid: Number of consecutive windows with a valid gradient.
        missed: Number of consecutive windows without a valid gradient.
        absent: Number of consecutive windows without a gradient that did not wait for the worker.
        counts: Whether a valid gradient of this window is merged. Those of workers that warm up are
            merged, too, if fewer established workers than the quorum have a place in the window.
    """

    key: str = Field(pattern=KEY_PATTERN)
    number: JsonInt = Field(ge=1)
    leaves_after: JsonInt | None = None
    since: JsonInt = Field(ge=1)
    ended: JsonInt | None = None
    status: RosterStatus
    valid: JsonInt = Field(default=0, ge=0)
    missed: JsonInt = Field(default=0, ge=0)
    absent: JsonInt = Field(default=0, ge=0)
    counts: bool = False

    @property
    def is_active(self) -> bool:
        """True if the gradients of the worker are read."""
        return self.status in {RosterStatus.WARMING_UP, RosterStatus.ESTABLISHED}
