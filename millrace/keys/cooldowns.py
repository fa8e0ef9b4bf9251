"""Keys of cooldowns, which are the ends of epochs."""

import re
from dataclasses import dataclass

from millrace.digest import Algorithm, get_hex
from millrace.keys.members import make_member_prefix

COOLDOWNS = "cooldowns"


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

    def own(self, member: str) -> str:
        """Return the prefix of the objects that one member writes at the end of this epoch."""
        return f"{make_member_prefix(self.job, member)}{COOLDOWNS}/{self.epoch:06d}/"

    def vote(self, member: str) -> str:
        """Return the key of a member's statement of its content digest: created once."""
        return f"{self.own(member)}vote.json"

    def late(self, member: str) -> str:
        """Return the key of a member's vote to go on without a checkpoint: created once."""
        return f"{self.own(member)}late.json"

    def result(self, member: str) -> str:
        """Return the key of the result that a member reports: created once."""
        return f"{self.own(member)}result.json"

    def draft(self, member: str) -> str:
        """Return the key of the metadata that a member proposes: created once."""
        return f"{self.own(member)}draft.json"

    def parts(self, member: str) -> str:
        """Return the prefix of the parts that a member uploads and the owner copies."""
        return f"{self.own(member)}parts/"

    def part(self, member: str, digest: str) -> str:
        """Return the key of a member's part, from its digest."""
        return f"{self.parts(member)}{get_hex(digest)}.safetensors"

    def parse_part(self, member: str, key: str) -> str | None:
        """Return the digest of a part that a member uploaded; None for other keys."""
        prefix = re.escape(self.parts(member))
        match = re.fullmatch(prefix + r"([0-9a-f]{64})\.safetensors", key)
        return f"{Algorithm.BLAKE3}:{match[1]}" if match else None
