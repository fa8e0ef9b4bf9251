"""Upload of one checkpoint by several members: first a share each, then the missing files.

Each file is created once under its digest, so duplicate uploads do no harm. Two members upload as
fast as their links together, and a stalled member does not delay the others. Files of other members
are verified. A file that does not match its digest is uploaded again. It is replaced if the members
share one prefix, and otherwise created below this member's own prefix. If the damaged file is in a
folder and the content in a store, only the damaged blocks are read from that store again.
"""

import threading
from collections.abc import Callable, Iterable

from millrace import errors
from millrace.checkpoints.block_digests import needs_block_list, put_block_list
from millrace.checkpoints.contents import Content, PartContent
from millrace.checkpoints.find import VerifyDepth
from millrace.checkpoints.progress_events import PartStored
from millrace.checkpoints.upload_queue import UploadQueue
from millrace.keys.checkpoints import CheckpointKeys
from millrace.memory import map_anonymous
from millrace.progress import Progress, ignore_event, serialize_events
from millrace.storage import Store, create, describe_difference, hash_damaged_file, put

_CHECK_THREADS = 2


class SharedUpload:
    """Upload of a checkpoint from the side of one member.

    Args:
        store: Store that files are uploaded to.
        content: Files of the checkpoint.
        make_key: Function that returns this member's key for a file, from the file's step and
            digest.
        keys: Keys of the job, below which the digests of the files' blocks are stored; None if
            another process stores them.
        reads: Store from which files of other members are read.
        uploads: Number of files that are uploaded at once.
        check: Depth of the verification of other members' files.
        on_change: Function that other threads call when the upload is complete or has failed.
        progress: Receives `PartStored` for each sent file. Calls come from other threads, one at
            a time.
    """

    def __init__(
        self,
        store: Store,
        content: Content,
        make_key: Callable[[int, str], str],
        *,
        keys: CheckpointKeys | None,
        reads: Store,
        uploads: int,
        check: VerifyDepth,
        on_change: Callable[[], None],
        progress: Progress = ignore_event,
    ) -> None:
        self._store, self._reads = store, reads
        self._content, self._make_key, self._keys = content, make_key, keys
        self._uploads, self._check, self._on_change = uploads, check, on_change
        self._progress = serialize_events(progress)
        self._numbers: dict[str, int] = {}
        for number, part in enumerate(content.parts):
            self._numbers.setdefault(part.digest, number)
        self._queue = UploadQueue(list(self._numbers), on_change)
        self._threads: list[threading.Thread] = []
        self._counting = threading.Lock()
        self.error: errors.MillraceError | None = None
        self.sent = self.checked = self.replaced = 0

    @property
    def has_begun(self) -> bool:
        """True if this member has begun to upload."""
        return bool(self._threads)

    @property
    def is_complete(self) -> bool:
        """True if every file is uploaded and verified."""
        return self._queue.is_complete

    @property
    def advances(self) -> int:
        """Number that grows with each file that is stored or verified by any member."""
        return self._queue.advances

    def start(self, rank: int, uploaders: int) -> None:
        """Begin to upload: first this member's share, then the missing files of the others.

        Args:
            rank: Index of this member among the uploading ones, from 0.
            uploaders: Number of uploading members. A share is every ``uploaders``-th file.
        """
        self._queue.divide(rank, uploaders)
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
        self._queue.note_found(found)

    def stop(self) -> None:
        """Stop all threads, and wait for their end."""
        self._queue.stop()
        for thread in self._threads:
            thread.join()

    # -- in other threads

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except errors.StoppedError as error:
            if not self._queue.is_stopped():  # the content cannot be read any more
                self._fail(error)
        except errors.MillraceError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(errors.MillraceError(f"The upload failed: {errors.format_error(error)}"))
            raise

    def _fail(self, error: errors.MillraceError) -> None:
        with self._counting:
            self.error = self.error or error
        self._queue.stop()
        self._on_change()

    def _upload_all(self) -> None:
        while (digest := self._queue.pick_upload()) is not None:
            try:
                self._upload(digest)
            finally:
                self._queue.end_upload()

    def _upload(self, digest: str) -> None:
        number = self._numbers[digest]
        part = self._content.parts[number]
        key = self._make_key(part.step, digest)
        content = self._content.read(number)
        body = content.body
        if self._keys is not None:
            put_block_list(self._store, self._keys, part, content.blocks)
        try:
            create(self._store, key, body, is_stopped=self._queue.is_stopped)
        except errors.ExistsError:
            self._queue.note_found([(digest, key)])  # from another member or a lost answer
            return
        with self._counting:
            self.sent += len(body)
        self._queue.note_sent(digest, key)
        self._progress(PartStored(digest=digest, size=len(body), sent=len(body)))

    def _check_all(self) -> None:
        while (found := self._queue.pick_unchecked()) is not None:
            digest, key = found
            if not self._queue.is_verified(digest):
                self._check_one(digest, key)

    def _check_one(self, digest: str, key: str) -> None:
        number = self._numbers[digest]
        part = self._content.parts[number]
        own = self._make_key(part.step, digest)
        wanted = digest if self._check is VerifyDepth.DIGESTS else None
        damage = describe_difference(
            self._reads, key, part.size, wanted, is_stopped=self._queue.is_stopped
        )
        if damage:
            put(self._store, own, self._read_again(number, key).body)
        with self._counting:
            self.checked += part.size
            self.replaced += bool(damage)
        self._queue.note_verified(digest)
        if damage:
            self._progress(PartStored(digest=digest, size=part.size, sent=part.size))

    def _read_again(self, number: int, key: str) -> PartContent:
        """Return the content of a file whose copy in the store is damaged.

        The intact blocks of a copy in a folder are not read again from the content's store.
        """
        part, mend = self._content.parts[number], self._content.mend
        if mend is None or not needs_block_list(part):
            return self._content.read(number)
        body = memoryview(map_anonymous(part.size))
        blocks = hash_damaged_file(self._reads, key, body)
        return mend(number, PartContent(body, blocks)) if blocks else self._content.read(number)
