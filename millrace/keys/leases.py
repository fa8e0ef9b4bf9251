"""Keys of leases."""

import re
from dataclasses import dataclass

from millrace.keys.names import is_plain


@dataclass(frozen=True, slots=True)
class LeaseKeys:
    """The objects of one lease: an epoch each time that it changes hands.

    Attributes:
        scope: What the leases of a run stand under: a dataset's name, a run.
        name: What is held.
    """

    scope: str
    name: str

    @property
    def prefix(self) -> str:
        """Prefix of the lease's objects."""
        return f"{self.scope}/lease/{self.name}/"

    def epoch(self, number: int) -> str:
        """Return the key of the record that says who took the lease: created once."""
        return f"{self.prefix}{number:06d}.json"

    def beat(self, number: int) -> str:
        """Return the key of the holder's heartbeat: overwritten while the lease is held."""
        return f"{self.prefix}{number:06d}.beat"

    def end(self, number: int) -> str:
        """Given back: created once."""
        return f"{self.prefix}{number:06d}.end"

    def parse(self, key: str) -> tuple[int, str] | None:
        """Parse the epoch's number and the kind of a lease's key (``json``, ``beat``, ``end``)."""
        match = re.fullmatch(re.escape(self.prefix) + r"([0-9]{6,})\.(json|beat|end)", key)
        return (int(match[1]), match[2]) if match else None


def make_clock_probe_key(scope: str, holder: str) -> str:
    """Return the key of an object that is written only to read the store's clock."""
    return f"{scope}/lease/clock/{holder}"


def make_lease_prefix(scope: str) -> str:
    """Return the prefix of every lease under a scope."""
    return f"{scope}/lease/"


def parse_lease(scope: str, key: str) -> LeaseKeys | None:
    """Return the lease that a key belongs to; None if it is no lease's, or cannot be read."""
    if not is_plain(key):
        return None
    keys = LeaseKeys(scope, key.removeprefix(make_lease_prefix(scope)).rpartition("/")[0])
    return keys if keys.parse(key) else None
