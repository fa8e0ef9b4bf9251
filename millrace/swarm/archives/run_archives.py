"""Archives of a run: unpack each archive while it arrives, then give its folder the final name."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from millrace.errors import ArchiveError, ConfigurationError
from millrace.swarm.archives.limits import UnpackLimits
from millrace.swarm.assembler import Assembler
from millrace.swarm.catalogue import RECORDS_FOLDER, Catalogue, File
from millrace.swarm.targets import SPARE_BYTES, sync, sync_file_system

_Member = tuple[str, int, int]  # path below the folder, bytes, time in ns; both 0 for a folder


class ArchiveUnpacker:
    """Unpacks the archives of a catalogue below a root.

    Args:
        root: Folder that no file is written outside of.
        catalogue: Files of the run.
        assembler: Assembler of these files.
        limits: Limits of one archive. Its `spare` is computed for each archive.

    Attributes:
        written: Bytes that were written into members, and 1 for each member.
    """

    def __init__(
        self, root: Path, catalogue: Catalogue, assembler: Assembler, limits: UnpackLimits
    ) -> None:
        self._root, self._catalogue, self._assembler = root.resolve(), catalogue, assembler
        self._limits = limits
        self._lock = threading.Lock()  # of `written`
        self.written = 0

    def unpack(self, number: int) -> int:
        """Unpack one archive, and return when its folder has the final name.

        Returns:
            Number of dropped segments of the archive before its bytes were read. If more are
            dropped later, the folder may have wrong members: call this again.

        Raises:
            StoppedError: The run ended before.
            ConfigurationError: The folder exists, with files that Millrace did not unpack.
            ArchiveError: The archive is damaged, or a member is refused.
        """
        from millrace.swarm.archives.unpack import CONTENT_NAME, SINGLE_FILE_METHODS  # noqa: PLC0415

        assembler, file = self._assembler, self._catalogue.files[number]
        into = self._root / file.into
        name = hashlib.sha256(file.into.encode()).hexdigest()[:16]
        record = _Record(self._root / RECORDS_FOLDER / "unpacked" / name)
        if os.path.lexists(into):
            if record.is_record_of(file):
                if not assembler.count_drops(number) and record.is_whole(into):
                    assembler.wait_final(number)
                    drops = assembler.count_drops(number)  # read once: a later drop is seen later
                    if assembler.is_verified(number) or not drops:
                        return drops
                if assembler.count_drops(number):
                    record.disown()  # the folder may have wrong members, also after a kill
            record.check_replaceable(into, file)
        if not into.parent.resolve().is_relative_to(self._root):
            raise ConfigurationError(
                f"{into} leads out of {self._root} through a link. Nothing was written there: "
                "remove the link."
            )
        into.parent.mkdir(parents=True, exist_ok=True)
        half = into.parent / f".{name}.unpacking"
        old = into.parent / f".{name}.replaced"
        for left in (half, old):  # leftovers of a killed run
            _remove(left)
            assembler.note_folder(left)
        try:
            drops = self._unpack_final(number, file, half)
            made = half / CONTENT_NAME if file.unpack in SINGLE_FILE_METHODS else half
            sync_file_system(half)  # the record has no digests: its members must be on the disk
            record.prepare(file, made)
            _replace_folder(into, made, old, file, record)
            sync(into.parent.resolve())
        except BaseException:
            _remove(half)
            record.discard()
            raise
        _remove(half)
        _remove(old)
        record.discard()
        return drops

    def _unpack_final(self, number: int, file: File, half: Path) -> int:
        """Unpack an archive while it arrives, and again if a part of its bytes was replaced since.

        Returns:
            Number of dropped segments of the archive.

        Raises:
            StoppedError: The run ended before the archive had its final name.
            ArchiveError, OSError: The bytes under the final name cannot be unpacked.
        """
        while True:
            _remove(half)
            half.mkdir()
            drops = self._assembler.count_drops(number)  # read first: a later drop is seen below
            failure: ArchiveError | OSError | None = None
            try:
                self._unpack_into(number, file, half)
            except (ArchiveError, OSError) as error:
                failure = error
                _remove(half)  # others may need the space until the archive has arrived
            self._assembler.wait_final(number)  # verified
            if self._assembler.count_drops(number) != drops:
                continue
            if failure is not None:
                raise failure
            return drops

    def _unpack_into(self, number: int, file: File, half: Path) -> None:
        from millrace.swarm.archives.unpack import Unpacking, unpack  # noqa: PLC0415

        method = Unpacking(file.unpack)
        spare = SPARE_BYTES + self._assembler.count_unallocated()
        with contextlib.ExitStack() as stack:
            if method is Unpacking.ZIP:  # the directory of a zip is at its end
                self._assembler.wait_final(number)
                opened = stack.enter_context((self._root / file.path).open("rb"))
                archive = _CompleteFile(opened, partial(self._assembler.check_open, number))
            else:
                archive = self._assembler.open_sequential(number)
            unpack(
                archive,
                method,
                half,
                limits=replace(self._limits, spare=spare),
                mode=file.mode,
                owner=file.owner,
                on_written=self._count_written,
            )

    def _count_written(self, size: int) -> None:
        with self._lock:
            self.written += size


class _CompleteFile:
    """Reader of a complete archive, until the run ends.

    Args:
        opened: The archive.
        check: Called before each read; raises an error if the run has ended.
    """

    def __init__(self, opened: BinaryIO, check: Callable[[], None]) -> None:
        self._opened, self._check = opened, check

    def read(self, size: int = -1, /) -> bytes:
        self._check()
        return self._opened.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._opened.seek(offset, whence)

    def tell(self) -> int:
        return self._opened.tell()


class _Record:
    """Record of one unpacked folder or file: its origin and method, then a line for each member.

    Args:
        path: Path of the record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part, self._old = path.with_suffix(".part"), path.with_suffix(".old")

    def prepare(self, file: File, folder: Path) -> None:
        """Write a new record with all members of a folder, which `commit` makes valid."""
        self._path.parent.mkdir(exist_ok=True)
        self._old.unlink(missing_ok=True)  # of a killed run
        with self._part.open("w") as lines:
            lines.write(f"{json.dumps(_describe_source(file))}\n")
            for member in _iterate_members(folder):
                lines.write(f"{json.dumps(member)}\n")
            lines.flush()
            os.fsync(lines.fileno())

    def commit(self) -> None:
        """Make the new record valid, before the folder gets its final name."""
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(self._old)
        self._part.rename(self._path)
        sync(self._path.parent)  # the folder may be on another disk

    def roll_back(self) -> None:
        """Make the record before `commit` valid again, if there was one."""
        with contextlib.suppress(FileNotFoundError):
            self._old.rename(self._path)

    def discard(self) -> None:
        """Remove the new record that is not valid yet, and the earlier one that is no longer."""
        for path in (self._part, self._old):
            path.unlink(missing_ok=True)

    def disown(self) -> None:
        """Note that the folder has not the content of its archive. It may still be replaced."""
        with self._path.open() as lines, self._part.open("w") as rest:
            lines.readline()
            rest.write("{}\n")
            shutil.copyfileobj(lines, rest)
            rest.flush()
            os.fsync(rest.fileno())
        self._part.rename(self._path)

    def is_record_of(self, file: File) -> bool:
        """Tell whether the folder was unpacked from this content by the same method."""
        try:
            with self._path.open() as lines:
                return json.loads(lines.readline()) == _describe_source(file)
        except (FileNotFoundError, ValueError):
            return False

    def is_whole(self, folder: Path) -> bool:
        """Tell whether no recorded member was changed. Other files in the folder are allowed."""
        return all(_stat_member(folder, member[0]) == member for member in self._read_members())

    def check_replaceable(self, folder: Path, file: File, *, final: Path | None = None) -> None:
        """Check that a folder has only unchanged members.

        Args:
            folder: Folder.
            file: Archive that is unpacked instead.
            final: Final path of the folder, for the error; by default the folder.

        Raises:
            ConfigurationError: The folder has another file, or a changed one.
        """
        noted = set(self._read_members())
        other = next((m[0] for m in _iterate_members(folder) if m not in noted), None)
        if other is None:
            return
        final = final or folder
        raise ConfigurationError(
            f"{file.origin} cannot be unpacked into {final}: Millrace did not unpack "
            f"{final / other}, or it was changed since. The folder was not changed. Move it "
            "away, or unpack into another one."
        )

    def _read_members(self) -> Iterator[_Member]:
        try:
            lines = self._path.open()
        except FileNotFoundError:
            return
        with lines:
            lines.readline()
            for line in lines:
                path, size, mtime = json.loads(line)
                yield path, size, mtime


def _replace_folder(into: Path, made: Path, old: Path, file: File, record: _Record) -> None:
    """Give an unpacked folder its final name. After an error, the earlier folder has it again.

    Args:
        into: Final path of the folder.
        made: Current path of the folder.
        old: Path for the earlier folder.
        file: Archive of the folder.
        record: Prepared record of the folder.

    Raises:
        ConfigurationError: The earlier folder has files that Millrace did not unpack.
    """
    is_replaced = os.path.lexists(into)
    if is_replaced:
        record.check_replaceable(into, file)
        into.rename(old)
    try:
        if is_replaced:  # the first check may have taken minutes, in which files were added
            record.check_replaceable(old, file, final=into)
        record.commit()
        made.rename(into)
    except BaseException:
        record.roll_back()
        if is_replaced:
            old.rename(into)
        raise


def _describe_source(file: File) -> dict[str, str]:
    return {
        "into": file.into, "origin": file.origin, "etag": file.etag, "unpack": file.unpack
    }  # fmt: skip


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _iterate_members(folder: Path) -> Iterator[_Member]:
    """Yield all files and folders below a folder, without following links.

    For a file, yield the file itself.
    """
    if folder.is_symlink() or not folder.is_dir():
        yield from filter(None, [_stat_member(folder, "")])
        return
    for above, folders, files in os.walk(folder):
        below = Path(above).relative_to(folder)
        for name in (*folders, *files):
            member = _stat_member(folder, str(below / name))
            if member is not None:
                yield member


def _stat_member(folder: Path, path: str) -> _Member | None:
    try:
        found = (folder / path).lstat()
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return path, 0, 0
    return path, found.st_size, found.st_mtime_ns
