"""Drive a run: find what is requested, start the agents, and tell them what to do.

The state lies in the parts of `millrace.swarm.driving`. This module connects them, and waits.
"""

import time
from datetime import timedelta

from millrace import errors
from millrace.progress import Event, Progress, ignore_event
from millrace.storage import open_store
from millrace.swarm.catalogue import ResolvedCatalogue, resolve_requests
from millrace.swarm.driving.agent_client import AgentClient
from millrace.swarm.driving.event_handler import EventHandler
from millrace.swarm.driving.file_audits import FileAuditor
from millrace.swarm.driving.followers import NodeFollowers
from millrace.swarm.driving.own_reads import OwnReads
from millrace.swarm.driving.quorum import Quorum
from millrace.swarm.driving.reports import PrewarmReport, ProgressRecorder, report_nodes
from millrace.swarm.driving.run_spec import (
    VOTES_NEEDED,
    RunSecrets,
    list_unproven,
    read_authorities,
    serialize_plan,
)
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.driving.stragglers import StragglerFinder
from millrace.swarm.events import EventChecker
from millrace.swarm.nodes import connect_agents
from millrace.swarm.referee import Referee
from millrace.swarm.settings import PrewarmSettings
from millrace.swarm.tracker import Tracker

_URL_TTL = timedelta(hours=24)  # that signed URLs are valid
_TICK_INTERVAL = 0.25


def prewarm(settings: PrewarmSettings, *, progress: Progress = ignore_event) -> PrewarmReport:
    """Put the same files on every node of a cluster, each byte out of the store once.

    A node that is lost, full or wrong fails by itself; the others go on. Broken off at any time,
    the next call fetches what is missing.

    Args:
        settings: What, where to, and on which nodes.
        progress: Receives `PrewarmProgressed` a few times a second, and `NodeReady`, `NodeLost`,
            `NodeAccused`, `NodeUntrusted` and `FileMismatched`.

    Raises:
        NotFoundError: An object that was requested is not there.
        ChangedError: One was replaced meanwhile: nothing of it was mixed, and it has no final name.
        CorruptError: One is not what its digest says, however often it is read.
        UnavailableError, DeniedError: The store kept failing or refusing for longer than
            ``store_timeout``.
        WorkerError: Fewer than the stated share of the nodes live; each one's reason is named.
    """
    began = time.monotonic()
    stores = {name: open_store(spec) for name, spec in settings.stores.items()}
    return _PrewarmDriver(settings, resolve_requests(settings, stores), progress, began).run()


class _PrewarmDriver:
    def __init__(
        self, settings: PrewarmSettings, found: ResolvedCatalogue, progress: Progress, began: float
    ) -> None:
        self._settings, self._progress, self._began = settings, progress, began
        self._catalogue = catalogue = found.catalogue
        self._startup = 0.0  # seconds; 0 until orders are given
        sizes, files = catalogue.list_piece_sizes(), len(catalogue.files)
        self._state = self._make_state(sizes)
        self._reads = OwnReads(
            self._state, catalogue, settings.store_timeout.total_seconds(), self._read_piece
        )
        self._audits = FileAuditor(self._state, catalogue, self._audit_file)
        sources = found.make_sources(_URL_TTL)
        self._referee = Referee(
            catalogue,
            sources,
            read_authorities(settings),
            is_open=self._reads.is_useful,
            is_doubted=self._audits.is_doubted,
            settled=self._reads.handle_digest,
            audited=self._audits.handle_audit,
            failed=self._reads.handle_failure,
            fault=self._handle_fault,
        )
        self._secrets = RunSecrets()
        members = self._state.members
        self._followers = NodeFollowers(
            self._state,
            AgentClient(self._secrets.name, EventChecker(sizes, files, members)),
            serialize_plan(settings, catalogue, sources, self._secrets.key),
            sizes,
            handle=EventHandler(
                self._state, self._reads, self._audits, files=files, began=began
            ).handle,
            list_void=lambda: self._audits.void,
        )
        self._quorum = Quorum(
            members, settings.min_node_share, settings.start_timeout.total_seconds(), began
        )
        self._stragglers = StragglerFinder(
            self._state, files, catalogue.size, settings.limits.stall_timeout.total_seconds(), began
        )
        self._recorder = ProgressRecorder(catalogue.size, began)

    def run(self) -> PrewarmReport:
        settings, followers = self._settings, self._followers
        started = time.monotonic()
        try:
            with connect_agents(settings.nodes, settings.root, followers.add) as expected:
                try:
                    self._quorum.expected = expected
                    self._wait(started)
                    seconds = time.monotonic() - self._began
                finally:
                    followers.end_runs()
        finally:
            self._referee.close()
            followers.close()
        return self._make_report(seconds)

    def _wait(self, started: float) -> None:
        """Wait until every living node is ready, or nothing more can come of it."""
        due, state = 0.0, self._state
        while True:
            with state.news:
                state.news.wait(_TICK_INTERVAL)
                if state.fatal is not None:
                    raise state.fatal
                self._tick(started, time.monotonic())
                for member, why in self._stragglers.find(time.monotonic()):
                    state.lose(member, why)
                self._quorum.check(time.monotonic())
                over = self._is_over()
                if over:
                    self._lose_incomplete()
                    self._quorum.check(time.monotonic())
                told: list[Event] = state.take_events()
                if over or time.monotonic() >= due:
                    due = time.monotonic() + _TICK_INTERVAL
                    told.append(self._recorder.record(state, time.monotonic()))
            for event in told:
                self._progress(event)
            if over:
                return

    def _tick(self, started: float, now: float) -> None:
        state = self._state
        if not self._startup and self._quorum.can_start(now):
            self._startup = now - started
            self._reads.select(list_unproven(self._catalogue), self._catalogue.list_piece_sizes())
            state.dispatch(state.tracker.begin(now))
        state.dispatch(state.tracker.tick(now))

    def _is_over(self) -> bool:
        files = len(self._catalogue.files)
        ready = all(member.has_all(files) for member in self._state.members.list_living())
        if not self._startup or not ready or self._referee.is_busy:
            return False
        return not self._quorum.awaits_latecomers(time.monotonic())

    def _lose_incomplete(self) -> None:
        """Count nodes as lost that lack what was in an archive. They have given until now."""
        for member in self._state.members:
            for number, why in sorted(member.unusable.items()):
                origin = self._catalogue.files[number].origin
                self._state.lose(member, f"{origin} was not unpacked, all else is there: {why}")

    def _make_state(self, sizes: list[int]) -> RunState:
        needs = [1] * len(sizes)
        for number in list_unproven(self._catalogue):
            needs[number] = VOTES_NEEDED
        tracker = Tracker(sizes, self._settings.limits, needs=needs)
        return RunState(tracker, sizes, self._read_piece)

    def _read_piece(self, number: int) -> None:
        self._referee.read(number)

    def _audit_file(self, number: int) -> None:
        self._referee.audit(number)

    def _handle_fault(self, error: BaseException) -> None:
        state = self._state
        with state.news:
            state.fatal = state.fatal or errors.WorkerError(errors.format_error(error))
            state.news.notify_all()

    def _make_report(self, seconds: float) -> PrewarmReport:
        catalogue, tracker = self._catalogue, self._state.tracker
        void = self._audits.void
        unverified = {n for n, file in enumerate(catalogue.files) if not file.digest or n in void}
        unconfirmed = {
            segment.file
            for number in list_unproven(catalogue)
            if not tracker.is_decided(number)
            for segment in catalogue.pieces[number]
            if segment.size
        }
        return PrewarmReport(
            files=len(catalogue.files),
            size=catalogue.size,
            unverified=len(unverified),
            unconfirmed=len(unverified & unconfirmed),
            driver_bytes=self._referee.received,
            seconds=round(seconds, 3),
            startup=round(self._startup, 3),
            nodes=report_nodes(self._state.members, set(tracker.quarantined)),
            direct=tracker.direct,
            curve=tuple(self._recorder.curve),
        )
