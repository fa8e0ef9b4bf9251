"""Files of weights that other tools saved, in a folder, a store or the Hugging Face Hub."""

import hashlib
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace import errors
from millrace.extras import import_extra_module
from millrace.hub.spec import HubSpec
from millrace.keys.names import find_common_prefix
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import (
    Location,
    Stat,
    Store,
    StoreSpec,
    list_folders,
    list_objects,
    open_store,
    stream,
)

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
"""Ends of the names of files of ``torch.save``."""

_FILE_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
_HUB_URL = re.compile(r"(?P<repository>hf://[^/]*/[^/]*)/(?P<path>.*)")
_MAX_FILES = 10_000  # files of a folder: a model of a terabyte in files of 100 MB has as many


@dataclass(frozen=True, slots=True)
class ImportedCheckpoint:
    """Result of an import.

    Attributes:
        checkpoint: Metadata of the new checkpoint.
        source: URL of the folder that was read; on the Hub with its commit.
        files: Names of the files that were read.
        tensors: Number of tensors, without the skeleton of the state.
    """

    checkpoint: Checkpoint
    source: str
    files: tuple[str, ...]
    tensors: int


@dataclass(frozen=True, slots=True)
class ForeignFolder:
    """Content of a folder.

    Attributes:
        files: Sizes of the files by their names.
        folders: Names of the folders in it.
    """

    files: Mapping[str, int]
    folders: tuple[str, ...]


class ForeignFiles(Protocol):
    """Files that other tools saved."""

    @property
    def url(self) -> str:
        """URL of the folder of the files."""
        ...

    def list_folder(self, prefix: str) -> ForeignFolder:
        """List a folder: the first one has an empty prefix, others one that ends with a slash."""
        ...

    def fetch(self, key: str, folder: Path) -> Path:
        """Copy a file of a listed folder into a folder of this machine, and return its path there.

        Raises:
            ChangedError: The file was written since its folder was listed.
        """
        ...

    def check_unchanged(self) -> None:
        """Check that no file that was fetched was written since its folder was listed.

        Raises:
            ChangedError: One was, so the files may be of several versions of the weights.
        """
        ...


class LocalForeignFiles:
    """Files in a folder of this machine.

    They are copied, since a process that has mapped a file dies of SIGBUS if another one cuts it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions: dict[str, tuple[int, int, int]] = {}  # of the listed files
        self._fetched: list[str] = []

    @property
    def url(self) -> str:
        """URL of the folder."""
        return self._folder.as_uri()

    def list_folder(self, prefix: str) -> ForeignFolder:
        """List a folder.

        Raises:
            DeniedError: This process may not read the folder.
        """
        folder = self._folder / prefix
        try:
            entries = sorted(folder.iterdir())
        except OSError as error:
            raise errors.DeniedError(f"{folder} cannot be read ({error.strerror}).") from error
        broken = [entry for entry in entries if entry.is_symlink() and not entry.exists()]
        if broken:
            raise errors.NotFoundError(
                f"{broken[0]} is a link to a file that does not exist: complete the folder."
            )
        files: dict[str, int] = {}
        for entry in entries:
            if entry.is_file():
                version = _find_version(entry)
                self._versions[prefix + entry.name] = version
                files[entry.name] = version[1]
        return ForeignFolder(files, tuple(entry.name for entry in entries if entry.is_dir()))

    def fetch(self, key: str, folder: Path) -> Path:
        """Copy a file into a folder.

        Raises:
            ChangedError: The file was written since its folder was listed.
            DeniedError: This process may not read the file.
            NoSpaceError: The disk of the folder is full.
        """
        source, path = self._folder / key, folder / key.rpartition("/")[2]
        with _explain_full_disk(folder, source):
            try:
                shutil.copyfile(source, path)
            except OSError as error:
                if error.errno in errors.FULL_DISK:
                    raise
                raise errors.DeniedError(f"{source} cannot be read ({error.strerror}).") from error
        self._check_version(key)
        self._fetched.append(key)
        return path

    def check_unchanged(self) -> None:
        """Check that no file that was fetched was written since its folder was listed.

        Raises:
            ChangedError: One was.
        """
        for key in self._fetched:
            self._check_version(key)

    def _check_version(self, key: str) -> None:
        source = self._folder / key
        try:
            version = _find_version(source)
        except FileNotFoundError:
            raise _make_changed_error(source) from None
        if version != self._versions[key]:
            raise _make_changed_error(source)


class StoredForeignFiles:
    """Files in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listed: dict[str, Stat] = {}
        self._fetched: list[str] = []

    @property
    def url(self) -> str:
        """URL of the store."""
        return self._store.url

    def list_folder(self, prefix: str) -> ForeignFolder:
        """List a folder."""
        files: dict[str, int] = {}
        for count, stat in enumerate(list_objects(self._store, prefix)):
            name = stat.key.removeprefix(prefix)
            if "/" not in name:
                files[name] = stat.size
                self._listed[stat.key] = stat
            if count == _MAX_FILES:
                raise errors.ConfigurationError(
                    f"{self._store.make_url(prefix)} has more than {_MAX_FILES:,} files: write the "
                    "URL of the folder with the weights."
                )
        return ForeignFolder(files, tuple(list_folders(self._store, prefix)))

    def fetch(self, key: str, folder: Path) -> Path:
        """Copy a file into a folder.

        Raises:
            ChangedError: The file was written since its folder was listed.
            NoSpaceError: The disk of the folder is full.
        """
        path, url = folder / key.rpartition("/")[2], self._store.make_url(key)
        with _explain_full_disk(folder, url), path.open("wb") as file:
            try:
                for block in stream(self._store, key, etag=self._listed[key].etag):
                    file.write(block)
            except errors.ChangedError as error:
                raise _make_changed_error(url) from error
        self._fetched.append(key)
        return path

    def check_unchanged(self) -> None:
        """Check that no file that was fetched was written since its folder was listed.

        Raises:
            ChangedError: One was.
        """
        now = {
            stat.key: stat for stat in list_objects(self._store, find_common_prefix(self._fetched))
        }
        for key in self._fetched:
            if now.get(key) != self._listed[key]:
                raise _make_changed_error(self._store.make_url(key))


class HubForeignFiles:
    """Files of a model's repository, at the commit that its branch has at first."""

    def __init__(self, spec: HubSpec, folder: str = "") -> None:
        client = import_extra_module("millrace.hub.client", "hub")
        self._client = client.HubClient(spec)
        self._head: str = self._client.read_head()
        self._digests: dict[str, str] = {}
        self._prefix = f"{folder}/" if folder else ""

    @property
    def url(self) -> str:
        """URL of the folder, with the commit."""
        folder = f"/{self._prefix}".rstrip("/")
        return f"hf://{self._client.spec.repo}@{self._head}{folder}"

    def list_folder(self, prefix: str) -> ForeignFolder:
        """List a folder."""
        files: dict[str, int] = {}
        folders: list[str] = []
        prefix = self._prefix + prefix
        for entry in self._client.list_tree(prefix, self._head, recursive=False):
            name = entry.path.removeprefix(prefix)
            if hasattr(entry, "blob_id"):  # a file
                files[name] = entry.size
                if entry.lfs is not None:
                    self._digests[entry.path] = entry.lfs.sha256
            else:
                folders.append(name)
        return ForeignFolder(files, tuple(folders))

    def fetch(self, key: str, folder: Path) -> Path:
        """Download a file into a folder, and verify the SHA-256 that the Hub lists.

        Raises:
            CorruptError: The file has another digest.
            NoSpaceError: The disk of the folder is full.
        """
        key = self._prefix + key
        with _explain_full_disk(folder, self._client.make_url(key)):
            path: Path = self._client.download_file(key, self._head, folder)
        known = self._digests.get(key)
        if known is not None:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != known:
                    raise errors.CorruptError(
                        f"{self._client.make_url(key)} has other bytes than the Hub lists: try "
                        "again."
                    )
        return path

    def check_unchanged(self) -> None:
        """Do nothing: the files of a commit stay as they are."""


def open_foreign_files(location: str | StoreSpec | HubSpec) -> tuple[ForeignFiles, str]:
    """Open a folder with files of weights, and return the name of the file that the URL names.

    Args:
        location: Path or URL of a folder or a file; ``hf://owner/name``, with ``@branch`` and
            ``/folder`` or ``/file`` behind it if wanted; or the settings of a store or a
            repository.

    Returns:
        Files, and a name that is empty if the URL names a folder.

    Raises:
        ConfigurationError: The URL is invalid, or the Hub's library is not installed.
        NotFoundError: There is no such folder or file.
    """
    if isinstance(location, HubSpec):
        return HubForeignFiles(location), ""
    if isinstance(location, str):
        if not location:
            raise errors.ConfigurationError("Name the folder, the file or the URL to import.")
        if location.startswith("hf://"):
            return _open_hub(location)
        if "://" not in location:
            return _open_local(Path(location).expanduser().absolute())
    spec = location if isinstance(location, StoreSpec) else StoreSpec(url=location)
    if spec.url.startswith(("/", "~", "file:")):
        return _open_local(Path(Location.parse(spec.url).bucket))
    store = open_store(spec, make_folder=False)
    name = store.location.prefix.rpartition("/")[2]  # without the escapes of the URL
    if not name.endswith(_FILE_SUFFIXES):
        return StoredForeignFiles(store), ""
    folder = spec.model_copy(update={"url": spec.url.rstrip("/").rpartition("/")[0]})
    return StoredForeignFiles(open_store(folder, make_folder=False)), name


def _open_local(path: Path) -> tuple[ForeignFiles, str]:
    """Open a folder or a file of this machine."""
    if path.is_dir():
        return LocalForeignFiles(path), ""
    if path.is_file():
        return LocalForeignFiles(path.parent), path.name
    raise errors.NotFoundError(f"There is no file or folder {path}. Correct the URL.")


def _open_hub(url: str) -> tuple[ForeignFiles, str]:
    """Open a repository of the Hub, a folder of it or a file."""
    found = _HUB_URL.fullmatch(url)
    spec = HubSpec.parse(found["repository"] if found else url)
    folder, name = found["path"].strip("/") if found else "", ""
    if folder.endswith(_FILE_SUFFIXES):
        folder, _, name = folder.rpartition("/")
    return HubForeignFiles(spec, folder), name


def _find_version(path: Path) -> tuple[int, int, int]:
    """Return the inode and the size of a file, and the time when it was written."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _make_changed_error(source: object) -> errors.ChangedError:
    return errors.ChangedError(
        f"{source} was written while it was imported: import it when no program writes it."
    )


@contextmanager
def _explain_full_disk(folder: Path, source: object) -> Generator[None]:
    """Raise the error of a full disk with a sentence.

    Raises:
        NoSpaceError: The disk of the folder is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in errors.FULL_DISK:
            raise
        raise errors.NoSpaceError(
            f"{source} is copied to {folder.parent} before it is imported, where "
            f"{shutil.disk_usage(folder).free:,} bytes are free. Free some, or set TMPDIR to a "
            "folder with room for all files."
        ) from error
