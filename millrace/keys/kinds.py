"""Classify objects by their keys."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from millrace.keys.campaigns import CAMPAIGN_WORKER_KEY, CampaignKeys, parse_campaign
from millrace.keys.checkpoints import CHECKPOINT_KEY, RESERVED_IN_JOBS, CheckpointKeys
from millrace.keys.cleanup import CLEANING
from millrace.keys.cooldowns import COOLDOWNS, MEMBER_KEY
from millrace.keys.datasets import DATASET_KEY, DatasetKeys
from millrace.keys.gradients import CHAIN_KEY, RESERVED_WORKERS, WORKER_KEY, ChainKeys
from millrace.keys.leases import MEMBERS, make_lease_prefix
from millrace.keys.members import make_member_prefix
from millrace.keys.names import MAX_DEPTH, MAX_LENGTH, NAME_PATTERN, is_too_deep, is_valid_name
from millrace.keys.rentals import (
    MACHINE_KEY,
    MACHINES,
    RENTAL_KEY,
    RENTALS,
    RentalKeys,
    split_nested_key,
)
from millrace.keys.templar import TemplarKind, parse_templar_key


class ObjectKind(StrEnum):
    """Kind of an object that Millrace names."""

    GRADIENT = "gradient"
    START_WINDOW = "start window"
    REGISTRATION = "registration"  # of a worker that joins or leaves a run
    UPDATE = "merged gradient"
    LINK = "link"
    OPENING = "opening"  # the rules of a window
    SCORES = "scores"  # of the workers, after a window
    CHECKPOINT = "checkpoint"
    DATASET = "dataset"
    TEMPORARY = "temporary"  # a probe, a cleanup plan, a report of a rented machine
    RECORD = "record"  # a lease, the end of an epoch, a rental
    TEMPLAR_CHECKPOINT = "Templar checkpoint"  # one object, at the root of a bucket
    TEMPLAR_GATHER = "Templar gather"  # what Templar's validators write of a window
    JUNK = "junk"  # an object below a worker's own prefix, without a name of Millrace


@dataclass(frozen=True, slots=True)
class ClassifiedKey:
    """Kind and owner of the object under a key.

    Attributes:
        kind: Kind of the object.
        scope: Name of the run, the job or the dataset of the object; empty if it has none, as all
            of Templar's.
        version: Version of the workers' program; empty if the key has none.
        number: Window or step; -1 if the key has none.
        worker: Name of the worker or member whose prefix the object is below; empty for others.
    """

    kind: ObjectKind
    scope: str
    version: str = ""
    number: int = -1
    worker: str = ""

    @property
    def is_of_templar(self) -> bool:
        """Decide whether the object is one of Templar's, at the root of a bucket."""
        return bool(self.version) and not self.scope

    @property
    def lease_scope(self) -> str:
        """Scope of the leases that are held while a process works on the object's run or job.

        Templar's objects have no scope, and Templar holds no leases.
        """
        if self.version and not self.is_of_templar:
            return ChainKeys(self.scope, self.version).job
        return self.scope


_FOLDER = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")  # of a name
# These two kinds have objects of several domains.
_TEMPORARY_KEY = re.compile(
    rf"(?:(?P<scope>{NAME_PATTERN})/)?(?:_audit-[0-9a-f]{{16}}-[a-z]+|_probe-[0-9a-f]{{16}}(?:\.bin)?"
    rf"|lease/clock/[0-9a-f]{{16}})|{CLEANING}/(?:lease/clock/[0-9a-f]{{16}}"
    r"|[0-9]{8}T[0-9]{6}-[0-9a-f]{8}/(?:plan\.jsonl|outcome\.json))"
)
_RECORD_KEY = re.compile(
    rf"(?P<scope>(?:{RENTALS}/)?{NAME_PATTERN})/(?:lease/.+\.(?:json|beat|end)"
    rf"|epochs/[0-9]{{6,18}}\.json|{COOLDOWNS}/[0-9]{{6,18}}/.+|campaign/(?:training|warming)\.json)"
)


_CHAIN_KINDS = {
    "step": ObjectKind.UPDATE,
    "window": ObjectKind.LINK,
    "opening": ObjectKind.OPENING,
    "scores": ObjectKind.SCORES,
}
"""Kinds of the objects of a chain, by the groups of `CHAIN_KEY`."""
_WORKER_KINDS = {
    "gradient": ObjectKind.GRADIENT,
    "start_window": ObjectKind.START_WINDOW,
    "registration": ObjectKind.REGISTRATION,
}
"""Kinds of the objects of a worker of a run, by the begin of their names."""
_TEMPLAR_KINDS = {
    TemplarKind.GRADIENT: ObjectKind.GRADIENT,
    TemplarKind.START_WINDOW: ObjectKind.START_WINDOW,
    TemplarKind.CHECKPOINT: ObjectKind.TEMPLAR_CHECKPOINT,
    TemplarKind.AGGREGATOR: ObjectKind.TEMPLAR_GATHER,
    TemplarKind.GATHERS: ObjectKind.TEMPLAR_GATHER,
    TemplarKind.DEBUG: ObjectKind.TEMPLAR_GATHER,
    TemplarKind.PEERS: ObjectKind.TEMPLAR_GATHER,
}
_KIND_PATTERNS = (
    (ObjectKind.CHECKPOINT, CHECKPOINT_KEY),
    (ObjectKind.DATASET, DATASET_KEY),
    (ObjectKind.TEMPORARY, _TEMPORARY_KEY),
    (ObjectKind.RECORD, _RECORD_KEY),
    (ObjectKind.RECORD, RENTAL_KEY),
)


@dataclass(slots=True)
class WorkerPrefixes:
    """Prefixes that each belong to one worker or member, as the objects of a bucket prove.

    A key alone does not prove a prefix: ``data/w1/notes.txt`` may belong to a user. Proofs are:

    - a gradient, a start window, a registration or a vote: only the worker has credentials to
      write there;
    - the plan of a campaign: its workers have the prefixes of `CampaignKeys.list_write_prefixes`.

    A worker can forge proofs below its own prefix only. Therefore the outermost prefix counts.
    """

    _owners: dict[str, ClassifiedKey] = field(default_factory=dict[str, ClassifiedKey])
    _campaigns: set[str] = field(default_factory=set[str])

    def learn(self, key: str) -> None:
        """Add the prefix that a key proves, if the key is a proof.

        Args:
            key: Key of an object in the bucket, or in a related bucket.
        """
        if (campaign := parse_campaign(key)) is not None:
            self._campaigns.add(campaign)
        what = classify_key(key)
        if what is None or not what.worker:
            return
        junk = ClassifiedKey(ObjectKind.JUNK, what.scope, worker=what.worker)
        if what.kind in _WORKER_KINDS.values():
            self._owners[f"{what.scope}/{what.worker}/"] = junk
            return
        self._owners[make_member_prefix(what.scope, what.worker)] = junk
        self._owners[f"{make_lease_prefix(what.scope)}{MEMBERS}/{what.worker}/"] = junk

    def find(self, key: str) -> ClassifiedKey | None:
        """Return `ObjectKind.JUNK` with the worker whose prefix a key is below, or None.

        `classify_key` first decides whether the key is one of Millrace's names.
        """
        end = key.find("/")
        while end >= 0:
            if owner := self._owners.get(key[: end + 1]):
                return owner
            match = (
                CAMPAIGN_WORKER_KEY.match(key, end + 1) if key[:end] in self._campaigns else None
            )
            if match:
                keys = CampaignKeys(key[:end])
                return ClassifiedKey(
                    ObjectKind.JUNK, keys.run if match["run"] else keys.job, worker=match["uid"]
                )
            end = key.find("/", end + 1)
        return None


def classify_key(key: str, workers: WorkerPrefixes | None = None) -> ClassifiedKey | None:
    """Return the kind of an object from its key; None if the key is not one of Millrace's names.

    Objects of one checkpoint or dataset all have the same kind. `CheckpointKeys` and `DatasetKeys`
    distinguish them.

    Args:
        key: Key of the object. No text raises an error.
        workers: Prefixes of workers. Any other key below one of them is `ObjectKind.JUNK`.
            Without prefixes, such a key has no kind.
    """
    what = _classify_templar_key(key) or _classify(key)
    return workers.find(key) if what is None and workers is not None else what


def classify_nested_key(key: str) -> ClassifiedKey | None:
    """Return the kind of an object like `classify_key`, also of one in a store below this one.

    The prefix of that store may be no part of a name: ``_rentals`` and ``_clean`` are at the root
    of their store, and a URL may have folders that no name has, such as ``my data`` or
    ``checkpoints``. The scope then begins with the prefix. Templar's objects below a prefix have no
    kind.

    Args:
        key: Key of the object. No text raises an error. A store more than `MAX_DEPTH` folders below
            this one is not found.
    """
    prefix, classified = _find_store(key)
    if classified is None or not classified.scope:
        return classified
    return replace(classified, scope=f"{prefix}{classified.scope}")


def split_store_prefix(key: str) -> tuple[str, str]:
    """Split a key into the prefix of the store that it is of, and the key in that store.

    The prefix is that of `classify_nested_key`. It is empty for keys that no store names.

    Args:
        key: Key of the object. No text raises an error.
    """
    prefix, _ = _find_store(key)
    return prefix, key[len(prefix) :]


def _find_store(key: str) -> tuple[str, ClassifiedKey | None]:
    """Return the prefix of the store that names a key, and the kind of the object there."""
    rental_prefix, _ = split_nested_key(key)
    for start in dict.fromkeys((len(rental_prefix), 0, *_iterate_store_starts(key))):
        classified = classify_key(key[start:])
        if classified is not None and not (start and classified.is_of_templar):
            return key[:start], classified
    return "", None


def _iterate_store_starts(key: str) -> Iterator[int]:
    """Yield where the keys of a store can begin within a key that `classify_key` does not know.

    These are the begin and the end of each folder that a name cannot have, and of each folder if
    the key is longer than a name. Below other folders, `classify_key` knows the whole key.
    """
    folders = key.split("/")[:-1]
    is_long = len(key) > MAX_LENGTH or len(folders) > MAX_DEPTH
    start = 0
    for folder in folders[:MAX_DEPTH]:
        end = start + len(folder) + 1
        if is_long or folder in RESERVED_IN_JOBS or not _FOLDER.fullmatch(folder):
            yield start
            yield end
        start = end


def _classify(key: str) -> ClassifiedKey | None:
    leaf = key.rpartition("/")[2]
    if leaf.startswith(tuple(f"{what}-" for what in _WORKER_KINDS)):
        return _classify_worker_key(key)
    if key.startswith(f"{MACHINES}/"):
        return _classify_machine_key(key)
    if (match := MEMBER_KEY.fullmatch(key)) and not is_too_deep(match["scope"]):
        kind = ObjectKind.RECORD if match["record"] else ObjectKind.TEMPORARY
        return ClassifiedKey(kind, match["scope"], worker=match["uid"])
    match = CHAIN_KEY.fullmatch(key)
    if match and is_valid_name(CheckpointKeys, ChainKeys(match["scope"], match["version"]).job):
        kind, number = next(
            (kind, number)
            for group, kind in _CHAIN_KINDS.items()
            if (number := match[group]) is not None
        )
        return ClassifiedKey(kind, match["scope"], match["version"], int(number))
    for kind, pattern in _KIND_PATTERNS:
        match = pattern.fullmatch(key)
        if (
            match is None
            or is_too_deep(match["scope"] or "")
            or (kind in _KEYS_BY_KIND and not is_valid_name(_KEYS_BY_KIND[kind], match["scope"]))
        ):
            continue
        number = int(match["number"]) if kind is ObjectKind.CHECKPOINT else -1
        return ClassifiedKey(kind, match["scope"] or "", number=number)
    return None


def _classify_templar_key(key: str) -> ClassifiedKey | None:
    templar = parse_templar_key(key)
    if templar is None:
        return None
    return ClassifiedKey(_TEMPLAR_KINDS[templar.kind], "", templar.version, templar.window)


def _classify_machine_key(key: str) -> ClassifiedKey | None:
    machine = MACHINE_KEY.fullmatch(key)
    if machine is None or not is_valid_name(RentalKeys, machine["rental"]):
        return None
    return ClassifiedKey(ObjectKind.TEMPORARY, RentalKeys(machine["rental"]).scope)


def _classify_worker_key(key: str) -> ClassifiedKey | None:
    match = WORKER_KEY.fullmatch(key)
    if match is None or match["uid"] in RESERVED_WORKERS or is_too_deep(match["scope"]):
        return None
    kind = _WORKER_KINDS[match["what"]]
    if (match["ending"] == "json") is (kind is ObjectKind.GRADIENT):
        return None
    return ClassifiedKey(kind, match["scope"], match["version"], int(match["number"]), match["uid"])


_KEYS_BY_KIND: dict[ObjectKind, type[DatasetKeys] | type[CheckpointKeys]] = {
    ObjectKind.CHECKPOINT: CheckpointKeys,
    ObjectKind.DATASET: DatasetKeys,
}
