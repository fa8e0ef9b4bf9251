"""Keys of a job's checkpoints."""

import re
from dataclasses import dataclass

from millrace.errors import ConfigurationError
from millrace.keys.names import RESERVED_FOLDERS, check_name

CHECKPOINTS = "checkpoints"
"""The folder of a job that its checkpoints are in."""
RESERVED_IN_JOBS = frozenset({*RESERVED_FOLDERS, CHECKPOINTS})


@dataclass(frozen=True, slots=True)
class CheckpointKeys:
    """The checkpoints of one job.

    Attributes:
        job: Its name: a prefix below the store's URL.
    """

    job: str

    def __post_init__(self) -> None:
        name = check_name(self.job, what="The job's name")
        if name != self.job or RESERVED_IN_JOBS.intersection(name.split("/")):
            raise ConfigurationError(
                f"The job's name {self.job!r} begins or ends with '/', or has one of "
                f"{', '.join(sorted(RESERVED_IN_JOBS))} in it, as objects of ours do: write "
                f"another."
            )

    @property
    def prefix(self) -> str:
        """Prefix of the checkpoints."""
        return f"{self.job}/{CHECKPOINTS}/"

    def folder(self, step: int) -> str:
        """Return the prefix of all that belongs to one step."""
        return f"{self.prefix}step_{step:09d}/"

    def parts(self, step: int) -> str:
        """Return the prefix of a step's files."""
        return f"{self.folder(step)}parts/"

    def part(self, step: int, sha256: str) -> str:
        """Return the key of a file, by its digest."""
        return f"{self.parts(step)}{sha256}.safetensors"

    def metadata(self, step: int) -> str:
        """Return the key of a step's metadata, which completes the checkpoint."""
        return f"{self.folder(step)}metadata.json"

    def shares(self, step: int, attempt: str) -> str:
        """Return the prefix of what the ranks of one attempt have each saved of a step."""
        return f"{self.folder(step)}shares/{attempt}/"

    def share(self, step: int, attempt: str, rank: int) -> str:
        """Return the key of what one rank has saved of a step."""
        return f"{self.shares(step, attempt)}{rank:06d}.json"

    def pin(self, step: int) -> str:
        """Return the key of the pin that keeps a step, whatever the rules say."""
        return f"{self.folder(step)}pin.json"

    @property
    def epochs(self) -> str:
        """Prefix of the ends of epochs."""
        return f"{self.job}/epochs/"

    def epoch(self, number: int) -> str:
        """Return the key of the record that ends an epoch: created once."""
        return f"{self.epochs}{number:06d}.json"

    def parse_epoch(self, key: str) -> int | None:
        """Return the epoch whose end a key records; None if it is no such key."""
        match = re.fullmatch(re.escape(self.epochs) + r"([0-9]{6,12})\.json", key)
        number = int(match[1]) if match else -1
        return number if number >= 0 and self.epoch(number) == key else None

    def quarantined(self, step: int) -> str:
        """Return the prefix of what was damaged, and was moved out of the way."""
        return f"{self.folder(step)}quarantine/"

    def quarantine(self, step: int, root: str) -> str:
        """Return the key of the record of a damaged checkpoint."""
        return f"{self.quarantined(step)}{root}.json"

    def damaged(self, step: int, sha256: str) -> str:
        """Return the key for the bytes that stood under a part's name and do not fit it."""
        return f"{self.quarantined(step)}{sha256}.damaged"

    def parse_folder(self, name: str) -> int | None:
        """Return the step that a folder's name (``step_000001000``) means, or None."""
        match = re.fullmatch(r"step_([0-9]{9,})", name)
        return int(match[1]) if match else None

    def parse_part(self, key: str) -> tuple[int, str] | None:
        """Return the step and the digest of a part's key, or None if it is no part's."""
        pattern = re.escape(self.prefix) + r"step_([0-9]{9,})/parts/([0-9a-f]{64})\.safetensors"
        match = re.fullmatch(pattern, key)
        return (int(match[1]), match[2]) if match else None

    def is_share(self, key: str) -> bool:
        """Tell whether a key is that of what one of several ranks has saved."""
        pattern = re.escape(self.prefix) + r"step_[0-9]{9,}/shares/[^/]+/[0-9]{6,}\.json"
        return re.fullmatch(pattern, key) is not None
