"""Audits of files that a node says are not what their digest says.

This module owns which files are audited, what came of it, and who raised false alarms.
"""

from collections.abc import Callable

from millrace import errors
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.messages import VoidDigest
from millrace.swarm.pieces import Catalogue
from millrace.swarm.progress_events import FileMismatched
from millrace.swarm.referee import FileAudit

_MAX_FALSE_ALARMS = 3  # times that a node may say that a file is wrong which is right


class FileAuditor:
    """Audits of whole files by the driver.

    Args:
        state: Members and tracker of the run.
        catalogue: Files of the run.
        audit: Begins to read a file, if a node doubts it (`is_doubted`).

    Attributes:
        void: Files whose ETag is no MD5, so that nothing says what they should be.
    """

    def __init__(self, state: RunState, catalogue: Catalogue, audit: Callable[[int], None]) -> None:
        self._state, self._catalogue, self._audit = state, catalogue, audit
        self._doubters: dict[int, set[str]] = {}  # file → nodes that find it wrong
        self._audited: dict[int, str] = {}  # file that was read → digest of its segments
        self._false_alarms: dict[str, int] = {}  # node → how often it found a right file wrong
        self.void: set[int] = set()

    def note_mismatch(self, member: Member, number: int, parts: str) -> None:
        """Have a file read by the driver, as a node says that its digest does not fit.

        After that, segments that are right and do not fit are a lie, or a broken machine. Others
        are on their way to be replaced.

        Args:
            member: Node.
            number: File.
            parts: Digest of the segments that the node has.
        """
        file = self._catalogue.files[number]
        if number in self.void or not file.digest:
            return
        right = self._audited.get(number)
        if right is None:
            if number not in self._doubters:
                self._state.tell(FileMismatched(origin=file.origin))
            self._doubters.setdefault(number, set()).add(member.node.id)
            self._audit(number)
        elif parts == right:
            self._state.lose(member, f"its bytes of {file.origin} are not those that the store has")

    def is_doubted(self, number: int) -> bool:
        """Tell whether a living node doubts a file that was not read yet."""
        members = self._state.members
        with self._state.news:
            return number not in self._audited and any(
                not members[name].why for name in self._doubters.get(number, ())
            )

    def handle_audit(self, audit: FileAudit) -> None:
        """Settle a file that the driver has read: what differs is replaced everywhere."""
        state, file = self._state, self._catalogue.files[audit.file]
        with state.news:
            if audit.digest != file.digest and file.sha256:
                state.fatal = _describe_corruption(file.origin, file.sha256)
                state.news.notify_all()
                return
            if audit.digest != file.digest:  # its ETag is no MD5: it was encrypted by the store
                self.void.add(audit.file)
                for member in state.members.list_joined():
                    member.orders.put(VoidDigest(audit.file))
            self._audited[audit.file] = audit.parts
            doubters = self._doubters.pop(audit.file, set())
            changed = state.settle(audit.pieces)
            if not changed and audit.file not in self.void:
                self._count_false_alarms(doubters, file.origin)
            state.news.notify_all()

    def _count_false_alarms(self, names: set[str], origin: str) -> None:
        for name in names:
            self._false_alarms[name] = self._false_alarms.get(name, 0) + 1
            if self._false_alarms[name] >= _MAX_FALSE_ALARMS:
                why = f"it finds files wrong that are right in the store, {origin} for one"
                self._state.lose(self._state.members[name], why)


def _describe_corruption(origin: str, sha256: str) -> errors.CorruptError:
    return errors.CorruptError(
        f"{origin} is not the bytes that its digest {sha256} says, also when it is "
        "read again. Upload it anew, or correct the record that has the digest. It has no "
        "final name on any node."
    )
