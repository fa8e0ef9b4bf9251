"""Keys of cooldowns, which are the ends of epochs."""

import re
from dataclasses import dataclass

from millrace.digest import Algorithm, get_hex
from millrace.keys.leases import MEMBERS
from millrace.keys.members import make_member_prefix
from millrace.keys.names import NAME_PATTERN

COOLDOWNS = "cooldowns"
MEMBER_KEY = re.compile(
    rf"(?P<scope>{NAME_PATTERN})/{MEMBERS}/(?P<uid>[^/]+)/{COOLDOWNS}/[0-9]{{6,18}}/"
    r"(?:(?P<record>(?:vote|late|result)\.json)|draft\.json|parts/[0-9a-f]{64}\.safetensors)"
)
"""Key of an object that any member writes, by which `classify_key` recognises it."""


@dataclass(frozen=True, slots=True)
class CooldownKeys:
    """Keys of the end of one epoch. Each member writes below its own prefix.

    Attributes:
        job: Name of the job.
        epoch: Number of the epoch.
    """

    job: str
    epoch: int

    @property
    def prefix(self) -> str:
        """Prefix of the objects that members do not own."""
        return f"{self.job}/{COOLDOWNS}/{self.epoch:06d}/"

    @property
    def roster(self) -> str:
        """Key of the list of members: created once."""
        return f"{self.prefix}roster.json"

    def make_own_prefix(self, member: str) -> str:
        """Return the prefix of the objects that one member writes at the end of this epoch."""
        return f"{make_member_prefix(self.job, member)}{COOLDOWNS}/{self.epoch:06d}/"

    def make_vote_key(self, member: str) -> str:
        """Return the key of a member's statement of its content digest: created once."""
        return f"{self.make_own_prefix(member)}vote.json"

    def make_late_vote_key(self, member: str) -> str:
        """Return the key of a member's vote to go on without a checkpoint.

        The member deletes the vote when it ends the epoch again.
        """
        return f"{self.make_own_prefix(member)}late.json"

    def make_result_key(self, member: str) -> str:
        """Return the key of the result that a member reports.

        The member deletes the result when it ends the epoch again.
        """
        return f"{self.make_own_prefix(member)}result.json"

    def make_draft_key(self, member: str) -> str:
        """Return the key of the metadata that a member proposes: created once."""
        return f"{self.make_own_prefix(member)}draft.json"

    def list_records(self, member: str) -> tuple[str, ...]:
        """Return the keys of all records of a member, except for its files."""
        return (
            self.make_vote_key(member),
            self.make_late_vote_key(member),
            self.make_result_key(member),
            self.make_draft_key(member),
        )

    def make_parts_prefix(self, member: str) -> str:
        """Return the prefix of the parts that a member uploads and the owner copies."""
        return f"{self.make_own_prefix(member)}parts/"

    def make_part_key(self, member: str, digest: str) -> str:
        """Return the key of a member's part, from its digest."""
        return f"{self.make_parts_prefix(member)}{get_hex(digest)}.safetensors"

    def parse_part(self, member: str, key: str) -> str | None:
        """Return the digest of a part that a member uploaded; None for other keys."""
        prefix = re.escape(self.make_parts_prefix(member))
        match = re.fullmatch(prefix + r"([0-9a-f]{64})\.safetensors", key)
        return f"{Algorithm.BLAKE3}:{match[1]}" if match else None
