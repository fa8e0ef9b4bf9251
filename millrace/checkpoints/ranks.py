"""Checkpoints that several ranks save together, each its own shards of the tensors.

The ranks coordinate through the bucket only, without collectives of the trainer. Each rank commits
a record of its share after its files. Then it looks for the shares of the others. The last rank
finds all of them, and commits the metadata.
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
    compute_root,
    find_checkpoint,
    find_missing_parts,
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
    """Rank of this process in a group.

    Attributes:
        rank: Number of the rank, from 0.
        world: Number of ranks.
        attempt: Name that all ranks share, new for each `Saver`. Shares of different attempts, or
            of different calls of `Saver.save`, are never mixed.
    """

    rank: int
    world: int
    attempt: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise errors.ConfigurationError(
                f"Rank {self.rank} is not one of {self.world}: choose 0 to {self.world - 1}."
            )
        if "/" in check_name(self.attempt, what="The attempt"):
            raise errors.ConfigurationError(
                f"The attempt {self.attempt!r} has a '/' in it: choose another name."
            )

    @classmethod
    def from_group(cls, group: torch.distributed.ProcessGroup | None = None) -> Self:
        """Return the rank of this process in a process group of torch.

        The first rank draws the attempt. All ranks of the group must call this collective.

        Args:
            group: Process group; by default that of all processes.
        """
        dist = torch.distributed
        on_gpu = dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        drawn = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8, device=device)
        dist.broadcast(drawn, group=group, group_src=0)
        attempt = drawn.cpu().numpy().tobytes().hex()
        return cls(dist.get_rank(group), dist.get_world_size(group), attempt)


def commit_together(
    store: Store, ranks: Ranks, share: RankShare, number: int, within: timedelta
) -> Checkpoint:
    """Commit the share of this rank, whose files are saved, and wait for the other ranks.

    Args:
        store: Store of the job.
        ranks: Rank of this process, and the attempt.
        share: Share of this rank.
        number: Number of the save in the attempt, the same on all ranks.
        within: Longest wait.

    Returns:
        Checkpoint of all ranks, which the last rank has committed.

    Raises:
        UnavailableError: Shares are missing after the wait. There is no checkpoint.
        ChangedError: Files of a share were deleted. There is no checkpoint.
        ConfigurationError: The shares do not cover each tensor exactly once.
        ConflictError: Another share of this rank is already committed.
    """
    key = CheckpointKeys(share.job).make_share_key(share.step, ranks.attempt, number, ranks.rank)
    commit_same(store, key, share)
    deadline = time.monotonic() + within.total_seconds()
    made = _merge_if_complete(store, ranks, share, number)
    while made is None:
        there = find_checkpoint(store, share.job, share.step)  # another rank has committed
        if there is not None:
            return there
        if time.monotonic() > deadline:
            # The last rank may have died after the commit of its share.
            made = _merge_if_complete(store, ranks, share, number)
            if made is None:
                raise errors.UnavailableError(
                    f"Not all {ranks.world} ranks have saved their share of step {share.step} of "
                    f"{share.job} after {within.total_seconds():g} s, so the step has no "
                    "checkpoint. Read the logs of the other ranks, and save a later step, each "
                    "rank with as many calls as the others."
                )
        else:
            time.sleep(_POLL_INTERVAL)
    return commit_checkpoint(store, made).record


def has_share(checkpoint: Checkpoint, share: RankShare) -> bool:
    """Decide whether a checkpoint includes the files of a share."""
    digests = {part.digest for part in checkpoint.parts}
    return digests.issuperset(part.digest for part in share.parts)


def _merge_if_complete(
    store: Store, ranks: Ranks, share: RankShare, number: int
) -> Checkpoint | None:
    keys, save = CheckpointKeys(share.job), (share.step, ranks.attempt, number)
    prefix = keys.make_shares_prefix(*save)
    wanted = {keys.make_share_key(*save, rank) for rank in range(ranks.world)}
    if wanted - {stat.key for stat in list_objects(store, prefix)}:
        return None
    found = iterate_records(store, prefix, RankShare, wanted=lambda stat: stat.key in wanted)
    shares = list(require_intact(store.make_url(prefix), found))
    made = merge_shares(sorted(shares, key=lambda one: one.rank))
    if missing := find_missing_parts(store, made.job, made.parts):
        raise errors.ChangedError(
            f"{len(missing)} files of step {made.step} of {made.job} were deleted before all ranks "
            "had saved their shares, so the step has no checkpoint. Save a later step. If "
            "retention deleted them, choose a longer `grace`."
        )
    return made


def merge_shares(shares: Sequence[RankShare]) -> Checkpoint:
    """Return the checkpoint that consists of the shares of all ranks.

    Args:
        shares: Shares in the order of their ranks.

    Raises:
        ConfigurationError: The ranks saved different tensors, or did not save each element of a
            tensor exactly once.
    """
    first = shares[0]
    parts: dict[str, Part] = {}
    numbers: dict[str, int] = {}
    tensors: dict[str, TensorRecord] = {}
    for share in shares:
        for part in share.parts:
            numbers.setdefault(part.digest, len(parts))
            parts.setdefault(part.digest, part)
        for name, record in share.tensors.items():
            chunks = tuple(
                chunk.model_copy(update={"part": numbers[share.parts[chunk.part].digest]})
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
                f"The ranks' shards of {name} do not cover each element exactly once. Give "
                "DTensors of one mesh, whose elements are on one rank or on replicas of the mesh."
            )
    files = tuple(parts.values())
    return Checkpoint(
        job=first.job,
        step=first.step,
        run=first.run,
        position=first.position,
        notes=first.notes,
        saved=datetime.now(UTC),
        root=compute_root(files, tensors),
        parts=files,
        tensors=tensors,
    )


def _make_mismatch_error(name: str, share: RankShare) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"Rank {share.rank} has {name}, which differs on rank 0 or is missing there: give states "
        "of the same structure on all ranks, and the state of a single rank as `own`."
    )
