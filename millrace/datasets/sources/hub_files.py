"""Files of a source in a dataset of the Hugging Face Hub, at one commit.

A branch is resolved to its commit once, and the plan pins the commit. So the files cannot change,
and reads need no ETag. A file is named by the digest that the Hub has of it.
"""

import hashlib
import re
from collections.abc import Iterator, Set
from functools import cached_property
from urllib.parse import quote, unquote

from huggingface_hub import constants, get_token
from pydantic import SecretStr

from millrace import errors
from millrace.datasets.sources.files import Patterns, drop_etag
from millrace.datasets.sources.http_files import HttpFiles
from millrace.datasets.sources.table import FileTable
from millrace.environment import read_variable
from millrace.formatting import shorten_url
from millrace.hub import HubSpec
from millrace.hub.client import HubClient
from millrace.schemas.dataset import FileRef
from millrace.storage import StoreSpec
from millrace.storage.answers import READ_BLOCK_SIZE

_URL = re.compile(
    r"hf://datasets/(?P<repo>[^/@:?#]+/[^/@:?#]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_PUBLIC_HUB = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ABOUT = {".gitattributes", "README.md"}  # files about a repository, which have no samples
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HubFiles:
    """Files of a dataset's repository.

    Args:
        spec: URL ``hf://datasets/OWNER/NAME@REVISION/PATH``, where revision and path may be left
            out. `endpoint` is another address of the Hub. `options` may have a `token`.
        committed: URL of these files at the commit that a plan pins; empty if there is no plan.

    Raises:
        ConfigurationError: The URL has another form.
    """

    unseekable: Set[str] = frozenset()
    is_local = False

    def __init__(self, spec: StoreSpec, committed: str = "") -> None:
        found, before = _URL.fullmatch(spec.url), _URL.fullmatch(committed)
        if found is None:
            raise errors.ConfigurationError(
                f"{shorten_url(spec.url)!r} names no dataset of the Hub: write "
                "hf://datasets/OWNER/NAME, hf://datasets/OWNER/NAME@REVISION, or one of these with "
                "/PATH of a folder."
            )
        self._repo, self._prefix = found["repo"], (found["path"] or "").strip("/")
        revision = unquote(found["revision"] or "main")
        if before and before["repo"] == self._repo and not _COMMIT.fullmatch(revision):
            revision = before["revision"] or revision
        option = spec.options.get("token")
        token = option or (SecretStr(found_token) if (found_token := get_token()) else None)
        self._endpoint = (
            spec.endpoint or read_variable("HF_ENDPOINT") or constants.ENDPOINT
        ).rstrip("/")
        hub = HubSpec(
            repo=self._repo, revision=revision, token=token, endpoint=self._endpoint,
            retry_timeout=spec.retry_timeout,
        )  # fmt: skip
        self._hub, self._client = hub, HubClient(hub, is_dataset=True)
        self._revision = revision
        self._spec = spec
        self._headers = {"Authorization": f"Bearer {token.get_secret_value()}"} if token else {}

    @cached_property
    def _commit(self) -> str:
        if _COMMIT.fullmatch(self._revision):
            return self._revision
        return self._client.read_head()

    @property
    def is_whole_dataset(self) -> bool:
        """True if the files may be anywhere in the repository."""
        return not self._prefix

    @property
    def committed_spec(self) -> HubSpec:
        """Repository at its commit. One request if the revision is a branch."""
        return self._hub.model_copy(update={"revision": self._commit})

    def check_commit(self) -> None:
        """Check that the repository still has the commit.

        Raises:
            ChangedError: The commit is gone.
            NotFoundError: There is no such repository or branch, or the token may not read it.
            DeniedError: The Hub refuses the token.
        """
        check_commit(self.committed_spec)

    @cached_property
    def _http(self) -> HttpFiles:
        url = f"{self._endpoint}/datasets/{self._repo}/resolve/{self._commit}/{quote(self._prefix)}"
        spec = StoreSpec.model_validate(
            {
                "url": url.rstrip("/"),
                "options": self._headers,
                "ca_file": self._spec.ca_file,
                "retry_timeout": self._spec.retry_timeout,
            }
        )
        # A mirror of the Hub may be in a private network. The public Hub leads to no such address.
        return HttpFiles(spec, (), allow_private=self._endpoint != _PUBLIC_HUB)

    @property
    def url(self) -> str:
        """URL of the files at their commit. One request if the revision is a branch."""
        path = f"/{self._prefix}" if self._prefix else ""
        return f"hf://datasets/{self._repo}@{self._commit}{path}"

    def make_url(self, path: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{path}"

    def collect(self, patterns: Patterns) -> FileTable:
        """List the files of the commit that match patterns, except those about the repository.

        Raises:
            NotFoundError: There is no such repository, or the token may not read it.
        """
        return FileTable.collect(
            (path, size, etag)
            for path, (size, etag) in self._listing.items()
            if path not in _ABOUT and patterns.matches(path)
        )

    def find(self, path: str) -> FileRef | None:
        """Describe a file of the commit; None if there is none. The files are listed once."""
        found = self._listing.get(path)
        return FileRef(path=path, size=found[0], etag=found[1]) if found else None

    @cached_property
    def _listing(self) -> dict[str, tuple[int, str]]:
        """Size and digest of each file of the commit."""
        prefix = f"{self._prefix}/" if self._prefix else ""
        found = self._client.list_files(prefix, self._commit)
        if not found:
            self.check_commit()
        return {
            path.removeprefix(prefix): (file.size, file.lfs.sha256 if file.lfs else file.blob_id)
            for path, file in found.items()
        }

    def read(self, file: FileRef) -> bytes:
        """Return the content of a file. A file that the Hub keeps by Git LFS is verified.

        Raises:
            CorruptError: The bytes do not have the digest that the Hub has of them.
        """
        data = b"".join(self.iterate_blocks(file, 0, file.size))
        if _SHA256.fullmatch(file.etag) and hashlib.sha256(data).hexdigest() != file.etag:
            raise errors.CorruptError(
                f"{self.make_url(file.path)} does not have the SHA-256 that the Hub lists. Read it "
                "again later, or leave it out with `exclude`."
            )
        return data

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of a file between two offsets. A cut answer is continued.

        Raises:
            ChangedError: The file or the commit is gone, or the file has another size.
            DeniedError: The Hub refuses the token.
            UnavailableError: The Hub does not answer.
        """
        try:
            yield from self._http.iterate_blocks(drop_etag(file), start, end, block=block)
        except (errors.ChangedError, errors.DeniedError):
            self.check_commit()  # says more
            raise


def check_commit(spec: HubSpec) -> None:
    """Check that the repository of a dataset has a commit.

    Args:
        spec: Repository at its commit.

    Raises:
        ChangedError: The commit is gone.
        DeniedError: The Hub refuses the token.
        UnavailableError: The Hub does not answer.
    """
    try:
        HubClient(spec, is_dataset=True).read_head()
    except errors.NotFoundError as error:
        raise errors.ChangedError(
            f"hf://datasets/{spec.repo}@{spec.revision} is gone: the commit was removed from the "
            "history of the repository, or this token may not read it. The source of the plan "
            "cannot be read again. Shard the present commit under another dataset name."
        ) from error
