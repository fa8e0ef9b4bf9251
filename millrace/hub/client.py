"""Requests to a repository of the Hugging Face Hub, with retries, and errors of Millrace."""

import os
import random
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from httpx2 import TransportError
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder

from millrace import errors
from millrace.environment import read_variable
from millrace.hub.backoff import BackoffLimit, find_pause
from millrace.hub.spec import HubSpec

T = TypeVar("T")
ProbeOperation = CommitOperationAdd | CommitOperationDelete

_MAX_ENTRIES = 200_000  # files and folders of a listing; the Hub advises 100,000 files at most
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_LONGEST_ASKED_PAUSE = 60.0  # seconds of Retry-After that are waited for
# Without rules, the Hub applies those of the repository's `.gitignore`, and huggingface_hub leaves
# out the files that they name.
_IGNORE_NOTHING = "# nothing is ignored\n"
_MAX_LONG_TRIES = 5  # transfers that each took longer than the time for retries before they failed
# hf_xet, the library that moves the bytes, names the status of an answer only in its messages.
_XET_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})")
# URL with a query in a message, and the punctuation behind it.
_QUERY = re.compile(r"(://[^\s?]*)\?\S*?([)'\"\].,:;]*)(?!\S)")
# hf_xet repeats each request five times itself, by default after pauses of up to six minutes. The
# client repeats a transfer that failed, so that these pauses only bridge short faults.
_XET_LIMITS = {"HF_XET_CLIENT_CONNECT_TIMEOUT": "10s", "HF_XET_CLIENT_RETRY_MAX_DURATION": "5s"}


def _limit_xet_pauses() -> None:
    """Set the limits of hf_xet in the environment of this process, unless they are set there.

    The session of hf_xet, which huggingface_hub makes for the first transfer, reads them. The
    library has no other way to limit them.
    """
    for name, value in _XET_LIMITS.items():
        if read_variable(name) is None:
            os.environ[name] = value


@contextmanager
def _hide_queries() -> Generator[None]:
    """Cut the queries of URLs in the messages of errors, and of their causes: they may be signed.

    A traceback shows the causes, too.
    """
    try:
        yield
    except Exception as error:
        chain: list[BaseException] = [error]
        for each in chain:
            each.args = tuple(
                _QUERY.sub(r"\1?…\2", arg) if isinstance(arg, str) else arg for arg in each.args
            )
            found = each.__cause__, each.__context__
            chain += [one for one in found if one is not None and one not in chain]
        raise


def _find_status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that caused an error; None without an answer."""
    match error:
        case LocalEntryNotFoundError():
            return None
        case HfHubHTTPError():
            return error.response.status_code
        case ConnectionError() | RuntimeError() if found := _XET_STATUS.search(str(error)):
            return int(found[1])
        case _:
            return None


def find_asked_pause(error: BaseException | None) -> float:
    """Return the seconds that the Hub asked to wait in the answer that caused an error, or 0."""
    while error is not None:
        if isinstance(error, HfHubHTTPError):
            return min(find_pause(error.response), _LONGEST_ASKED_PAUSE)
        error = error.__cause__ or error.__context__
    return 0.0


class HubClient:
    """Client of one repository. Requests are retried, unless their name says otherwise.

    Args:
        spec: Repository and token.
        is_dataset: Whether the repository is a dataset's; otherwise it is a model's.

    Attributes:
        spec: Repository and token.
    """

    def __init__(self, spec: HubSpec, *, is_dataset: bool = False) -> None:
        self.spec = spec
        self._type = "dataset" if is_dataset else "model"
        _limit_xet_pauses()
        self._api = HfApi(
            endpoint=spec.endpoint or os.environ.get("HF_ENDPOINT"),
            token=spec.token.get_secret_value() if spec.token else None,
        )

    @property
    def url(self) -> str:
        """URL of the repository and its branch."""
        prefix = "datasets/" if self._type == "dataset" else ""
        return f"hf://{prefix}{self.spec.repo}@{self.spec.revision}"

    def make_url(self, key: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{key}"

    def read_head(self) -> str:
        """Return the commit of the branch's head."""
        spec = self.spec
        info = self._call_with_retries(
            "", lambda: self._api.repo_info(spec.repo, revision=spec.revision, repo_type=self._type)
        )
        if info.sha is None:
            raise errors.UnavailableError(
                f"{self.url}: the Hub does not name the branch's commit. Try again later."
            )
        return info.sha

    def list_files(self, prefix: str, head: str) -> dict[str, RepoFile]:
        """Return the files below a prefix, by their keys."""
        entries = self.list_tree(prefix, head, recursive=True)
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def list_tree(self, prefix: str, head: str, *, recursive: bool) -> list[RepoFile | RepoFolder]:
        """Return the entries below a prefix; none if it does not exist.

        Args:
            prefix: Prefix that ends with a slash.
            head: Commit to list.
            recursive: Whether to list folders below the prefix too.

        Raises:
            CorruptError: There are more entries than a repository of the Hub can have.
        """

        def list_entries() -> list[RepoFile | RepoFolder]:
            entries = self._api.list_repo_tree(
                self.spec.repo,
                prefix.rstrip("/"),
                recursive=recursive,
                revision=head,
                repo_type=self._type,
            )
            return list(islice(entries, _MAX_ENTRIES + 1))

        try:
            found = self._call_with_retries(prefix, list_entries)
        except errors.NotFoundError:
            return []
        if len(found) > _MAX_ENTRIES:
            raise errors.CorruptError(
                f"{self.make_url(prefix)}: the Hub lists more than {_MAX_ENTRIES:,} files. The "
                "rest was not read: check the endpoint of the Hub, or use another repository."
            )
        return found

    def download_file(self, key: str, head: str, folder: Path) -> Path:
        """Download a file into a folder, and return its path. An interrupted download goes on.

        Args:
            key: Key of the file.
            head: Commit that has the file.
            folder: Folder for the file, and for the library's own files.

        Raises:
            NotFoundError: There is no such file.
        """
        return Path(self._call_with_retries(key, self._prepare_download(key, head, folder)))

    def download(self, key: str, head: str, largest: int, *, keep: bool = False) -> bytes:
        """Return the bytes of a file.

        Args:
            key: Key of the file.
            head: Commit that has the file.
            largest: Largest size in bytes.
            keep: Whether to keep the file in the cache of huggingface_hub, where libraries that use
                the cache find it without a request.

        Raises:
            NotFoundError: There is no such file.
            CorruptError: The file is larger. Nothing of it was read.
        """
        with (
            nullcontext() if keep else tempfile.TemporaryDirectory(prefix="millrace-hub-") as folder
        ):
            # The library resumes an interrupted download only into a file.
            get = self._prepare_download(key, head, folder)
            size = self._call_with_retries(key, lambda: get(dry_run=True)).file_size
            if size is None:
                raise errors.UnavailableError(
                    f"{self.make_url(key)}: the Hub does not name the file's size. Try again later."
                )
            if size > largest:
                raise errors.CorruptError(
                    f"{self.make_url(key)} has {size:,} bytes, more than the {largest:,} that are "
                    "expected."
                )
            return Path(self._call_with_retries(key, lambda: get(dry_run=False))).read_bytes()

    def _prepare_download(self, key: str, head: str, folder: Path | str | None) -> partial[Any]:
        """Return a call that downloads a file into a folder, or into the library's cache."""
        return partial(
            self._api.hf_hub_download,  # pyright: ignore[reportUnknownMemberType]
            self.spec.repo,
            key,
            revision=head,
            repo_type=self._type,
            local_dir=folder,
        )

    def upload(self, key: str, bodies: Mapping[str, bytes]) -> list[CommitOperationAdd]:
        """Upload files for a later commit, and return their operations.

        Args:
            key: Key for messages.
            bodies: Bytes of each file, by its key.

        Raises:
            MillraceError: The Hub ignores a file by its `.gitignore`.
        """
        operations = [CommitOperationAdd(each, body) for each, body in bodies.items()]
        self._call_with_retries(key, lambda: self._preupload(operations, self.spec.revision))
        return operations

    def _preupload(self, operations: Sequence[ProbeOperation], branch: str) -> None:
        """Upload the large files of a commit, and have it include all files.

        Raises:
            MillraceError: The Hub ignores a file by its `.gitignore`.
        """
        added = [one for one in operations if isinstance(one, CommitOperationAdd)]
        self._api.preupload_lfs_files(
            self.spec.repo, added, revision=branch, gitignore_content=_IGNORE_NOTHING
        )
        for one in added:
            if getattr(one, "_should_ignore", False):
                raise errors.MillraceError(
                    f"{self.make_url(one.path_in_repo)}: the Hub ignores this file. Remove the "
                    "rule from `.gitignore` in the repository, and try again."
                )

    def commit_once(
        self, key: str, operations: list[CommitOperationAdd], message: str, head: str
    ) -> str:
        """Commit files after a commit, without retries, and return the new commit.

        Args:
            key: Key for messages.
            operations: Files of the commit.
            message: Message of the commit.
            head: Commit that must be the head of the branch.

        Raises:
            ChangedError: Another commit came first.
            UnavailableError: The Hub does not answer. The commit may exist.
            MillraceError: The Hub ignores a file by its `.gitignore`.
        """

        def commit() -> str:
            self._preupload(operations, self.spec.revision)
            made = self._api.create_commit(
                self.spec.repo,
                operations,
                commit_message=message,
                revision=self.spec.revision,
                parent_commit=head,
            )
            return made.oid

        return self._call_once(key, commit)

    @contextmanager
    def open_probe_branch(self, key: str, head: str) -> Generator[Callable[[ProbeOperation], str]]:
        """Make a temporary branch, which is deleted at the end of the context.

        Args:
            key: Key for messages.
            head: Commit that the branch begins with.

        Yields:
            Function that commits an operation to the branch, and returns the commit.
        """
        repo, branch = self.spec.repo, f"probe-{secrets.token_hex(8)}"

        def commit_once(operation: ProbeOperation) -> str:
            self._preupload([operation], branch)
            made = self._api.create_commit(
                repo, [operation], commit_message="A probe", revision=branch
            )
            return made.oid

        def commit(operation: ProbeOperation) -> str:
            return self._call_with_retries(key, lambda: commit_once(operation))

        def make_branch() -> None:
            self._api.create_branch(repo, branch=branch, revision=head, exist_ok=True)

        self._call_with_retries(key, make_branch)
        try:
            yield commit
        finally:
            self._call_with_retries(key, lambda: self._api.delete_branch(repo, branch=branch))

    def compute_deadline(self) -> float:
        """Return the time by `time.monotonic` at which retries from now end."""
        return time.monotonic() + self.spec.retry_timeout.total_seconds()

    def _call_with_retries(self, key: str, call: Callable[[], T]) -> T:
        """Make a request to the Hub, with retries of transient errors and full jitter.

        The time for retries begins with the first error, as a transfer may take hours. It includes
        the retries by huggingface_hub. It begins again after a try that took longer than that time
        before its first error, up to five times.
        """
        timeout = self.spec.retry_timeout.total_seconds()
        limit, pause = BackoffLimit(timeout), _FIRST_PAUSE
        long_tries = 0
        while True:
            began = time.monotonic()
            try:
                return self._call_once(key, call, limit)
            except errors.UnavailableError as error:
                if limit.fail_try(time.monotonic()) - began > timeout:
                    long_tries += 1
                    if long_tries <= _MAX_LONG_TRIES:
                        limit.restart(time.monotonic())
                        pause = _FIRST_PAUSE
                wait = max(find_asked_pause(error), random.uniform(0, pause))
                if time.monotonic() + wait > limit.deadline:
                    raise
                time.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _call_once(self, key: str, call: Callable[[], T], limit: BackoffLimit | None = None) -> T:
        """Make a request to the Hub once, and translate its errors.

        Args:
            key: Key for messages.
            call: Function that makes the request.
            limit: Limit on the retries by huggingface_hub; by default a new one.

        Raises:
            NotFoundError, DeniedError, ChangedError: The Hub answers with such an error.
            UnavailableError: The error is transient.
            MillraceError: The request failed for another reason.
        """
        where = self.make_url(key) if key else self.url
        limit = limit or BackoffLimit(self.spec.retry_timeout.total_seconds())
        try:
            with _hide_queries(), limit.apply():
                return call()
        except EntryNotFoundError as error:
            if not isinstance(error, LocalEntryNotFoundError):  # a download could not begin
                raise errors.NotFoundError(f"There is no {where}.") from error
            raise self._translate_error(where, error.__cause__ or error) from error
        except (HfHubHTTPError, TransportError, OSError) as error:
            raise self._translate_error(where, error) from error
        except (RuntimeError, ValueError) as error:
            # Those of an upload by Git LFS wrap its error. Those of hf_xet have no cause.
            raise self._translate_error(where, error.__cause__ or error) from error

    def _translate_error(self, where: str, error: BaseException) -> errors.MillraceError:
        if (status := _find_status(error)) is not None:
            return self._translate_status(where, error, status)
        match error:
            case LocalEntryNotFoundError() | TransportError() | ConnectionError() | TimeoutError():
                return self._make_unavailable_error(where, error)
            case RuntimeError():  # of hf_xet: a task that was cancelled, or another of its faults
                return self._make_unavailable_error(where, error)
            # Errors of the disk have a number. Those of hf_xet, of the same classes, have none.
            case PermissionError() if error.errno is None:
                return self._make_denied_error(where, error)
            case FileNotFoundError() if error.errno is None:
                return errors.NotFoundError(f"There is no {where}.")
            case _:
                return errors.MillraceError(f"{where}: {errors.format_error(error)}")

    def _translate_status(
        self, where: str, error: BaseException, status: int
    ) -> errors.MillraceError:
        match status:
            case 401 | 403:
                return self._make_denied_error(where, error)
            case 404 if "/xet-write-token/" in str(error):
                return errors.NotFoundError(
                    f"{where}: this Hub does not accept uploads by Xet. Set HF_HUB_DISABLE_XET=1 "
                    "in the environment, and try again."
                )
            case 404:
                return errors.NotFoundError(f"There is no {where}, or this token may not read it.")
            case 409 | 412:
                return errors.ChangedError(f"{where}: another commit came first. Try again.")
            case _ if status == 429 or status >= 500:
                return self._make_unavailable_error(where, error)
            case _:
                return errors.MillraceError(f"{where}: {errors.format_error(error)}")

    def _make_denied_error(self, where: str, error: BaseException) -> errors.DeniedError:
        if isinstance(error, GatedRepoError):
            return errors.DeniedError(
                f"{where}: the repository is gated. Accept its conditions on its page with the "
                "account of this token, and try again once it has access."
            )
        return errors.DeniedError(
            f"{where}: the Hub refuses this token. Give a token that may write this "
            "repository, or read it if nothing is written."
        )

    def _make_unavailable_error(self, where: str, error: BaseException) -> errors.UnavailableError:
        spent = errors.UnavailableError(
            f"{where}: the Hub failed ({errors.format_error(error)}). Run it again later; nothing "
            "that was committed is lost."
        )
        spent.status = _find_status(error)
        return spent
