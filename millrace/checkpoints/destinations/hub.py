"""Repository of the Hugging Face Hub as a destination, with one commit per checkpoint.

A commit adds the files and the metadata together, under the same names as in a bucket. So `load`
reads a snapshot of the repository as a folder. A commit names its parent, and the Hub refuses the
commit if another one came first. The destination then reads the new head and tries again. The Hub
keeps files under their SHA-256, so files that it has are not uploaded again.
"""

import os
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from httpx2 import TransportError
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder

from millrace import errors
from millrace.checkpoints.contents import Content, make_content
from millrace.checkpoints.destinations.base import SAMPLE_SIZE, check_sample, mark_read_only
from millrace.checkpoints.destinations.spec import HubSpec
from millrace.checkpoints.find import VerifyDepth, check_content, check_metadata
from millrace.checkpoints.progress_events import CheckpointSaved, PartStored
from millrace.digest import compute_sha256
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.probes import make_write_probe_key
from millrace.progress import Progress, ignore_event
from millrace.records import decode_record, encode_record
from millrace.schemas.checkpoint import Checkpoint, Part
from millrace.storage import Store

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0


class HubDestination:
    """Destination in a repository of the Hub.

    Args:
        spec: Repository and token.

    Attributes:
        store: None, since the Hub is not a store.
    """

    def __init__(self, spec: HubSpec) -> None:
        self._spec = spec
        self.store: Store | None = None
        self._api = HfApi(
            endpoint=spec.endpoint or os.environ.get("HF_ENDPOINT"),
            token=spec.token.get_secret_value() if spec.token else None,
        )

    @property
    def url(self) -> str:
        """URL of the repository and its branch."""
        return f"hf://{self._spec.repo}@{self._spec.revision}"

    # -- reading

    def iterate_checkpoints(self, job: str) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints of a job, newest first."""
        head, keys = self._read_head(), CheckpointKeys(job)
        names = [
            entry.path.rpartition("/")[2]
            for entry in self._list_tree(keys.prefix, head, recursive=False)
            if isinstance(entry, RepoFolder)
        ]
        found = [step for step in map(keys.parse_folder, names) if step is not None]
        for step in sorted(found, reverse=True):
            with suppress(errors.NotFoundError, errors.CorruptError):
                yield self._read_checkpoint(job, step, head)

    def read_checkpoint(self, job: str, step: int) -> Checkpoint:
        """Return the checkpoint of a step."""
        return self._read_checkpoint(job, step, self._read_head())

    def open_content(self, checkpoint: Checkpoint) -> Content:
        """Return the content of a checkpoint."""
        head, keys = self._read_head(), CheckpointKeys(checkpoint.job)

        def read_file(number: int) -> memoryview:
            part = checkpoint.parts[number]
            key = keys.part(part.step, part.sha256)
            try:
                found = self._download(key, head, part.size)
            except errors.NotFoundError:
                raise errors.CorruptError(f"{self._make_url(key)} is missing.") from None
            if compute_sha256(found) != part.sha256:
                raise errors.CorruptError(
                    f"{self._make_url(key)} is not the bytes that were saved: verify the "
                    "checkpoint, or load an older one."
                )
            return memoryview(found)

        return make_content(checkpoint.step, checkpoint.parts, checkpoint.tensors, read_file)

    def verify(
        self, checkpoint: Checkpoint, *, check: VerifyDepth = VerifyDepth.DIGESTS
    ) -> dict[str, str]:
        """Return the damage of a checkpoint."""
        head, keys = self._read_head(), CheckpointKeys(checkpoint.job)
        there = self._list_files(keys.parts(checkpoint.step), head)
        whole = self.open_content(checkpoint)
        damage: dict[str, str] = {}
        for number, part in enumerate(checkpoint.parts):
            key = keys.part(part.step, part.sha256)
            entry = there.get(key)
            if entry is None:
                damage[part.sha256] = f"{self._make_url(key)} is missing."
            elif (entry.size, entry.lfs and entry.lfs.sha256) != (part.size, part.sha256):
                damage[part.sha256] = f"{self._make_url(key)} has other bytes than were committed."
            elif check is VerifyDepth.DIGESTS:
                try:
                    whole.body(number)
                except errors.CorruptError as error:
                    damage[part.sha256] = str(error)
        return damage

    # -- writing

    def publish(
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
        key = keys.metadata(checkpoint.step)
        record = content.make_metadata(checkpoint, job)
        added: list[CommitOperationAdd] | None = None
        deadline = self._compute_deadline()
        while True:
            head = self._read_head()
            with suppress(errors.NotFoundError):
                there = self._read_checkpoint(job, checkpoint.step, head)
                return check_content(self._make_url(key), there, content.root)
            if added is None:
                files = self._list_files(keys.parts(checkpoint.step), head)
                added = self._upload_files(keys, content, files, uploads, progress)
                metadata = encode_record(record, secrets.token_hex(16))
                added.append(CommitOperationAdd(key, metadata))
                deadline = self._compute_deadline()  # the upload may have taken hours
                continue
            try:
                self._call_once(
                    key,
                    lambda head=head, added=added: self._api.create_commit(
                        self._spec.repo,
                        added,
                        commit_message=f"{job}: step {checkpoint.step}",
                        revision=self._spec.revision,
                        parent_commit=head,
                    ),
                )
            except (errors.ChangedError, errors.UnavailableError):
                # Another commit came first, or the answer was lost.
                if time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0, _FIRST_PAUSE))
                continue
            progress(CheckpointSaved(key=key, size=content.size))
            return record

    def try_save(self, job: str, *, timeout: timedelta) -> float:
        """Commit, read, overwrite and delete a file on a temporary branch."""
        key = make_write_probe_key(CheckpointKeys(job).job, secrets.token_hex(8)) + ".bin"
        hurried = HubDestination(self._spec.model_copy(update={"retry_timeout": timeout}))
        return hurried._measure_rate(key)

    def _measure_rate(self, key: str) -> float:
        head = self._read_head()
        repo, branch = self._spec.repo, f"probe-{secrets.token_hex(8)}"

        def commit(operation: CommitOperationAdd | CommitOperationDelete) -> str:
            made = self._call_with_retries(
                key,
                lambda: self._api.create_commit(
                    repo, [operation], commit_message="A probe", revision=branch
                ),
            )
            return made.oid

        def make_branch() -> None:
            self._api.create_branch(repo, branch=branch, revision=head, exist_ok=True)

        body, other = os.urandom(SAMPLE_SIZE), os.urandom(16)
        with mark_read_only():
            self._call_with_retries(key, make_branch)
            try:
                began = time.monotonic()
                made = commit(CommitOperationAdd(key, body))
                rate = len(body) / max(time.monotonic() - began, 1e-6)
                check_sample(self._make_url(key), self._download(key, made, SAMPLE_SIZE), body)
                made = commit(CommitOperationAdd(key, other))
                check_sample(self._make_url(key), self._download(key, made, SAMPLE_SIZE), other)
                commit(CommitOperationDelete(key))
            finally:
                self._call_with_retries(key, lambda: self._api.delete_branch(repo, branch=branch))
        return rate

    # -- requests

    def _make_url(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _upload_files(
        self,
        keys: CheckpointKeys,
        content: Content,
        there: dict[str, RepoFile],
        uploads: int,
        progress: Progress,
    ) -> list[CommitOperationAdd]:
        """Upload the files that the branch lacks, and return the operations of their commit."""

        def upload_file(number: int) -> CommitOperationAdd:
            part = content.parts[number]
            key = keys.part(part.step, part.sha256)
            operation = CommitOperationAdd(key, bytes(content.body(number)))
            self._call_with_retries(
                key,
                lambda: self._api.preupload_lfs_files(
                    self._spec.repo, [operation], revision=self._spec.revision
                ),
            )
            progress(PartStored(sha256=part.sha256, size=part.size, sent=part.size))
            return operation

        def is_kept(part: Part) -> bool:
            entry = there.get(keys.part(part.step, part.sha256))
            return entry is not None and entry.lfs is not None and entry.lfs.sha256 == part.sha256

        wanted = {part.sha256: number for number, part in enumerate(content.parts)}
        numbers = [number for number in wanted.values() if not is_kept(content.parts[number])]
        with ThreadPoolExecutor(uploads, thread_name_prefix="hub") as pool:
            return list(pool.map(upload_file, numbers))

    def _read_checkpoint(self, job: str, step: int, head: str) -> Checkpoint:
        key = CheckpointKeys(job).metadata(step)
        where = self._make_url(key)
        return check_metadata(
            where,
            decode_record(where, Checkpoint, self._download(key, head, Checkpoint.record_bytes))[0],
            job,
            step,
        )

    def _read_head(self) -> str:
        """Return the commit of the branch's head."""
        spec = self._spec
        info = self._call_with_retries(
            "", lambda: self._api.repo_info(spec.repo, revision=spec.revision)
        )
        if info.sha is None:
            raise errors.UnavailableError(
                f"{self.url}: the Hub does not name the branch's commit. Try again later."
            )
        return info.sha

    def _list_files(self, prefix: str, head: str) -> dict[str, RepoFile]:
        entries = self._list_tree(prefix, head, recursive=True)
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _list_tree(self, prefix: str, head: str, *, recursive: bool) -> list[RepoFile | RepoFolder]:
        try:
            return self._call_with_retries(
                prefix,
                lambda: list(
                    self._api.list_repo_tree(
                        self._spec.repo, prefix.rstrip("/"), recursive=recursive, revision=head
                    )
                ),
            )
        except errors.NotFoundError:
            return []

    def _download(self, key: str, head: str, largest: int) -> bytes:
        with tempfile.TemporaryDirectory(prefix="millrace-hub-") as folder:
            # The library resumes an interrupted download only into a file.
            path = self._call_with_retries(
                key,
                lambda: self._api.hf_hub_download(  # pyright: ignore[reportUnknownMemberType]
                    self._spec.repo, key, revision=head, local_dir=folder
                ),
            )
            if (size := Path(path).stat().st_size) > largest:
                raise errors.CorruptError(
                    f"{self._make_url(key)} has {size:,} bytes, more than the {largest:,} that are "
                    "expected."
                )
            return Path(path).read_bytes()

    def _compute_deadline(self) -> float:
        return time.monotonic() + self._spec.retry_timeout.total_seconds()

    def _call_with_retries(self, key: str, call: Callable[[], T]) -> T:
        """Make a request to the Hub, with retries of transient errors and full jitter."""
        deadline, pause = self._compute_deadline(), _FIRST_PAUSE
        while True:
            try:
                return self._call_once(key, call)
            except errors.UnavailableError:
                wait = random.uniform(0, pause)
                if time.monotonic() + wait > deadline:
                    raise
                time.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _call_once(self, key: str, call: Callable[[], T]) -> T:
        """Make a request to the Hub once, and translate its errors.

        Raises:
            NotFoundError, DeniedError, ChangedError: The Hub answers with such an error.
            UnavailableError: The error is transient.
            MillraceError: The request failed for another reason.
        """
        where = self._make_url(key) if key else self.url
        try:
            return call()
        except EntryNotFoundError as error:
            if not isinstance(error, LocalEntryNotFoundError):  # a download could not begin
                raise errors.NotFoundError(f"There is no {where}.") from error
            raise self._translate_error(where, error.__cause__ or error) from error
        except (HfHubHTTPError, TransportError, OSError) as error:
            raise self._translate_error(where, error) from error
        except RuntimeError as error:  # the library wraps errors of uploads
            raise self._translate_error(where, error.__cause__ or error) from error

    def _translate_error(self, where: str, error: BaseException) -> errors.MillraceError:
        match error:
            case HfHubHTTPError():
                return self._translate_status(where, error)
            case TransportError() | ConnectionError() | LocalEntryNotFoundError():
                return self._make_unavailable_error(where, error)
            case _:
                return errors.MillraceError(f"{where}: {errors.format_error(error)}")

    def _translate_status(self, where: str, error: HfHubHTTPError) -> errors.MillraceError:
        match error.response.status_code:
            case 401 | 403:
                return errors.DeniedError(
                    f"{where}: the Hub refuses this token. Give a token that may write this "
                    "repository, or read it if nothing is written."
                )
            case 404:
                return errors.NotFoundError(f"There is no {where}, or this token may not read it.")
            case 409 | 412:
                return errors.ChangedError(f"{where}: another commit came first. Try again.")
            case status if status == 429 or status >= 500:
                return self._make_unavailable_error(where, error)
            case _:
                return errors.MillraceError(f"{where}: {errors.format_error(error)}")

    def _make_unavailable_error(self, where: str, error: BaseException) -> errors.UnavailableError:
        spent = errors.UnavailableError(
            f"{where}: the Hub failed ({errors.format_error(error)}). Run it again later; nothing "
            "that was committed is lost."
        )
        if isinstance(error, HfHubHTTPError):
            spent.status = error.response.status_code
        return spent
