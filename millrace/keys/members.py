"""Names, leases and prefixes of a job's members."""

from millrace.errors import ConfigurationError
from millrace.keys.leases import MEMBERS, LeaseKeys
from millrace.keys.names import check_name


def check_member_name(member: str) -> str:
    """Return the name of a member, checked to be safe in a key.

    Raises:
        ConfigurationError: The name has a '/', or cannot be part of a key.
    """
    if "/" in member:
        raise ConfigurationError(
            f"The member's name {member!r} has a '/' in it: choose another name."
        )
    return check_name(member, what="The member's name")


def make_member_lease(job: str, member: str) -> LeaseKeys:
    """Return the keys of the lease of a job's member.

    Raises:
        ConfigurationError: The member's name cannot be part of a key.
    """
    return LeaseKeys(job, f"{MEMBERS}/{check_member_name(member)}")


def make_member_scope(job: str, member: str) -> str:
    """Return the scope of the objects that a member writes, except for its lease."""
    return f"{job}/{MEMBERS}/{member}"


def make_member_prefix(job: str, member: str) -> str:
    """Return the prefix of the objects that a member writes, except for its lease."""
    return f"{make_member_scope(job, member)}/"
