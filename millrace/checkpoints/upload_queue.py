"""Files that one of several members uploads or verifies next."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence


class UploadQueue:
    """State of the files of one upload, for the threads of one member.

    Args:
        digests: Digests of the files, without repetition.
        on_complete: Function that is called when all files are verified.
    """

    def __init__(self, digests: Sequence[str], on_complete: Callable[[], None]) -> None:
        self._digests, self._known = digests, frozenset(digests)
        self._on_complete = on_complete
        self._changed = threading.Condition()
        self._own = deque[str]()
        self._others = deque[str]()
        self._found: dict[str, str] = {}  # keys of found files by their digests
        self._unchecked = deque[str]()
        self._verified: set[str] = set()
        self._sending = 0
        self._is_shared = False
        self._is_helping = False
        self._is_stopped = False

    @property
    def is_complete(self) -> bool:
        """True if every file is uploaded and verified."""
        with self._changed:
            return len(self._verified) == len(self._known)

    @property
    def advances(self) -> int:
        """Number of files that are in the store, and of those that are verified, together."""
        with self._changed:
            return len(self._found) + len(self._verified)

    def is_stopped(self) -> bool:
        """Decide whether the threads must stop."""
        return self._is_stopped

    def divide(self, rank: int, uploaders: int) -> None:
        """Divide the files into the share of this member, and those of the others.

        Args:
            rank: Index of this member among the uploading ones, from 0.
            uploaders: Number of uploading members. A share is every ``uploaders``-th file.
        """
        self._is_shared = uploaders > 1
        own = self._digests[rank % uploaders :: uploaders]
        self._own.extend(own)
        mine = set(own)
        # In reverse order, as the members with these shares upload the last files last.
        self._others.extend(digest for digest in reversed(self._digests) if digest not in mine)

    def pick_upload(self) -> str | None:
        """Return the next file of this member's share, and after its end of the others' shares.

        The files of others begin when this member sends no file of its own. Towards the end of its
        share, this member sends ever fewer files at once, so that the other members verify the
        first of them while it sends the last. The caller sends the file, and then calls
        `end_upload`.

        Returns:
            The digest; None when there is no other file, or the upload was stopped.
        """
        with self._changed:
            while not self._is_stopped:
                is_link_busy = not self._own and self._sending and not self._is_helping
                if is_link_busy or self._is_share_ending():
                    self._changed.wait()
                    continue
                self._is_helping = not self._own
                waiting = self._others if self._is_helping else self._own
                if not waiting:
                    return None
                digest = waiting.popleft()
                if digest not in self._found:
                    self._sending += 1
                    return digest
            return None

    def _is_share_ending(self) -> bool:
        """Decide whether half of the remaining files of this member's share are being sent."""
        remaining = len(self._own) + self._sending
        return self._is_shared and bool(self._own) and self._sending >= max(1, remaining // 2)

    def end_upload(self) -> None:
        """End the upload of a file that `pick_upload` returned."""
        with self._changed:
            self._sending -= 1
            self._changed.notify_all()

    def pick_unchecked(self) -> tuple[str, str] | None:
        """Wait for a file of another member, and return its digest and its key.

        Returns:
            None when all files are verified, or the upload was stopped.
        """
        with self._changed:
            while not self._is_stopped:
                if self._unchecked:
                    digest = self._unchecked.popleft()
                    return digest, self._found[digest]
                if len(self._verified) == len(self._known):
                    return None
                self._changed.wait()
            return None

    def is_verified(self, digest: str) -> bool:
        """Decide whether a file is verified."""
        return digest in self._verified

    def note_found(self, found: Iterable[tuple[str, str]]) -> None:
        """Add files that exist in the store, to be verified. Unknown digests are ignored.

        Args:
            found: Pairs of a digest and a key.
        """
        with self._changed:
            for digest, key in found:
                if digest in self._known and digest not in self._found:
                    self._found[digest] = key
                    self._unchecked.append(digest)
                    self._changed.notify_all()

    def note_sent(self, digest: str, key: str) -> None:
        """Add a file that this member has uploaded. Its store verified the bytes."""
        with self._changed:
            self._found[digest] = key
            self._add_verified(digest)

    def note_verified(self, digest: str) -> None:
        """Note that a file of another member is verified, or was uploaded again."""
        with self._changed:
            self._add_verified(digest)

    def stop(self) -> None:
        """Stop all waits and picks."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _add_verified(self, digest: str) -> None:
        self._verified.add(digest)
        if len(self._verified) == len(self._known):
            self._changed.notify_all()
            self._on_complete()
