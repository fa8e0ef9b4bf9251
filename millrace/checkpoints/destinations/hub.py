"""Repository of the Hugging Face Hub as a destination, with one commit per checkpoint.

A commit adds the files and the metadata together, under the same names as in a bucket. So `load`
reads a snapshot of the repository as a folder. A commit names its parent, and the Hub refuses the
commit if another one came first. The destination then reads the new head and tries again. The Hub
keeps files under their SHA-256, so files that it has are not uploaded again.
"""

import hashlib
import os
import random
import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import chain

from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.hf_api import RepoFile, RepoFolder

from millrace import errors
from millrace.checkpoints.block_digests import needs_block_list
from millrace.checkpoints.contents import Content, PartContent, make_content
from millrace.checkpoints.destinations.base import SAMPLE_SIZE, check_sample, mark_read_only
from millrace.checkpoints.find import VerifyDepth, check_content, check_metadata
from millrace.checkpoints.progress_events import CheckpointSaved, PartStored
from millrace.digest import combine_blocks, hash_blocks
from millrace.formatting import format_count
from millrace.hub.client import HubClient
from millrace.hub.spec import HubSpec
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.probes import make_write_probe_key
from millrace.progress import Progress, ignore_event, serialize_events
from millrace.records import decode_record, encode_record
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Store

_RETRY_PAUSE = 0.2  # longest pause in seconds before a commit is repeated


def matches_bytes(entry: RepoFile, body: bytes | memoryview) -> bool:
    """Decide whether a listed file of the Hub has these bytes, by the digest that the Hub lists."""
    if entry.size != len(body):
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == hashlib.sha256(body).hexdigest()
    blob = hashlib.sha1(b"blob %d\0" % len(body), usedforsecurity=False)  # of Git
    blob.update(body)
    return entry.blob_id == blob.hexdigest()


class HubDestination:
    """Destination in a repository of the Hub.

    Args:
        spec: Repository and token.

    Attributes:
        store: None, since the Hub is not a store.
    """

    def __init__(self, spec: HubSpec) -> None:
        self._client = HubClient(spec)
        self.store: Store | None = None

    @property
    def url(self) -> str:
        """URL of the repository and its branch."""
        return self._client.url

    # -- reading

    def iterate_checkpoints(self, job: str) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints of a job, newest first."""
        head, keys = self._client.read_head(), CheckpointKeys(job)
        names = [
            entry.path.rpartition("/")[2]
            for entry in self._client.list_tree(keys.prefix, head, recursive=False)
            if isinstance(entry, RepoFolder)
        ]
        found = [step for step in map(keys.parse_folder, names) if step is not None]
        for step in sorted(found, reverse=True):
            with suppress(errors.NotFoundError, errors.CorruptError):
                yield self._read_checkpoint(job, step, head)

    def read_checkpoint(self, job: str, step: int) -> Checkpoint:
        """Return the checkpoint of a step."""
        return self._read_checkpoint(job, step, self._client.read_head())

    def open_content(self, checkpoint: Checkpoint) -> Content:
        """Return the content of a checkpoint."""
        head, keys = self._client.read_head(), CheckpointKeys(checkpoint.job)

        def read_file(number: int) -> PartContent:
            part = checkpoint.parts[number]
            key = keys.make_part_key(part.step, part.digest)
            try:
                found = self._client.download(key, head, part.size)
            except errors.NotFoundError:
                raise errors.CorruptError(f"{self._client.make_url(key)} is missing.") from None
            blocks = hash_blocks(found)
            if combine_blocks(blocks) != part.digest:
                raise errors.CorruptError(
                    f"{self._client.make_url(key)} is not the bytes that were saved: verify the "
                    "checkpoint, or load an older one."
                )
            return PartContent(memoryview(found), blocks)

        return make_content(checkpoint.step, checkpoint.parts, checkpoint.tensors, read_file)

    def verify(
        self, checkpoint: Checkpoint, *, check: VerifyDepth = VerifyDepth.DIGESTS
    ) -> dict[str, str]:
        """Return the damage of a checkpoint."""
        head, keys = self._client.read_head(), CheckpointKeys(checkpoint.job)
        there = self._client.list_files(keys.make_parts_prefix(checkpoint.step), head)
        whole = self.open_content(checkpoint)
        damage: dict[str, str] = {}
        for number, part in enumerate(checkpoint.parts):
            key = keys.make_part_key(part.step, part.digest)
            entry = there.get(key)
            if entry is None:
                damage[part.digest] = f"{self._client.make_url(key)} is missing."
            elif entry.size != part.size:
                damage[part.digest] = (
                    f"{self._client.make_url(key)} has {entry.size} bytes, not {part.size}."
                )
            elif check is VerifyDepth.DIGESTS:
                try:
                    whole.read(number)
                except errors.CorruptError as error:
                    damage[part.digest] = str(error)
        return damage

    # -- writing

    def write_copy(
        self,
        checkpoint: Checkpoint,
        content: Content,
        job: str,
        *,
        uploads: int = 4,
        progress: Progress = ignore_event,
    ) -> Checkpoint:
        """Upload the files that are missing, and commit the checkpoint."""
        keys = CheckpointKeys(job)
        progress = serialize_events(progress)
        key = keys.make_metadata_key(checkpoint.step)
        record = content.make_metadata(checkpoint, job)
        added: list[CommitOperationAdd] | None = None
        deadline = self._client.compute_deadline()
        while True:
            head = self._client.read_head()
            with suppress(errors.NotFoundError):
                there = self._read_checkpoint(job, checkpoint.step, head)
                check_content(self._client.make_url(key), there, content.root)
                self._check_copy(there)
                return there
            if added is None:
                files = self._client.list_files(keys.make_parts_prefix(checkpoint.step), head)
                added = self._upload_files(keys, content, files, uploads, progress)
                metadata = encode_record(record, secrets.token_hex(16))
                added.append(CommitOperationAdd(key, metadata))
                deadline = self._client.compute_deadline()  # the upload may have taken hours
                continue
            try:
                made = self._client.commit_once(key, added, f"{job}: step {checkpoint.step}", head)
            except (errors.ChangedError, errors.UnavailableError):
                # Another commit came first, or the answer was lost.
                if time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0, _RETRY_PAUSE))
                continue
            self._check_commit(record, added, made)
            progress(CheckpointSaved(key=key, size=content.size))
            return record

    def try_save(self, job: str, *, timeout: timedelta) -> float:
        """Commit, read, overwrite and delete a file on a temporary branch."""
        key = make_write_probe_key(CheckpointKeys(job).job, secrets.token_hex(8)) + ".bin"
        hurried = HubDestination(self._client.spec.model_copy(update={"retry_timeout": timeout}))
        return hurried._measure_rate(key)

    def _measure_rate(self, key: str) -> float:
        head = self._client.read_head()
        body, other = os.urandom(SAMPLE_SIZE), os.urandom(16)
        url = self._client.make_url(key)
        with mark_read_only(), self._client.open_probe_branch(key, head) as commit:
            began = time.monotonic()
            made = commit(CommitOperationAdd(key, body))
            rate = len(body) / max(time.monotonic() - began, 1e-6)
            check_sample(url, self._client.download(key, made, SAMPLE_SIZE), body)
            made = commit(CommitOperationAdd(key, other))
            check_sample(url, self._client.download(key, made, SAMPLE_SIZE), other)
            commit(CommitOperationDelete(key))
        return rate

    def _check_commit(
        self, record: Checkpoint, added: Iterable[CommitOperationAdd], commit: str
    ) -> None:
        """List the files of a commit.

        Raises:
            CorruptError: The commit lacks a file of the checkpoint, or has it with another size.
        """
        keys = CheckpointKeys(record.job)
        sizes = {one.path_in_repo: one.upload_info.size for one in added}
        sizes |= {keys.make_part_key(part.step, part.digest): part.size for part in record.parts}
        folder = keys.make_folder_prefix(record.step)
        there = self._client.list_files(folder, commit)
        missing = [
            key for key, size in sizes.items() if key not in there or there[key].size != size
        ]
        if missing:
            raise errors.CorruptError(
                f"{self._client.make_url(folder)}: the commit of the checkpoint lacks "
                f"{format_count(len(missing), 'file')}, such as {missing[0]}. Delete the folder "
                f"{folder} in the repository, and copy the checkpoint again."
            )

    def _check_copy(self, there: Checkpoint) -> None:
        """Read all files of a committed checkpoint.

        Raises:
            CorruptError: A file is damaged.
        """
        damage = self.verify(there)
        if damage:
            folder = CheckpointKeys(there.job).make_folder_prefix(there.step)
            raise errors.CorruptError(
                f"{self._client.make_url(folder)} has a checkpoint with "
                f"{format_count(len(damage), 'damaged file')}: {next(iter(damage.values()))} "
                f"Delete the folder {folder} in the repository, and copy the checkpoint again."
            )

    def _upload_files(
        self,
        keys: CheckpointKeys,
        content: Content,
        there: dict[str, RepoFile],
        uploads: int,
        progress: Progress,
    ) -> list[CommitOperationAdd]:
        """Upload the files that the branch lacks, and return the operations of their commit.

        A file of the branch is kept if the Hub lists it with the digest of the same bytes. The
        digests of the blocks of each file are in the same commit.
        """

        def upload_file(number: int) -> list[CommitOperationAdd]:
            part, found = content.parts[number], content.read(number)
            key = keys.make_part_key(part.step, part.digest)
            if key in there and matches_bytes(there[key], found.body):
                progress(PartStored(digest=part.digest, size=part.size, sent=0))
                return []
            bodies = {key: bytes(found.body)}
            if needs_block_list(part):
                bodies[keys.make_block_list_key(part.step, part.digest)] = found.blocks
            operations = self._client.upload(key, bodies)
            progress(PartStored(digest=part.digest, size=part.size, sent=part.size))
            return operations

        wanted = {part.digest: number for number, part in enumerate(content.parts)}
        with ThreadPoolExecutor(uploads, thread_name_prefix="hub") as pool:
            return list(chain.from_iterable(pool.map(upload_file, wanted.values())))

    def _read_checkpoint(self, job: str, step: int, head: str) -> Checkpoint:
        key = CheckpointKeys(job).make_metadata_key(step)
        where = self._client.make_url(key)
        return check_metadata(
            where,
            decode_record(
                where, Checkpoint, self._client.download(key, head, Checkpoint.record_bytes)
            )[0],
            job,
            step,
        )
