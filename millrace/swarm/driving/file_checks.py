"""Files that the driver reads itself, since a node reports that their bytes and digests differ.

This module owns which files are checked, the results, and the false alarms of each node.
"""

from collections.abc import Callable, Mapping

from millrace.swarm.catalogue import Catalogue
from millrace.swarm.driving.driver_reader import FileDigests
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.piece_checks import make_corruption_error
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.messages import VoidDigest
from millrace.swarm.progress_events import FileMismatched

_MAX_FALSE_ALARMS = 3  # reports of a node about files that are correct in the store


class FileChecks:
    """Checks of whole files by the driver.

    Args:
        state: Members and tracker of the run.
        catalogue: Files of the run.
        request: Starts to read a file, if a node still doubts it (`is_doubted`).
        is_etag_md5: Decides whether the ETag of a file's object is the MD5 of its bytes. May raise
            an error of the store.
        known: Combined digest of the segments of each file whose pieces are all known before the
            run. The driver does not read these files: nodes drop wrong pieces without it.

    Attributes:
        void: Files whose ETag is not an MD5, and that have no other digest.
    """

    def __init__(
        self,
        state: RunState,
        catalogue: Catalogue,
        request: Callable[[int], None],
        is_etag_md5: Callable[[int], bool],
        known: Mapping[int, str] | None = None,
    ) -> None:
        self._state, self._catalogue, self._request = state, catalogue, request
        self._is_etag_md5 = is_etag_md5
        self._doubters: dict[int, set[str]] = {}  # file → nodes that report a mismatch
        # file → combined digest of the segments in the store
        self._checked: dict[int, str] = dict(known or {})
        self._false_alarms: dict[str, int] = {}  # node → number of its false alarms
        self.void: set[int] = set()

    def note_mismatch(self, member: Member, number: int, combined: str) -> None:
        """Check a file whose bytes on a node do not have the digest of the file.

        After the check, the driver knows the digests of the segments. A node that reports a
        mismatch with correct segments lies or is broken, and is lost. Wrong segments are
        being replaced.

        Args:
            member: Node.
            number: File.
            combined: Combined digest of the segments on the node.
        """
        file = self._catalogue.files[number]
        if number in self.void or not file.digest:
            return
        correct = self._checked.get(number)
        if correct is None:
            if number not in self._doubters:
                self._state.report_progress(FileMismatched(origin=file.origin))
            self._doubters.setdefault(number, set()).add(member.node.id)
            self._request(number)
        elif combined == correct:
            reason = (
                f"it reports a wrong digest of {file.origin}, though its segments are those of "
                "the store: check its memory and its disk"
            )
            self._state.lose(member, reason)

    def is_doubted(self, number: int) -> bool:
        """Tell whether a living node doubts a file that was not checked yet."""
        members = self._state.members
        with self._state.news:
            return number not in self._checked and any(
                not members[name].is_lost for name in self._doubters.get(number, ())
            )

    def handle_digests(self, found: FileDigests) -> None:
        """Settle a file that the driver has read: all nodes replace the pieces that differ.

        If the file has another digest, the object is damaged, or its ETag is not an MD5. Only the
        headers of this object tell which: the run has seen those of a few objects of the store.

        Raises:
            MillraceError: The store does not tell.
        """
        state, file = self._state, self._catalogue.files[found.file]
        is_right = found.digest == file.digest
        is_void = not is_right and file.has_md5 and not self._is_etag_md5(found.file)
        with state.news:
            if not is_right and not is_void:
                state.fatal = make_corruption_error(file.origin, file.digest)
                state.news.notify_all()
                return
            if is_void:  # the store encrypts the object
                self.void.add(found.file)
                for member in state.members.list_joined():
                    member.orders.put(VoidDigest(found.file))
            self._checked[found.file] = found.combined
            doubters = self._doubters.pop(found.file, set())
            changed = state.settle(found.pieces)
            if not changed and found.file not in self.void:
                self._count_false_alarms(doubters, file.origin)
            state.news.notify_all()

    def _count_false_alarms(self, names: set[str], origin: str) -> None:
        for name in names:
            self._false_alarms[name] = self._false_alarms.get(name, 0) + 1
            if self._false_alarms[name] >= _MAX_FALSE_ALARMS:
                reason = (
                    f"it reported {_MAX_FALSE_ALARMS} files as wrong that are correct in the "
                    f"store, such as {origin}: check its memory and its disk"
                )
                self._state.lose(self._state.members[name], reason)
