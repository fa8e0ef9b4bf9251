"""Commit of an epoch's end by the owner, for members that write below their own prefixes only.

The owner of a job trusts members only for their own votes. The epoch ends with the content that
more than half of them voted for. The digest in the votes proves the metadata that a member
proposes, and the metadata proves each file. Files are copied within the store. Then the copies are
verified, since a member may replace its uploads at any time. Invalid uploads harm only their
member.

Every step can be repeated. After a kill, a new owner continues from the state in the store.
"""

import secrets
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice

from millrace import errors
from millrace.checkpoints.block_digests import put_block_list
from millrace.checkpoints.cooldown.epoch_records import CommittedCheckpoint, find_epoch_end
from millrace.checkpoints.cooldown.rosters import commit_roster, make_roster, read_roster
from millrace.checkpoints.cooldown.votes import VoteTally
from millrace.checkpoints.find import (
    commit_checkpoint,
    compute_rest,
    compute_root,
    verify_parts,
)
from millrace.digest import combine_blocks
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.records import commit_once, encode_record, fetch
from millrace.schemas.checkpoint import Checkpoint, EpochRecord, Part, Roster, Vote
from millrace.storage import (
    Store,
    copy,
    delete,
    hash_object,
    list_objects,
    put,
    read_range,
)

_CONCURRENCY = 8


def compute_listing_limit(parts: int) -> int:
    """Return the largest number of objects to list below a member's prefix of files."""
    return 2 * parts + 1000


class Collector:
    """End of one epoch from the owner's side.

    Args:
        store: Store of the job, with the owner's credentials.
        job: Name of the job.
        epoch: Number of the epoch.
        members: Names of members that may take part.
    """

    def __init__(self, store: Store, job: str, epoch: int, members: Collection[str]) -> None:
        self._store, self._job, self._epoch = store, job, epoch
        self._members = tuple(members)
        self._keys, self._cooldown = CheckpointKeys(job), CooldownKeys(job, epoch)
        self._refused: set[str] = set()  # members whose metadata differs from their votes
        self._bad: set[tuple[str, str]] = set()  # members, and digests of damaged files
        self._good: set[str] = set()
        self._looked = False
        self._draft: tuple[Vote, Checkpoint] | None = None  # with the vote of its member
        self._committed = CommittedCheckpoint(store, job)

    def obtain_roster(self, living: Collection[str]) -> Roster | None:
        """Return the roster. If there is none, commit a roster of the living members."""
        with suppress(errors.NotFoundError, errors.CorruptError):
            return read_roster(self._store, self._job, self._epoch)
        there = set(living) & set(self._members)
        if not there:
            return None
        try:
            commit_roster(self._store, self._job, self._epoch, there)
        except errors.CorruptError:  # only owners write here, so the roster is damaged
            roster = make_roster(self._job, self._epoch, there)
            put(self._store, self._cooldown.roster, encode_record(roster, secrets.token_hex(16)))
        return read_roster(self._store, self._job, self._epoch)

    def advance(
        self, roster: Roster, tally: VoteTally, living: Collection[str]
    ) -> EpochRecord | None:
        """Commit as much as is possible now, and return the epoch's end or None.

        Args:
            roster: Roster of the epoch.
            tally: Current votes of the members.
            living: Names of the members that live.
        """
        favourite = tally.find_majority(roster.members, living)
        if favourite is not None and self._try_commit(roster, tally, favourite):
            by = self._draft[0].member if self._draft else favourite.member
            return self.commit(favourite.make_epoch_record(self._job, self._epoch, by))
        if tally.has_late_majority(roster.members, living):
            return self.end_without_checkpoint(
                "most members voted to go on without a checkpoint", favourite
            )
        return None

    def end_without_checkpoint(self, reason: str, favourite: Vote | None = None) -> EpochRecord:
        """End the epoch without a checkpoint."""
        step = favourite.step if favourite is not None else -1
        record = EpochRecord(job=self._job, epoch=self._epoch, step=step, root=None, reason=reason)
        return self.commit(record)

    def finish_checkpoint(self, roster: Roster, tally: VoteTally, living: Collection[str]) -> bool:
        """Commit the checkpoint of an epoch that ended without one, if possible.

        Returns:
            Whether the checkpoint is committed.
        """
        favourite = tally.find_majority(roster.members, living)
        return favourite is not None and self._try_commit(roster, tally, favourite)

    def commit(self, record: EpochRecord) -> EpochRecord:
        """Commit the epoch's end. An invalid record is replaced."""
        with suppress(errors.CorruptError):
            if commit_once(self._store, self._keys.make_epoch_key(self._epoch), record).mine:
                return record
        there = find_epoch_end(self._store, self._job, self._epoch)
        if there is None:
            put(
                self._store,
                self._keys.make_epoch_key(self._epoch),
                encode_record(record, secrets.token_hex(16)),
            )
        return there or record

    def delete_uploads(self, roster: Roster) -> None:
        """Delete the uploads of the members after the end of the epoch."""
        for member in roster.members:
            stats = islice(
                list_objects(self._store, self._cooldown.make_parts_prefix(member)), 100_000
            )
            keys = [stat.key for stat in stats]
            delete(self._store, [*keys, self._cooldown.make_draft_key(member)])

    # -- the checkpoint

    def _try_commit(self, roster: Roster, tally: VoteTally, favourite: Vote) -> bool:
        """Try to commit the checkpoint, and return whether it is committed."""
        step, root, rest = favourite.agreement_key
        if self._draft is not None and self._draft[0].agreement_key != favourite.agreement_key:
            # Members that have returned voted for another content.
            self._draft, self._looked = None, False
            self._good.clear()  # at the step of the earlier content
        if self._committed.is_intact(step, root, rest):
            return True
        if self._draft is None:
            self._draft = self._find_draft(roster, tally, favourite)
        if self._draft is None or not self._collect_parts(roster, self._draft[1]):
            return False
        there = commit_checkpoint(self._store, self._draft[1]).record
        if (there.root, compute_rest(there)) != (root, rest):
            where = self._store.make_url(self._keys.make_metadata_key(step))
            raise errors.ConflictError(
                f"{where} is a checkpoint of the same step with another content, position or run, "
                "saved before this epoch ended. Give this job another name, or resume from that "
                "checkpoint."
            )
        self._restore_referred(there)
        self._committed.note_restored(there)
        return True

    def _restore_referred(self, checkpoint: Checkpoint) -> None:
        """Replace damaged files of other steps, to which an earlier save of this step refers."""
        referred = [part for part in checkpoint.parts if part.step != checkpoint.step]
        damage = verify_parts(self._store, self._job, referred)
        for part in referred:
            if part.digest in damage:
                source = self._keys.make_part_key(checkpoint.step, part.digest)
                copy(self._store, source, self._keys.make_part_key(part.step, part.digest))

    def _find_draft(
        self, roster: Roster, tally: VoteTally, favourite: Vote
    ) -> tuple[Vote, Checkpoint] | None:
        """Return the vote of the first member whose metadata matches the votes, and the metadata.

        Fields that the votes do not prove are replaced: notes, the time, and the steps of files.
        """
        for member in roster.members:
            vote = tally.votes.get(member)
            if (
                member in self._refused
                or vote is None
                or vote.agreement_key != favourite.agreement_key
            ):
                continue
            key = self._cooldown.make_draft_key(member)
            try:
                draft = fetch(self._store, key, Checkpoint)
            except errors.NotFoundError:
                continue
            except errors.CorruptError:
                self._refused.add(member)
                continue
            step, root = draft.step, compute_root(draft.parts, draft.tensors)
            if (step, root, compute_rest(draft)) != favourite.agreement_key:
                self._refused.add(member)
                continue
            parts = tuple(part.model_copy(update={"step": step}) for part in draft.parts)
            taken: dict[str, object] = {
                "job": self._job, "root": root, "parts": parts, "notes": {},
                "saved": datetime.now(UTC), "digest": "",
            }  # fmt: skip
            return vote, draft.model_copy(update=taken)
        return None

    def _collect_parts(self, roster: Roster, draft: Checkpoint) -> bool:
        """Copy the uploaded files, and return whether all are copied and verified."""
        wanted = {part.digest: part for part in draft.parts}
        if not self._looked:  # files that an earlier owner copied
            self._looked = True
            stats = list_objects(self._store, self._keys.make_parts_prefix(draft.step))
            found = (self._keys.parse_part(stat.key) for stat in stats)
            self._verify_parts([wanted[one[1]] for one in found if one and one[1] in wanted])
        for member in roster.members:
            parts = [
                wanted[digest]
                for digest, size in self._iterate_uploads(member, len(draft.parts))
                if digest in wanted
                and digest not in self._good
                and (member, digest) not in self._bad
                and size == wanted[digest].size
            ]
            self._copy_parts(member, parts)
            self._bad |= {(member, part.digest) for part in parts} - {
                (member, digest) for digest in self._good
            }
        return wanted.keys() <= self._good

    def _iterate_uploads(self, member: str, parts: int) -> Iterator[tuple[str, int]]:
        stats = list_objects(self._store, self._cooldown.make_parts_prefix(member))
        for stat in islice(stats, compute_listing_limit(parts)):
            digest = self._cooldown.parse_part(member, stat.key)
            if digest is not None:
                yield digest, stat.size

    def _copy_parts(self, member: str, parts: Collection[Part]) -> None:
        def copy_part(part: Part) -> None:
            source = self._cooldown.make_part_key(member, part.digest)
            with suppress(errors.NotFoundError, errors.CorruptError):
                read_range(self._store, source, 0, 1)  # raises if the file is unreadable
                copy(self._store, source, self._keys.make_part_key(part.step, part.digest))

        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="collect") as pool:
            list(pool.map(copy_part, parts))
        self._verify_parts(parts)

    def _verify_parts(self, parts: Collection[Part]) -> None:
        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="collect") as pool:
            right = pool.map(self._is_intact, parts)
            self._good |= {part.digest for part, good in zip(parts, right, strict=True) if good}

    def _is_intact(self, part: Part) -> bool:
        blocks = hash_object(
            self._store, self._keys.make_part_key(part.step, part.digest), part.size
        )
        if not blocks or combine_blocks(blocks) != part.digest:
            return False
        # Members are not believed about blocks, so this list is made from the verified file.
        put_block_list(self._store, self._keys, part, blocks)
        return True
