"""Keys of a job's checkpoints."""

import re
from dataclasses import dataclass

from millrace.digest import Algorithm, get_hex
from millrace.errors import ConfigurationError
from millrace.keys.cooldowns import COOLDOWNS
from millrace.keys.leases import MEMBERS
from millrace.keys.names import NAME_PATTERN, RESERVED_FOLDERS, check_name

CHECKPOINTS = "checkpoints"
"""Folder of a job's checkpoints."""
RESERVED_IN_JOBS = frozenset({*RESERVED_FOLDERS, CHECKPOINTS})
"""Folders that no part of a job's name may equal."""
EPOCH_FOLDERS = frozenset({"epochs", COOLDOWNS, MEMBERS})
"""Folders of a job with the ends of its epochs. Its members write to some of them."""
CHECKPOINT_KEY = re.compile(
    rf"(?P<scope>{NAME_PATTERN})/{CHECKPOINTS}/step_(?P<number>[0-9]{{9,18}})/.+"
)
"""Key of an object of any checkpoint, by which `classify_key` recognises it."""
_MAX_STEP = 10**18 - 1  # 18 digits: a key with more is not recognised
_BLOCK_LISTS = "block_digests"
_METADATA = "metadata.json"


def check_step(step: int) -> int:
    """Return a step, checked to be a number that keys can have.

    Raises:
        ConfigurationError: The step is negative, or has more than 18 digits.
    """
    if not 0 <= step <= _MAX_STEP:
        raise ConfigurationError(
            f"Step {step} cannot be the step of a checkpoint: give a step from 0 to {_MAX_STEP}."
        )
    return step


@dataclass(frozen=True, slots=True)
class CheckpointKeys:
    """Keys of the checkpoints of one job.

    Attributes:
        job: Name of the job: a prefix below the store's URL.
    """

    job: str

    def __post_init__(self) -> None:
        name = check_name(self.job, what="The job's name")
        if name != self.job or RESERVED_IN_JOBS.intersection(name.split("/")):
            raise ConfigurationError(
                f"The job's name {self.job!r} begins or ends with '/', or has a reserved folder in "
                f"it ({', '.join(sorted(RESERVED_IN_JOBS))}): choose another name."
            )

    @property
    def prefix(self) -> str:
        """Prefix of the checkpoints."""
        return f"{self.job}/{CHECKPOINTS}/"

    def make_folder_prefix(self, step: int) -> str:
        """Return the prefix of all objects of one step."""
        return f"{self.prefix}step_{step:09d}/"

    def make_parts_prefix(self, step: int) -> str:
        """Return the prefix of a step's parts: files of tensors."""
        return f"{self.make_folder_prefix(step)}parts/"

    def make_part_key(self, step: int, digest: str) -> str:
        """Return the key of a part, from its digest."""
        return f"{self.make_parts_prefix(step)}{get_hex(digest)}.safetensors"

    def make_block_list_key(self, step: int, digest: str) -> str:
        """Return the key of the digests of a part's blocks, from the part's digest."""
        return f"{self.make_folder_prefix(step)}{_BLOCK_LISTS}/{get_hex(digest)}.bin"

    def make_metadata_key(self, step: int) -> str:
        """Return the key of a step's metadata. A checkpoint without metadata is incomplete."""
        return f"{self.make_folder_prefix(step)}{_METADATA}"

    def make_shares_prefix(self, step: int, attempt: str, number: int) -> str:
        """Return the prefix of the ranks' shares of a step in one save of an attempt."""
        return f"{self.make_folder_prefix(step)}shares/{attempt}.{number}/"

    def make_share_key(self, step: int, attempt: str, number: int, rank: int) -> str:
        """Return the key of the record of the files that one rank saved of a step."""
        return f"{self.make_shares_prefix(step, attempt, number)}{rank:06d}.json"

    def make_pin_key(self, step: int) -> str:
        """Return the key of the pin that protects a step from deletion by any rule."""
        return f"{self.make_folder_prefix(step)}pin.json"

    @property
    def epochs(self) -> str:
        """Prefix of the records that end epochs."""
        return f"{self.job}/epochs/"

    def make_epoch_key(self, number: int) -> str:
        """Return the key of the record that ends an epoch: created once."""
        return f"{self.epochs}{number:06d}.json"

    def parse_epoch(self, key: str) -> int | None:
        """Return the epoch that the record under a key ends; None for other keys."""
        match = re.fullmatch(re.escape(self.epochs) + r"([0-9]{6,12})\.json", key)
        number = int(match[1]) if match else -1
        return number if number >= 0 and self.make_epoch_key(number) == key else None

    def make_quarantine_prefix(self, step: int) -> str:
        """Return the prefix of a step's damaged objects and of their records."""
        return f"{self.make_folder_prefix(step)}quarantine/"

    def make_quarantine_key(self, step: int, root: str) -> str:
        """Return the key of the record of a damaged checkpoint, from the checkpoint's root."""
        return f"{self.make_quarantine_prefix(step)}{get_hex(root)}.json"

    def make_damaged_key(self, step: int, digest: str) -> str:
        """Return the key to which a part whose bytes do not match its digest is moved."""
        return f"{self.make_quarantine_prefix(step)}{get_hex(digest)}.damaged"

    def parse_folder(self, name: str) -> int | None:
        """Return the step of a folder's name such as ``step_000001000``; None for other names."""
        match = re.fullmatch(r"step_([0-9]{9,18})", name)
        return int(match[1]) if match else None

    def parse_part(self, key: str) -> tuple[int, str] | None:
        """Return the step and the digest of a part's key; None for other keys."""
        pattern = re.escape(self.prefix) + r"step_([0-9]{9,18})/parts/([0-9a-f]{64})\.safetensors"
        match = re.fullmatch(pattern, key)
        return (int(match[1]), f"{Algorithm.BLAKE3}:{match[2]}") if match else None

    def is_block_list(self, key: str) -> bool:
        """Decide whether a key is that of the digests of a part's blocks."""
        pattern = re.escape(self.prefix) + rf"step_[0-9]{{9,18}}/{_BLOCK_LISTS}/[0-9a-f]{{64}}\.bin"
        return re.fullmatch(pattern, key) is not None

    def is_share(self, key: str) -> bool:
        """Decide whether a key is that of the share of a rank."""
        pattern = re.escape(self.prefix) + r"step_[0-9]{9,18}/shares/[^/]+/[0-9]{6,18}\.json"
        return re.fullmatch(pattern, key) is not None


def parse_part_digest(key: str) -> str:
    """Return the digest in the key of a checkpoint's part, of any job; empty for other keys."""
    found = _parse_part(key)
    return found[2] if found else ""


def is_metadata_key(key: str) -> bool:
    """Decide whether a key is that of the metadata of a checkpoint, of any job."""
    match = CHECKPOINT_KEY.fullmatch(key)
    return match is not None and key == (
        f"{match['scope']}/{CHECKPOINTS}/step_{match['number']}/{_METADATA}"
    )


def find_block_list_key(key: str) -> str:
    """Return the key of the digests of a part's blocks, from the part's key, of any job.

    The key is empty if the given key is not that of a part.
    """
    found = _parse_part(key)
    return found[0].make_block_list_key(*found[1:]) if found else ""


def _parse_part(key: str) -> tuple[CheckpointKeys, int, str] | None:
    """Return the job, the step and the digest in the key of a checkpoint's part, or None."""
    job, folder, _ = key.partition(f"/{CHECKPOINTS}/")
    if not folder:
        return None
    try:
        keys = CheckpointKeys(job)
    except ConfigurationError:  # not the name of a job
        return None
    part = keys.parse_part(key)
    return (keys, *part) if part else None
