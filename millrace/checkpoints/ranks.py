"""Several ranks save one checkpoint together, each its own shards of the tensors.

All that they know of each other is in the bucket, so that nothing of it waits for a collective of
the trainer's. Each commits a record of its share once its files are there. Whoever finds the shares
of all commits the metadata: the last one, as each looks after its own commit.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

import torch

from millrace import errors
from millrace.checkpoints.find import (
    commit_checkpoint,
    read_checkpoint,
    root_of,
)
from millrace.checkpoints.tensor_shards import is_covered_once
from millrace.checkpoints.tree import parse_own_name
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.names import check_name
from millrace.records import commit_same, iterate_records, require_intact
from millrace.schemas.checkpoint import Checkpoint, Part, RankShare, TensorRecord
from millrace.storage import Store, list_objects

_POLL_INTERVAL = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank of this process among several.

    Attributes:
        rank: From 0.
        world: How many there are.
        attempt: A name that all of them have alike, and that is new whenever they are started:
            shares of one attempt are never taken for another's.
    """

    rank: int
    world: int
    attempt: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise errors.ConfigurationError(f"There is no rank {self.rank} of {self.world}.")
        if "/" in check_name(self.attempt, what="The attempt"):
            raise errors.ConfigurationError(f"The attempt {self.attempt!r} has a '/' in it.")

    @classmethod
    def of_group(cls, group: torch.distributed.ProcessGroup | None = None) -> Self:
        """Return the ranks of torch's process group, with an attempt drawn by the first.

        A collective: all of them call it.

        Args:
            group: By default all processes.
        """
        dist = torch.distributed
        on_gpu = dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        drawn = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8, device=device)
        dist.broadcast(drawn, group=group, group_src=0)
        attempt = drawn.cpu().numpy().tobytes().hex()
        return cls(dist.get_rank(group), dist.get_world_size(group), attempt)


def commit_together(store: Store, ranks: Ranks, share: RankShare, within: timedelta) -> Checkpoint:
    """Commit what this rank has saved, whose files are there, and wait for the others.

    Args:
        store: Where to.
        ranks: This rank and its attempt.
        share: What it has saved.
        within: For how long it waits.

    Returns:
        The checkpoint of all, committed by whoever came last.

    Raises:
        UnavailableError: Not all shares came: there is no checkpoint.
        ConfigurationError: The shares do not make up a whole.
        ConflictError: Another checkpoint of this step is there, or another share of this rank.
    """
    keys = CheckpointKeys(share.job)
    commit_same(store, keys.share(share.step, ranks.attempt, ranks.rank), share)
    deadline = time.monotonic() + within.total_seconds()
    made = _merge_if_complete(store, ranks, share)
    while made is None:
        there = _find_committed(store, share)
        if there is not None:
            return there
        if time.monotonic() > deadline:
            made = _merge_if_complete(
                store, ranks, share
            )  # the last one may have died after its commit
            if made is None:
                raise errors.UnavailableError(
                    f"Not all {ranks.world} ranks have saved their share of step {share.step} of "
                    f"{share.job} after {within.total_seconds():g} s: it has no checkpoint. See "
                    "what became of the others, and save the next one."
                )
        else:
            time.sleep(_POLL_INTERVAL)
    return commit_checkpoint(store, made).record


def _find_committed(store: Store, share: RankShare) -> Checkpoint | None:
    """Return the checkpoint of the step, if another rank has committed it."""
    try:
        return read_checkpoint(store, share.job, share.step)
    except errors.NotFoundError:
        return None
    except errors.VersionError:
        raise
    except errors.CorruptError:
        return None  # of a save before this one: the rank that commits moves it away


def has_share(checkpoint: Checkpoint, share: RankShare) -> bool:
    """Tell whether a checkpoint is made of this share, among others."""
    digests = {part.sha256 for part in checkpoint.parts}
    return digests.issuperset(part.sha256 for part in share.parts)


def _merge_if_complete(store: Store, ranks: Ranks, share: RankShare) -> Checkpoint | None:
    keys = CheckpointKeys(share.job)
    prefix = keys.shares(share.step, ranks.attempt)
    wanted = {keys.share(share.step, ranks.attempt, rank) for rank in range(ranks.world)}
    if wanted - {stat.key for stat in list_objects(store, prefix)}:
        return None
    found = iterate_records(store, prefix, RankShare, wanted=lambda stat: stat.key in wanted)
    shares = list(require_intact(store.make_url(prefix), found))
    return merge_shares(sorted(shares, key=lambda one: one.rank))


def merge_shares(shares: Sequence[RankShare]) -> Checkpoint:
    """Return the checkpoint that the shares of all ranks make up.

    Args:
        shares: In the order of their ranks.

    Raises:
        ConfigurationError: They do not: a tensor has a hole, or is there twice.
    """
    first = shares[0]
    parts: dict[str, Part] = {}
    numbers: dict[str, int] = {}
    tensors: dict[str, TensorRecord] = {}
    for share in shares:
        for part in share.parts:
            numbers.setdefault(part.sha256, len(parts))
            parts.setdefault(part.sha256, part)
        for name, record in share.tensors.items():
            chunks = tuple(
                chunk.model_copy(update={"part": numbers[share.parts[chunk.part].sha256]})
                for chunk in record.chunks
            )
            before = tensors.get(name)
            if before is not None and (before.dtype, before.shape) != (record.dtype, record.shape):
                raise _make_mismatch_error(name, share)
            if before is None and share is not first and parse_own_name(name) is None:
                raise _make_mismatch_error(name, share)
            there = before.chunks if before else ()
            tensors[name] = record.model_copy(update={"chunks": (*there, *chunks)})
    for name, record in tensors.items():
        if not is_covered_once(record.shape, record.chunks):
            raise errors.ConfigurationError(
                f"The ranks' shards of {name} do not make up a whole: each element must be on one "
                "rank, or on replicas that the mesh knows of. Give DTensors of one mesh."
            )
    files = tuple(parts.values())
    return Checkpoint(
        job=first.job,
        step=first.step,
        run=first.run,
        position=first.position,
        notes=first.notes,
        saved=datetime.now(UTC),
        root=root_of(files, tensors),
        parts=files,
        tensors=tensors,
    )


def _make_mismatch_error(name: str, share: RankShare) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"Rank {share.rank} has {name}, and rank 0 has not, or has another: give a state of the "
        "same form on all ranks, and what a rank alone has as `own`."
    )
