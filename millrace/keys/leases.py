"""Keys of leases."""

import re
from dataclasses import dataclass

from millrace.keys.names import is_plain

MEMBERS = "members"
"""Folder of the leases of a job's members."""
RUNS = "runs"
"""Folder of the leases of the processes that work on a whole dataset."""
COLLECTOR = f"{RUNS}/garbage"
"""Name of the lease of the process that collects the garbage of a dataset."""
PLAN_REMOVAL = "plan"
"""Name of the lease of the process that removes the plan of a dataset, to replace it."""
_LEASE_OBJECT = re.compile(r".+/[0-9]{6,18}\.(?:json|beat|end)|clock/[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class LeaseKeys:
    """Keys of one lease. Each new holder begins a new term of the lease.

    Attributes:
        scope: Name of the dataset, job, run or rental that the lease belongs to. Empty if the
            store's URL is the folder of that one.
        name: Name of the lease within the scope.
    """

    scope: str
    name: str

    @property
    def prefix(self) -> str:
        """Prefix of the lease's objects."""
        return f"{make_lease_prefix(self.scope)}{self.name}/"

    def make_term_key(self, number: int) -> str:
        """Return the key of the record that names a term's holder: created once."""
        return f"{self.prefix}{number:06d}.json"

    def make_beat_key(self, number: int) -> str:
        """Return the key of the holder's heartbeat: overwritten while the lease is held."""
        return f"{self.prefix}{number:06d}.beat"

    def make_end_key(self, number: int) -> str:
        """Return the key of the marker that the holder released the lease: created once."""
        return f"{self.prefix}{number:06d}.end"

    def parse(self, key: str) -> tuple[int, str] | None:
        """Return the term and the kind of a key (``json``, ``beat``, ``end``); None for others."""
        match = re.fullmatch(re.escape(self.prefix) + r"([0-9]{6,18})\.(json|beat|end)", key)
        if match is None or match[1] != f"{int(match[1]):06d}":  # with more zeros
            return None
        return int(match[1]), match[2]


def make_run_lease_name(holder: str) -> str:
    """Return the name of the lease of a run that shards a dataset.

    Args:
        holder: Identifier of the run's holder, so no other run takes the lease.
    """
    return f"{RUNS}/{holder}"


def make_clock_probe_key(scope: str, holder: str) -> str:
    """Return the key of an object whose modification time shows the store's clock."""
    return f"{scope}/lease/clock/{holder}"


def make_lease_prefix(scope: str) -> str:
    """Return the prefix of all leases of a scope."""
    return f"{scope}/lease/" if scope else "lease/"


def is_lease_object(scope: str, key: str) -> bool:
    """Decide whether a key is that of an object of a lease, or of a probe of the store's clock.

    Files of a user may lie below the prefix of the leases, too.
    """
    inside = key.removeprefix(make_lease_prefix(scope))
    return inside != key and _LEASE_OBJECT.fullmatch(inside) is not None


def parse_lease(scope: str, key: str) -> LeaseKeys | None:
    """Return the keys of the lease that a key belongs to; None if the key is not a lease's.

    A key below the lease of a member is not a lease's, since it could name another member.
    """
    if not is_plain(key):
        return None
    name = key.removeprefix(make_lease_prefix(scope)).rpartition("/")[0]
    if name.startswith(f"{MEMBERS}/") and name.count("/") > 1:
        return None
    keys = LeaseKeys(scope, name)
    return keys if keys.parse(key) else None
