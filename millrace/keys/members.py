"""Names, leases and prefixes of a job's members."""

from millrace.errors import ConfigurationError
from millrace.keys.leases import LeaseKeys
from millrace.keys.names import check_name

MEMBERS = "members"


def check_member_name(member: str) -> str:
    """Return the name of a member, checked.

    Raises:
        ConfigurationError: The name cannot be part of an object's name.
    """
    if "/" in member:
        raise ConfigurationError(f"The member's name {member!r} has a '/' in it: write another.")
    return check_name(member, what="The member's name")


def make_member_lease(job: str, member: str) -> LeaseKeys:
    """Return the lease of a member of a job.

    Raises:
        ConfigurationError: The name cannot be part of an object's name.
    """
    return LeaseKeys(job, f"{MEMBERS}/{check_member_name(member)}")


def make_member_scope(job: str, member: str) -> str:
    """Return the scope of what a member writes by itself, its lease aside."""
    return f"{job}/{MEMBERS}/{member}"


def make_member_prefix(job: str, member: str) -> str:
    """Return the prefix of what a member writes by itself, its lease aside."""
    return f"{make_member_scope(job, member)}/"
