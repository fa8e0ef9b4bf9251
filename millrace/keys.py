"""Every object name that Millrace reads or writes is built and parsed here, and nowhere else.

Numbers are zero-padded, so that a listing is in order.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from millrace.errors import ConfigurationError

_RESERVED_FOLDERS = {"shards", "commits", "partitions", "quarantine", "lease"}
CHECKPOINTS = "checkpoints"
"""The folder of a job that its checkpoints are in."""
_RESERVED_IN_JOBS = frozenset({*_RESERVED_FOLDERS, CHECKPOINTS})
_GATHERS = "gathers"
_COOLDOWNS = "cooldowns"
_MEMBERS = "members"
_CAMPAIGN = "campaign"
_PLAN_OF_CAMPAIGN = f"/{_CAMPAIGN}/plan.json"
_RESERVED_WORKERS = frozenset({*_RESERVED_IN_JOBS, _GATHERS, "epochs"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_PARTITION = re.compile(r"[a-z]+-[0-9]{5,}")
_SHARD = re.compile(r"(?P<partition>[a-z]+-[0-9]{5,})-(?P<number>[0-9]{6,})")
MAX_DEPTH = 16
"""Folders of a name at most. Each folder above an object may have leases, which are looked at."""
CLEANING = "_clean"
"""What plans of cleaning stand under: no dataset, job or run can be called so."""
RENTALS = "_rentals"
"""What is known of rented machines stands under it; nothing that runs on one may write there."""
MACHINES = "_machines"
"""What rented machines say of themselves stands under it."""
INSTALLATION = f"{RENTALS}/installation.json"
"""Who we are among all who rent with the same account: created once."""


def find_common_prefix(keys: Iterable[str]) -> str:
    """Return the longest beginning that all of these share, be it a whole folder's name or not."""
    some = list(keys)
    first, last = min(some, default=""), max(some, default="")
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[: min(len(first), len(last)) if size is None else size]


def check_name(name: str, *, what: str) -> str:
    """Return a name that is safe as part of a key, on every store we know.

    Raises:
        ConfigurationError: It is empty, too long, or has a character that some store changes.
    """
    name = name.strip("/")
    if not _NAME.fullmatch(name) or len(name) > 200 or is_too_deep(name):
        raise ConfigurationError(
            f"{what} {name!r} cannot be part of an object's name: write letters, digits, "
            "'.', '_' and '-', with '/' between folders, at most 200 characters and "
            f"{MAX_DEPTH} folders."
        )
    return name


def is_too_deep(name: str) -> bool:
    """Decide whether a name has more folders than any of ours."""
    return name.count("/") >= MAX_DEPTH


def is_plain(key: str) -> bool:
    """Decide whether a key is a path that stays below its folder on every machine.

    Such a key is relative, has no empty, ``.`` or ``..`` segment, no backslash and no character
    that does not print.
    """
    return {"", ".", ".."}.isdisjoint(key.split("/")) and "\\" not in key and key.isprintable()


def make_partition_name(split: str, number: int) -> str:
    """Return the name of a partition, such as ``train-00007``."""
    return f"{split}-{number:05d}"


@dataclass(frozen=True, slots=True)
class ShardName:
    """Name of a shard: its partition and its number there, such as ``train-00007-000012``."""

    partition: str
    number: int

    def __str__(self) -> str:
        return f"{self.partition}-{self.number:06d}"

    @classmethod
    def parse(cls, stem: str) -> "ShardName | None":
        """Parse a shard's name such as ``train-00007-000012``; None if the text is no such name."""
        match = _SHARD.fullmatch(stem)
        return cls(match["partition"], int(match["number"])) if match else None


@dataclass(frozen=True, slots=True)
class DatasetKeys:
    """The objects of one dataset.

    Attributes:
        dataset: Its name: a prefix below the store's URL.
    """

    dataset: str

    def __post_init__(self) -> None:
        name = check_name(self.dataset, what="The dataset's name")
        taken = sorted(_RESERVED_FOLDERS.intersection(name.split("/")))
        if name != self.dataset or taken:
            why = f"has {taken[0]!r} in it" if taken else "begins or ends with '/'"
            raise ConfigurationError(
                f"The dataset's name {self.dataset!r} {why}, as a dataset's own objects do: write "
                "another."
            )

    @property
    def plan(self) -> str:
        """Key of the plan."""
        return f"{self.dataset}/plan.json"

    @property
    def plan_removed(self) -> str:
        """Key of the marker that a plan was removed, and may have left uncommitted shards."""
        return f"{self.dataset}/plan-removed.json"

    @property
    def manifest(self) -> str:
        """Key of the manifest, which completes the dataset."""
        return f"{self.dataset}/manifest.json"

    @property
    def index(self) -> str:
        """Key of the shard index of webdataset."""
        return f"{self.dataset}/index.json"

    @property
    def listings(self) -> str:
        """Prefix of the partitions' listings."""
        return f"{self.dataset}/partitions/"

    @property
    def shards(self) -> str:
        """Prefix of the shards."""
        return f"{self.dataset}/shards/"

    @property
    def commits(self) -> str:
        """Prefix of the commits."""
        return f"{self.dataset}/commits/"

    @property
    def quarantined(self) -> str:
        """Prefix of the rows that made no sample."""
        return f"{self.dataset}/quarantine/"

    def listing(self, partition: str, digest: str) -> str:
        """Return the key of a partition's list of files, for sources of many files."""
        return f"{self.listings}{partition}-{digest[:16]}.jsonl"

    def shard(self, name: ShardName, extension: str) -> str:
        """Return the key of a shard."""
        return f"{self.shards}{name}.{extension}"

    def commit(self, name: ShardName) -> str:
        """Return the key of a shard's commit."""
        return f"{self.commits}{name}.json"

    def commits_of(self, partition: str) -> str:
        """Return the prefix of a partition's commits and of its end record."""
        return f"{self.commits}{partition}-"

    def end(self, partition: str) -> str:
        """Return the key of a partition's end record."""
        return f"{self.commits}{partition}-end.json"

    def quarantine(self, name: ShardName) -> str:
        """Return the key of the quarantined rows of a shard."""
        return f"{self.quarantined}{name}.jsonl"

    def parse_commit(self, key: str) -> "ShardName | None":
        """Return the shard whose commit has this key; None for other keys."""
        stem = key.removeprefix(self.commits)
        if stem == key or not stem.endswith(".json"):
            return None
        return ShardName.parse(stem.removesuffix(".json"))

    def is_shard(self, key: str) -> bool:
        """Return whether a key is that of a shard or of its quarantined rows."""
        for prefix in (self.shards, self.quarantined):
            stem = key.removeprefix(prefix).rpartition(".")[0]
            if key.startswith(prefix) and ShardName.parse(stem) is not None:
                return True
        return False

    def parse_end(self, key: str) -> str | None:
        """Return the partition whose end record has this key; None for other keys."""
        stem = key.removeprefix(self.commits)
        if stem == key or not stem.endswith("-end.json"):
            return None
        partition = stem.removesuffix("-end.json")
        return partition if _PARTITION.fullmatch(partition) else None


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
        if match is None or match[1] != f"{int(match[1]):06d}":  # more zeros than `epoch` writes
            return None
        return int(match[1]), match[2]


@dataclass(frozen=True, slots=True)
class CheckpointKeys:
    """The checkpoints of one job.

    Attributes:
        job: Its name: a prefix below the store's URL.
    """

    job: str

    def __post_init__(self) -> None:
        name = check_name(self.job, what="The job's name")
        if name != self.job or _RESERVED_IN_JOBS.intersection(name.split("/")):
            raise ConfigurationError(
                f"The job's name {self.job!r} begins or ends with '/', or has one of "
                f"{', '.join(sorted(_RESERVED_IN_JOBS))} in it, as objects of ours do: write "
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


@dataclass(frozen=True, slots=True)
class GradientKeys:
    """The gradients of one run.

    Attributes:
        run: Its name: a prefix below the store's URL.
        version: Of what the workers run: those of another are not looked at.
    """

    run: str
    version: str

    def __post_init__(self) -> None:
        for what, name in (("The run's name", self.run), ("The version", self.version)):
            if check_name(name, what=what) != name:
                raise ConfigurationError(f"{what} {name!r} begins or ends with '/'.")

    def worker(self, uid: str) -> str:
        """Return the prefix of all that a worker writes: its credentials reach no other."""
        if "/" in check_name(uid, what="The worker's name") or uid in _RESERVED_WORKERS:
            raise ConfigurationError(
                f"The worker's name {uid!r} has a '/' in it, or is one of "
                f"{', '.join(sorted(_RESERVED_WORKERS))}, as folders of ours are: call it "
                f"otherwise."
            )
        return f"{self.run}/{uid}/"

    def gradient(self, uid: str, window: int) -> str:
        """Return a worker's gradient of a window; one of torch's own files ends in ``.pt``."""
        return f"{self.worker(uid)}gradient-{window:09d}-{uid}-v{self.version}.safetensors"

    def start_window(self, uid: str, window: int) -> str:
        """With which window a worker began."""
        return f"{self.worker(uid)}start_window-{window:09d}-{uid}-v{self.version}.json"

    def parse(self, key: str) -> tuple[str, int] | None:
        """Return the worker and the window of a gradient's key, or None if it is no gradient's."""
        return self._parse_name(key, "gradient", r"(safetensors|pt)")

    def parse_start_window(self, key: str) -> tuple[str, int] | None:
        """Likewise of what says with which window a worker began."""
        return self._parse_name(key, "start_window", "json")

    def _parse_name(self, key: str, what: str, ending: str) -> tuple[str, int] | None:
        pattern = (
            re.escape(self.run)
            + rf"/(?P<uid>[^/]+)/{what}-(?P<window>[0-9]{{9,}})-(?P=uid)-v"
            + re.escape(self.version)
            + rf"\.{ending}"
        )
        match = re.fullmatch(pattern, key)
        if match is None or match["window"] != f"{int(match['window']):09d}":
            return None  # with more zeros than ours, one window would have many names
        return match["uid"], int(match["window"])


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """Keys of the objects that the aggregator of one run commits.

    Attributes:
        run: Its name.
        version: Of what its workers run.
    """

    run: str
    version: str

    @property
    def job(self) -> str:
        """All that the aggregator writes is below it; its checkpoints are this job's."""
        return f"{self.run}/{_GATHERS}/{self.version}"

    @property
    def prefix(self) -> str:
        """Prefix of the job."""
        return f"{self.job}/"

    @property
    def links(self) -> str:
        """Prefix of the links."""
        return f"{self.prefix}chain/"

    def link(self, window: int) -> str:
        """Return the key of a window's link: created once. That of window 0 names a checkpoint."""
        return f"{self.links}{window:09d}.json"

    def parse_link(self, key: str) -> int | None:
        """Return the window whose link has this key; None of another key."""
        match = re.fullmatch(re.escape(self.links) + r"([0-9]{9,18})\.json", key)
        return int(match[1]) if match and self.link(int(match[1])) == key else None

    def opening(self, window: int) -> str:
        """Return the key of the rules that a window was opened with: created once."""
        return f"{self.prefix}windows/{window:09d}.json"

    def update(self, step: int, sha256: str) -> str:
        """Return the key of a merged gradient, by its step and the digest of its bytes."""
        return f"{self.prefix}{step:09d}-{sha256}.npz"


@dataclass(frozen=True, slots=True)
class CooldownKeys:
    """Objects of the end of one epoch: each member writes below its own prefix.

    Attributes:
        job: Name of the job.
        epoch: Number of the epoch.
    """

    job: str
    epoch: int

    @property
    def prefix(self) -> str:
        """Prefix of an epoch's end."""
        return f"{self.job}/{_COOLDOWNS}/{self.epoch:06d}/"

    @property
    def roster(self) -> str:
        """Key of the list of members: created once."""
        return f"{self.prefix}roster.json"

    def own(self, member: str) -> str:
        """Return the prefix of all that one member writes at the end of this epoch."""
        return f"{member_prefix(self.job, member)}{_COOLDOWNS}/{self.epoch:06d}/"

    def vote(self, member: str) -> str:
        """Return the key of a member's statement of its content digest: created once."""
        return f"{self.own(member)}vote.json"

    def late(self, member: str) -> str:
        """Return the key of a member's vote to go on without a checkpoint: created once."""
        return f"{self.own(member)}late.json"

    def result(self, member: str) -> str:
        """Return the key of a member's own result: created once."""
        return f"{self.own(member)}result.json"

    def draft(self, member: str) -> str:
        """Return the key of the metadata that a member proposes: created once."""
        return f"{self.own(member)}draft.json"

    def parts(self, member: str) -> str:
        """Return the prefix of the files that a member has uploaded for the owner to copy."""
        return f"{self.own(member)}parts/"

    def part(self, member: str, sha256: str) -> str:
        """Return the key of a member's file, by its digest."""
        return f"{self.parts(member)}{sha256}.safetensors"

    def parse_part(self, member: str, key: str) -> str | None:
        """Return the digest of a file that a member has uploaded; None of another key."""
        prefix = re.escape(self.parts(member))
        match = re.fullmatch(prefix + r"([0-9a-f]{64})\.safetensors", key)
        return match[1] if match else None


@dataclass(frozen=True, slots=True)
class RentalKeys:
    """The objects of one rental: some machines that are rented for one purpose.

    Attributes:
        name: The rental's.
    """

    name: str

    def __post_init__(self) -> None:
        if check_name(
            self.name, what="The rental's name"
        ) != self.name or _RESERVED_FOLDERS.intersection(self.name.split("/")):
            raise ConfigurationError(
                f"The rental's name {self.name!r} begins or ends with '/', or has one of "
                f"{', '.join(sorted(_RESERVED_FOLDERS))} in it, as objects of ours do: write "
                f"another."
            )

    @property
    def scope(self) -> str:
        """Prefix of the rental's leases."""
        return f"{RENTALS}/{self.name}"

    @property
    def lease(self) -> LeaseKeys:
        """Held by whoever uses the machines, and gives them back."""
        return LeaseKeys(self.scope, "owner")

    @property
    def owner(self) -> str:
        """Overwritten while the owner lives: machines look at it."""
        return f"{self.scope}/owner.txt"

    @property
    def attempts(self) -> str:
        """Prefix of the attempts."""
        return f"{self.scope}/attempts/"

    def attempt(self, number: int) -> str:
        """Return the prefix of all records of one attempt."""
        return f"{self.attempts}{number:06d}-"

    def intent(self, number: int) -> str:
        """Return the key of the intent to rent a machine: created before it is rented."""
        return f"{self.attempt(number)}intent.json"

    def contract(self, number: int) -> str:
        """Return the key of the contract that an attempt came to."""
        return f"{self.attempt(number)}contract.json"

    def detached(self, number: int) -> str:
        """Return the key of the record that a machine stays though it has no owner."""
        return f"{self.attempt(number)}left.json"

    def returned(self, number: int) -> str:
        """Return the key of the record that a machine is given back, or never came."""
        return f"{self.attempt(number)}returned.json"

    def parse(self, key: str) -> tuple[int, str] | None:
        """Return an attempt's number, and ``intent``, ``contract``, ``left`` or ``returned``."""
        pattern = re.escape(self.attempts) + r"([0-9]{6,})-(intent|contract|left|returned)\.json"
        match = re.fullmatch(pattern, key)
        return (int(match[1]), match[2]) if match else None

    def machine(self, number: int) -> str:
        """Return the prefix of all that one machine may write by itself."""
        return f"{MACHINES}/{self.name}/{number:06d}/"


@dataclass(frozen=True, slots=True)
class CampaignKeys:
    """Names of all that a campaign makes.

    Attributes:
        name: The campaign's: a prefix below the store's URL.
    """

    name: str

    def __post_init__(self) -> None:
        RentalKeys(self.name)  # what it rents is called the same

    @property
    def run(self) -> str:
        """Name of the run of gradients, and of its chain."""
        return f"{self.name}/run"

    @property
    def job(self) -> str:
        """Name of the job of the checkpoints that its epochs end with."""
        return f"{self.name}/model"

    @property
    def lease(self) -> LeaseKeys:
        """Held by whoever leads it."""
        return LeaseKeys(self.name, _CAMPAIGN)

    @property
    def notes(self) -> str:
        """The prefix of what its workers are told."""
        return f"{self.name}/{_CAMPAIGN}/"

    @property
    def warming(self) -> str:
        """Key of the mark that machines wait for their files: there while files are brought."""
        return f"{self.notes}warming.json"

    @property
    def plan(self) -> str:
        """Key of the pinned plan: created once."""
        return f"{self.name}{_PLAN_OF_CAMPAIGN}"

    def list_read_prefixes(self) -> list[str]:
        """Return the prefixes that a worker reads, besides its dataset's."""
        return [f"{self.run}/{_GATHERS}/", self.notes, f"{self.job}/"]

    def list_write_prefixes(self, number: int | str) -> list[str]:
        """Return the prefixes that a worker writes: all of them are its own.

        Args:
            number: Number of the worker, or what stands for it until it is known: ``{slot}``.
        """
        uid = self.uid(number)
        return [
            f"{self.run}/{uid}/",
            f"{self.job}/{_MEMBERS}/{uid}/",
            f"{lease_prefix(self.job)}{_MEMBERS}/{uid}/",
        ]

    def uid(self, number: int | str) -> str:
        """Return a worker's name, by its number."""
        return f"worker-{number}"


@dataclass(frozen=True, slots=True)
class MachineKeys:
    """Keys of the reports of one rented machine.

    Attributes:
        prefix: Of `RentalKeys.machine`.
    """

    prefix: str

    @property
    def files(self) -> str:
        """Key of the files to write beside the program: the only object that the owner writes."""
        return f"{self.prefix}files.json"

    @property
    def setup(self) -> str:
        """Key of the report on the installation, overwritten; with the last lines printed."""
        return f"{self.prefix}setup.json"

    @property
    def heartbeat(self) -> str:
        """Key of the heartbeat, overwritten while the machine lives."""
        return f"{self.prefix}beat.json"

    @property
    def logs(self) -> str:
        """Prefix of what the program prints."""
        return f"{self.prefix}log/"

    def log(self, number: int) -> str:
        """Return the key of a piece of what the program prints: created once."""
        return f"{self.logs}{number:06d}.txt"

    @property
    def program_exit(self) -> str:
        """Key of the report on how the program ended."""
        return f"{self.prefix}ended.json"


def parse_rental(key: str) -> str | None:
    """Return the rental that an attempt's key belongs to; None if it is none's."""
    name, slash, _ = key.removeprefix(f"{RENTALS}/").rpartition("/attempts/")
    ours = slash and key.startswith(f"{RENTALS}/") and _is_valid_name(RentalKeys, name)
    return name if ours else None


def campaign_of(key: str) -> str | None:
    """Return the campaign that a key is the plan of; None if it is no campaign's plan."""
    name, found, rest = key.rpartition(_PLAN_OF_CAMPAIGN)
    ours = found and not rest and _is_valid_name(CampaignKeys, name)
    return name if ours else None


def check_member_name(member: str) -> str:
    """Return the name of a member, checked.

    Raises:
        ConfigurationError: The name cannot be part of an object's name.
    """
    if "/" in member:
        raise ConfigurationError(f"The member's name {member!r} has a '/' in it: write another.")
    return check_name(member, what="The member's name")


def member_lease(job: str, member: str) -> LeaseKeys:
    """Return the lease of a member of a job.

    Raises:
        ConfigurationError: The name cannot be part of an object's name.
    """
    return LeaseKeys(job, f"{_MEMBERS}/{check_member_name(member)}")


def member_scope(job: str, member: str) -> str:
    """Return the scope of what a member writes by itself, its lease aside."""
    return f"{job}/{_MEMBERS}/{member}"


def member_prefix(job: str, member: str) -> str:
    """Return the prefix of what a member writes by itself, its lease aside."""
    return f"{member_scope(job, member)}/"


def clock_probe_key(scope: str, holder: str) -> str:
    """Return the key of an object that is written only to read the store's clock."""
    return f"{scope}/lease/clock/{holder}"


def audit_probe_key(scope: str, nonce: str, name: str) -> str:
    """Return the key of an object that an audit writes and removes."""
    return f"{scope}/_audit-{nonce}-{name}" if scope else f"_audit-{nonce}-{name}"


def write_probe_key(scope: str, nonce: str) -> str:
    """Return the key of an object that is written and removed to try whether that is allowed."""
    return f"{scope}/_probe-{nonce}" if scope else f"_probe-{nonce}"


def lease_prefix(scope: str) -> str:
    """Return the prefix of every lease under a scope."""
    return f"{scope}/lease/"


def parse_lease(scope: str, key: str) -> LeaseKeys | None:
    """Return the lease that a key belongs to; None if it is no lease's, or cannot be read.

    What a member writes below its own lease is none: it could have the name of another member.
    """
    if not is_plain(key):
        return None
    name = key.removeprefix(lease_prefix(scope)).rpartition("/")[0]
    if name.startswith(f"{_MEMBERS}/") and name.count("/") > 1:
        return None
    keys = LeaseKeys(scope, name)
    return keys if keys.parse(key) else None


def cleaning_plan_key(name: str) -> str:
    """Return the key of the list of objects to delete, one a line."""
    return f"{CLEANING}/{name}/plan.jsonl"


def cleaning_outcome_key(name: str) -> str:
    """Return the key of a plan's result."""
    return f"{CLEANING}/{name}/outcome.json"


class ObjectKind(StrEnum):
    """Kind of an object of ours."""

    GRADIENT = "gradient"
    START_WINDOW = "start window"
    UPDATE = "merged gradient"
    LINK = "link"
    OPENING = "opening"  # the rules that a window was opened with
    CHECKPOINT = "checkpoint"
    DATASET = "dataset"
    TEMPORARY = "temporary"  # a probe, a plan of cleaning, a rented machine's reports
    RECORD = "record"  # a lease, the end of an epoch: small, and says what has happened
    JUNK = "junk"  # below a worker's own prefix, and none of Millrace's names


@dataclass(frozen=True, slots=True)
class ClassifiedKey:
    """Object that a key names.

    Attributes:
        kind: What.
        scope: The run, the job or the dataset that it belongs to; empty where it is none's.
        version: Of what the run's workers run, where the name has one.
        number: The window or the step, where it has one.
        worker: Name of the worker or member below whose own prefix the object is, where one is.
    """

    kind: ObjectKind
    scope: str
    version: str = ""
    number: int = -1
    worker: str = ""

    @property
    def lease_scope(self) -> str:
        """The scope of the leases that are held while somebody works on it."""
        if self.version:
            return ChainKeys(self.scope, self.version).job
        return self.scope


_NAME_PATTERN = _NAME.pattern
_WORKER_KEY = re.compile(
    rf"(?P<scope>{_NAME_PATTERN})/(?P<uid>[^/]+)/(?P<what>gradient|start_window)-(?P<number>[0-9]{{9,}})"
    r"-(?P=uid)-v(?P<version>[A-Za-z0-9][A-Za-z0-9._-]*)\.(?P<ending>safetensors|pt|json)"
)
_CHAIN_KEY = re.compile(
    rf"(?P<scope>{_NAME_PATTERN})/{_GATHERS}/(?P<version>{_NAME_PATTERN})/"
    r"(?:(?P<step>[0-9]{9,})-[0-9a-f]{64}\.npz|chain/(?P<window>[0-9]{9,})\.json"
    r"|windows/(?P<opening>[0-9]{9,})\.json)"
)
_CHECKPOINT_KEY = re.compile(
    rf"(?P<scope>{_NAME_PATTERN})/{CHECKPOINTS}/step_(?P<number>[0-9]{{9,}})/.+"
)
_DATASET_KEY = re.compile(
    rf"(?P<scope>{_NAME_PATTERN})/(?:(?:plan|manifest|index)\.json|(?:partitions|commits)/[^/]+\.jsonl?"
    r"|quarantine/[a-z]+-[0-9]{5,}-[0-9]{6,}\.jsonl|shards/[a-z]+-[0-9]{5,}-[0-9]{6,}\.[a-z]+)"
)
_MACHINE_KEY = re.compile(rf"{MACHINES}/(?P<rental>{_NAME_PATTERN})/[0-9]{{6,}}/.+")
_TEMPORARY_KEY = re.compile(
    rf"(?:(?P<scope>{_NAME_PATTERN})/)?(?:_audit-[0-9a-f]{{16}}-[a-z]+|_probe-[0-9a-f]{{16}}(?:\.bin)?"
    rf"|lease/clock/[0-9a-f]{{16}})|{CLEANING}/(?:lease/clock/[0-9a-f]{{16}}"
    r"|[0-9]{8}T[0-9]{6}-[0-9a-f]{8}/(?:plan\.jsonl|outcome\.json))"
)


_RECORD_KEY = re.compile(
    rf"(?P<scope>(?:{RENTALS}/)?{_NAME_PATTERN})/(?:lease/.+\.(?:json|beat|end)"
    rf"|epochs/[0-9]{{6,}}\.json|{_COOLDOWNS}/[0-9]{{6,}}/.+)"
)
_MEMBER_KEY = re.compile(
    rf"(?P<scope>{_NAME_PATTERN})/{_MEMBERS}/(?P<uid>[^/]+)/{_COOLDOWNS}/[0-9]{{6,}}/"
    r"(?:(?P<record>(?:vote|late|result)\.json)|draft\.json|parts/[0-9a-f]{64}\.safetensors)"
)


_KIND_PATTERNS = (
    (ObjectKind.CHECKPOINT, _CHECKPOINT_KEY),
    (ObjectKind.DATASET, _DATASET_KEY),
    (ObjectKind.TEMPORARY, _TEMPORARY_KEY),
    (ObjectKind.RECORD, _RECORD_KEY),
)


@dataclass(slots=True)
class WorkerPrefixes:
    """Prefixes that belong to one worker or member each, as a bucket's own objects prove them.

    A key alone does not prove a prefix: ``data/w1/notes.txt`` may be anybody's. These do:

    - a gradient, a start window or a vote, which only the worker itself has credentials to write;
    - the plan of a campaign, whose workers have the prefixes of `CampaignKeys.list_write_prefixes`.

    A worker can forge such objects below its own prefix only, so the outermost prefix counts.
    """

    _owners: dict[str, ClassifiedKey] = field(default_factory=dict[str, ClassifiedKey])
    _campaigns: set[str] = field(default_factory=set[str])

    def learn(self, key: str) -> None:
        """Take a key of the bucket, or of one beside it, as a proof if it is one."""
        if (campaign := campaign_of(key)) is not None:
            self._campaigns.add(campaign)
        what = classify_key(key)
        if what is None or not what.worker:
            return
        junk = ClassifiedKey(ObjectKind.JUNK, what.scope, worker=what.worker)
        if what.kind in {ObjectKind.GRADIENT, ObjectKind.START_WINDOW}:
            self._owners[f"{what.scope}/{what.worker}/"] = junk
            return
        self._owners[member_prefix(what.scope, what.worker)] = junk
        self._owners[f"{lease_prefix(what.scope)}{_MEMBERS}/{what.worker}/"] = junk

    def find(self, key: str) -> ClassifiedKey | None:
        """Return `ObjectKind.JUNK` and the worker whose prefix a key is below, or None.

        Whether Millrace names the key is for `classify_key` to say.
        """
        end = key.find("/")
        while end >= 0:
            if owner := self._owners.get(key[: end + 1]):
                return owner
            match = _CAMPAIGN_KEY.match(key, end + 1) if key[:end] in self._campaigns else None
            if match:
                keys = CampaignKeys(key[:end])
                return ClassifiedKey(
                    ObjectKind.JUNK, keys.run if match["run"] else keys.job, worker=match["uid"]
                )
            end = key.find("/", end + 1)
        return None


_CAMPAIGN_KEY = re.compile(
    rf"(?:(?P<run>run)|model/(?:lease/)?{_MEMBERS})/(?P<uid>worker-[0-9]{{1,9}})/"
)


def classify_key(key: str, workers: WorkerPrefixes | None = None) -> ClassifiedKey | None:
    """Return the kind of any object by its key; None of a key that Millrace does not name.

    A checkpoint's and a dataset's objects are told apart by their own keys.

    Args:
        key: Key of the object. Any text has an answer; none raises.
        workers: Prefixes of workers. What Millrace does not name below one is `ObjectKind.JUNK`;
            left out, such a key has no kind.
    """
    what = _classify(key)
    return workers.find(key) if what is None and workers is not None else what


def _classify(key: str) -> ClassifiedKey | None:
    leaf = key.rpartition("/")[2]
    if leaf.startswith(("gradient-", "start_window-")):
        return _classify_worker_key(key)
    if key.startswith(f"{MACHINES}/"):
        return _classify_machine_key(key)
    if (match := _MEMBER_KEY.fullmatch(key)) and not is_too_deep(match["scope"]):
        kind = ObjectKind.RECORD if match["record"] else ObjectKind.TEMPORARY
        return ClassifiedKey(kind, match["scope"], worker=match["uid"])
    match = _CHAIN_KEY.fullmatch(key)
    if match and _is_valid_name(CheckpointKeys, ChainKeys(match["scope"], match["version"]).job):
        kind, number = (
            (ObjectKind.UPDATE, match["step"])
            if match["step"]
            else (ObjectKind.LINK, match["window"])
            if match["window"]
            else (ObjectKind.OPENING, match["opening"])
        )
        return ClassifiedKey(kind, match["scope"], match["version"], int(number))
    for kind, pattern in _KIND_PATTERNS:
        match = pattern.fullmatch(key)
        if (
            match is None
            or is_too_deep(match["scope"] or "")
            or (kind in _KEYS_BY_KIND and not _is_valid_name(_KEYS_BY_KIND[kind], match["scope"]))
        ):
            continue
        number = int(match["number"]) if kind is ObjectKind.CHECKPOINT else -1
        return ClassifiedKey(kind, match["scope"] or "", number=number)
    return None


def _classify_machine_key(key: str) -> ClassifiedKey | None:
    machine = _MACHINE_KEY.fullmatch(key)
    if machine is None or not _is_valid_name(RentalKeys, machine["rental"]):
        return None
    return ClassifiedKey(ObjectKind.TEMPORARY, RentalKeys(machine["rental"]).scope)


def _classify_worker_key(key: str) -> ClassifiedKey | None:
    match = _WORKER_KEY.fullmatch(key)
    if match is None or match["uid"] in _RESERVED_WORKERS or is_too_deep(match["scope"]):
        return None
    kind = ObjectKind.GRADIENT if match["what"] == "gradient" else ObjectKind.START_WINDOW
    if (match["ending"] == "json") is (kind is ObjectKind.GRADIENT):
        return None
    return ClassifiedKey(kind, match["scope"], match["version"], int(match["number"]), match["uid"])


_KEYS_BY_KIND: dict[ObjectKind, type[DatasetKeys] | type[CheckpointKeys]] = {
    ObjectKind.CHECKPOINT: CheckpointKeys,
    ObjectKind.DATASET: DatasetKeys,
}


@lru_cache(maxsize=1024)
def _is_valid_name(
    keys: type[DatasetKeys] | type[CheckpointKeys] | type[RentalKeys] | type[CampaignKeys],
    name: str,
) -> bool:
    try:
        keys(name)
    except ConfigurationError:
        return False
    return True
