"""Upload of one checkpoint by several members: first a share each, then the missing files.

Each file is created once under its digest, so duplicate uploads do no harm. Two members upload as
fast as their links together, and a stalled member does not delay the others. Files of other members
are verified. A file that does not match its digest is uploaded again. It is replaced if the members
share one prefix, and otherwise created below this member's own prefix.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable

from millrace import errors
from millrace.checkpoints.contents import Content
from millrace.checkpoints.find import VerifyDepth
from millrace.progress import Event, Progress, ignore_event
from millrace.storage import Store, create, describe_difference, fetch_stored_sha256, put

_CHECK_THREADS = 2


class SharedUpload:
    """Upload of a checkpoint from the side of one member.

    Args:
        store: Store that files are uploaded to.
        content: Files of the checkpoint.
        make_key: Function that returns this member's key for a file, from the file's step and
            digest.
        reads: Store from which files of other members are read.
        uploads: Number of files that are uploaded at once.
        check: Depth of the verification of other members' files.
        on_change: Function that other threads call when the upload is complete or has failed.
        progress: Receives ``checkpoint.part`` with ``bytes`` and ``sent`` for each sent file. Calls
            come from other threads, one at a time.
    """

    def __init__(
        self,
        store: Store,
        content: Content,
        make_key: Callable[[int, str], str],
        *,
        reads: Store,
        uploads: int,
        check: VerifyDepth,
        on_change: Callable[[], None],
        progress: Progress = ignore_event,
    ) -> None:
        self._store, self._content, self._make_key = store, content, make_key
        self._reads = reads
        self._uploads, self._check, self._on_change = uploads, check, on_change
        self._progress, self._telling = progress, threading.Lock()
        self._changed = threading.Condition()
        self._numbers: dict[str, int] = {}
        for number, part in enumerate(content.parts):
            self._numbers.setdefault(part.sha256, number)
        self._mine = deque[str]()
        self._others = deque[str]()
        self._there: dict[str, str] = {}  # keys of found files by their digests
        self._unchecked = deque[str]()
        self._good: set[str] = set()
        self._sending = 0
        self._helping = False
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self.error: errors.MillraceError | None = None
        self.sent = self.checked = self.replaced = 0

    @property
    def has_begun(self) -> bool:
        """True if this member has begun to upload."""
        return bool(self._threads)

    @property
    def is_complete(self) -> bool:
        """True if every file is uploaded and verified."""
        with self._changed:
            return len(self._good) == len(self._numbers)

    def start(self, rank: int, uploaders: int) -> None:
        """Begin to upload: first this member's share, then the missing files of the others.

        Args:
            rank: Index of this member among the uploading ones, from 0.
            uploaders: Number of uploading members. A share is every ``uploaders``-th file.
        """
        digests = list(self._numbers)
        self._mine.extend(digests[rank % uploaders :: uploaders])
        mine = set(self._mine)
        # In reverse order, as the members with these shares upload the last files last.
        self._others.extend(digest for digest in reversed(digests) if digest not in mine)
        jobs = [self._upload_all] * self._uploads + [self._check_all] * _CHECK_THREADS
        for job in jobs:
            thread = threading.Thread(target=self._run, args=(job,), name="upload", daemon=True)
            self._threads.append(thread)
            thread.start()

    def note_files(self, found: Iterable[tuple[str, str]]) -> None:
        """Add files that exist in the store.

        Args:
            found: Pairs of a digest and a key.
        """
        with self._changed:
            for digest, key in found:
                if digest in self._numbers:
                    self._note_existing(digest, key)

    def stop(self) -> None:
        """Stop all threads, and wait for their end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- in other threads

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except errors.StoppedError:
            return
        except errors.MillraceError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(errors.MillraceError(f"The upload failed: {errors.format_error(error)}"))
            raise

    def _fail(self, error: errors.MillraceError) -> None:
        with self._changed:
            self.error, self._stopped = self.error or error, True
            self._changed.notify_all()
        self._on_change()

    def _is_stopped(self) -> bool:
        return self._stopped

    def _upload_all(self) -> None:
        while (digest := self._pick_upload()) is not None:
            try:
                self._upload(digest)
            finally:
                with self._changed:
                    self._sending -= 1
                    self._changed.notify_all()

    def _upload(self, digest: str) -> None:
        number = self._numbers[digest]
        key = self._make_key(self._content.parts[number].step, digest)
        body = self._content.body(number)
        try:
            create(self._store, key, body, sha256=digest, is_stopped=self._is_stopped)
        except errors.ExistsError:
            with self._changed:
                self._note_existing(digest, key)  # from another member or a lost answer
            return
        with self._changed:
            self._there[digest] = key
            self.sent += len(body)
            self._note_verified(digest)
        with self._telling:
            self._progress(
                Event("checkpoint.part", digest, {"bytes": len(body), "sent": len(body)})
            )

    def _pick_upload(self) -> str | None:
        """Return the next file of this member's share, and after its end of the others' shares."""
        with self._changed:
            while not self._stopped:
                if not self._mine and self._sending and not self._helping:
                    self._changed.wait()  # this member's link is busy
                    continue
                self._helping = not self._mine
                waiting = self._others if self._helping else self._mine
                if not waiting:
                    return None
                digest = waiting.popleft()
                if digest not in self._there:
                    self._sending += 1
                    return digest
            return None

    def _check_all(self) -> None:
        while (digest := self._pick_unchecked()) is not None:
            if digest not in self._good:
                self._check_one(digest)

    def _pick_unchecked(self) -> str | None:
        with self._changed:
            while not self._unchecked and not self._stopped:
                if len(self._good) == len(self._numbers):
                    return None
                self._changed.wait()
            return None if self._stopped else self._unchecked.popleft()

    def _check_one(self, digest: str) -> None:
        number = self._numbers[digest]
        part = self._content.parts[number]
        own, key = self._make_key(part.step, digest), self._there[digest]
        wanted = digest if self._check is VerifyDepth.DIGESTS else None
        if wanted is not None and fetch_stored_sha256(self._reads, key) == digest:
            wanted = None  # the store keeps the same digest
        damage = describe_difference(
            self._reads, key, part.size, wanted, is_stopped=self._is_stopped
        )
        if damage:
            put(self._store, own, self._content.body(number))
        with self._changed:
            self.checked += part.size
            self.replaced += bool(damage)
            self._note_verified(digest)

    def _note_existing(self, digest: str, key: str) -> None:
        if digest not in self._there:
            self._there[digest] = key
            self._unchecked.append(digest)
            self._changed.notify_all()

    def _note_verified(self, digest: str) -> None:
        self._good.add(digest)
        if len(self._good) == len(self._numbers):
            self._changed.notify_all()
            self._on_change()
