"""Drive a run: look up the requested objects, start the agents, and send orders to them.

The parts in `millrace.swarm.driving` own the state. This module connects them, and waits.
"""

import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

from millrace import errors
from millrace.progress import Progress, ignore_event
from millrace.storage import open_store
from millrace.swarm.driving.agent_client import AgentClient
from millrace.swarm.driving.driver_reader import DriverReader
from millrace.swarm.driving.event_handler import EventHandler
from millrace.swarm.driving.file_checks import FileChecks
from millrace.swarm.driving.followers import NodeFollowers
from millrace.swarm.driving.known_digests import KnownDigests, find_known_digests
from millrace.swarm.driving.piece_checks import PieceChecks
from millrace.swarm.driving.quorum import Quorum
from millrace.swarm.driving.reports import PrewarmReport, ProgressRecorder, report_nodes
from millrace.swarm.driving.run_setup import (
    VOTES_NEEDED,
    RunSecrets,
    encode_run_spec,
    make_run_spec,
)
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.driving.stragglers import StragglerFinder
from millrace.swarm.event_checker import EventChecker
from millrace.swarm.mirrors import find_mirrors
from millrace.swarm.nodes import connect_agents
from millrace.swarm.piece_readers import begins_at_mirror
from millrace.swarm.resolving import ResolvedCatalogue, resolve_requests
from millrace.swarm.settings import PrewarmSettings
from millrace.swarm.tracker import Tracker

_URL_TTL = timedelta(hours=24)  # validity of signed URLs
_TICK_INTERVAL = 0.25


def prewarm(settings: PrewarmSettings, *, progress: Progress = ignore_event) -> PrewarmReport:
    """Put the same files on every node of a cluster, reading each byte from the store once.

    An object of which nothing has a digest is read twice, by two nodes, which must agree. A node
    that is lost, full or wrong does not affect the others. After a run that was stopped, the next
    run fetches only the missing pieces.

    Args:
        settings: Files, their destination, and the nodes.
        progress: Receives `PrewarmProgressed` a few times a second, and `NodeReady`, `NodeLost`,
            `NodeAccused`, `NodeMisread`, `NodeUntrusted` and `FileMismatched`.

    Raises:
        NotFoundError: A requested object does not exist.
        ChangedError: An object was replaced during the run. No node has a file with bytes of both.
        CorruptError: The bytes of an object do not have its digest, also when they are read again.
        UnavailableError, DeniedError: The store kept failing or refusing for longer than
            ``store_timeout``.
        WorkerError: Fewer nodes live than ``min_node_share`` requires. The error has the reason of
            each lost node.
    """
    began = time.monotonic()
    stores = {name: open_store(spec) for name, spec in settings.stores.items()}
    resolved = resolve_requests(settings, stores)
    known = find_known_digests(resolved)
    mirrors = find_mirrors(settings.mirrors, stores, resolved, _URL_TTL)
    return _PrewarmDriver(settings, resolved, known, mirrors, progress, began).run()


class _PrewarmDriver:
    def __init__(
        self,
        settings: PrewarmSettings,
        resolved: ResolvedCatalogue,
        known: KnownDigests,
        mirrors: Mapping[int, list[str]],
        progress: Progress,
        began: float,
    ) -> None:
        self._settings, self._progress, self._began = settings, progress, began
        self._catalogue = catalogue = resolved.catalogue
        self._known = known
        self._startup = 0.0  # seconds; 0 until the first order
        sizes, file_count = catalogue.list_piece_sizes(), len(catalogue.files)
        self._state = self._make_state(sizes, mirrors)
        self._piece_checks = PieceChecks(
            self._state, catalogue, settings.store_timeout.total_seconds(), self._request_piece
        )
        self._file_checks = FileChecks(
            self._state,
            catalogue,
            self._request_file,
            is_etag_md5=resolved.is_etag_md5,
            known=known.files,
        )
        secrets = RunSecrets()
        sources = resolved.make_sources(_URL_TTL)
        spec = make_run_spec(settings, catalogue, sources, secrets.key, mirrors)
        encoded = encode_run_spec(spec)
        self._reader = DriverReader(
            catalogue,
            spec.sources,
            spec.ca,
            mirrors=spec.mirrors,
            pieces=self._piece_checks,
            files=self._file_checks,
            on_fault=self._handle_fault,
        )
        members = self._state.members
        handler = EventHandler(
            self._state, self._piece_checks, self._file_checks, file_count=file_count, began=began
        )
        self._followers = NodeFollowers(
            self._state,
            AgentClient(secrets.name, EventChecker(sizes, file_count, members, known.pieces)),
            encoded,
            sizes,
            on_event=handler.handle,
            list_void=lambda: self._file_checks.void,
        )
        self._quorum = Quorum(
            members, settings.min_node_share, settings.start_timeout.total_seconds(), began
        )
        self._stragglers = StragglerFinder(
            self._state,
            file_count,
            catalogue.size,
            settings.limits.stall_timeout.total_seconds(),
            began,
        )
        self._recorder = ProgressRecorder(catalogue.size, began)

    def run(self) -> PrewarmReport:
        """Run until every living node is ready, and return the report."""
        settings, followers = self._settings, self._followers
        connecting_since = time.monotonic()
        try:
            with connect_agents(settings.nodes, settings.root, followers.add) as node_count:
                try:
                    self._quorum.node_count = node_count
                    self._wait(connecting_since)
                    seconds = time.monotonic() - self._began
                finally:
                    followers.end_runs()
        finally:
            self._reader.close()
            followers.close()
        return self._make_report(seconds)

    def _wait(self, connecting_since: float) -> None:
        """Wait until every living node has all files that it can get."""
        due, state = 0.0, self._state
        while True:
            with state.news:
                state.news.wait(_TICK_INTERVAL)
                if state.fatal is not None:
                    raise state.fatal
                if not self._startup and self._quorum.can_start(time.monotonic()):
                    self._start(connecting_since, time.monotonic())
                state.dispatch(state.tracker.tick(time.monotonic()))
                for member, reason in self._stragglers.find(time.monotonic()):
                    state.lose(member, reason)
                self._quorum.check(time.monotonic())
                over = self._is_over()
                if over:
                    self._lose_incomplete()
                    self._quorum.check(time.monotonic(), is_last=True)
                events = state.take_progress_events()
                if over or time.monotonic() >= due:
                    due = time.monotonic() + _TICK_INTERVAL
                    events.append(self._recorder.record(state, time.monotonic()))
            for event in events:
                self._progress(event)
            if over:
                return

    def _start(self, connecting_since: float, now: float) -> None:
        """Give the first orders, and request the sample of pieces that the driver reads."""
        self._startup = now - connecting_since
        catalogue, state = self._catalogue, self._state
        self._piece_checks.request_sample(
            catalogue.list_unproven_pieces(), catalogue.list_piece_sizes()
        )
        state.dispatch(state.tracker.begin(now))

    def _is_over(self) -> bool:
        finished = self._state.has_finished(len(self._catalogue.files))
        if not self._startup or not finished or self._reader.is_busy:
            return False
        return not self._quorum.awaits_latecomers(time.monotonic())

    def _lose_incomplete(self) -> None:
        """Mark nodes as lost that could not unpack an archive.

        Until the end of the run, these nodes send pieces to other nodes.
        """
        for member in self._state.members:
            for file, reason in sorted(member.unusable.items()):
                origin = self._catalogue.files[file].origin
                self._state.lose(
                    member, f"{origin} was not unpacked, and all other files are ready: {reason}"
                )

    def _make_state(self, sizes: list[int], mirrors: Mapping[int, list[str]]) -> RunState:
        needs = [1] * len(sizes)
        for piece in self._catalogue.list_unproven_pieces():
            needs[piece] = VOTES_NEEDED
        tracker = Tracker(
            sizes, self._settings.limits, votes_needed=needs, known_digests=self._known.pieces
        )
        is_at_mirror = partial(begins_at_mirror, self._catalogue, mirrors)
        return RunState(tracker, self._request_piece, is_at_mirror)

    # The reader is made after the parts that request reads.
    def _request_piece(self, piece: int) -> None:
        self._reader.request_piece(piece)

    def _request_file(self, file: int) -> None:
        self._reader.request_file(file)

    def _handle_fault(self, error: BaseException) -> None:
        state = self._state
        with state.news:
            if not isinstance(error, errors.MillraceError):
                error = errors.WorkerError(errors.format_error(error))
            state.fatal = state.fatal or error
            state.news.notify_all()

    def _make_report(self, seconds: float) -> PrewarmReport:
        catalogue, tracker = self._catalogue, self._state.tracker
        void = self._file_checks.void
        unverified = {n for n, file in enumerate(catalogue.files) if not file.digest or n in void}
        unconfirmed = {
            segment.file
            for piece in catalogue.list_unproven_pieces()
            if not tracker.is_decided(piece)
            for segment in catalogue.pieces[piece]
            if segment.size
        }
        return PrewarmReport(
            files=len(catalogue.files),
            size=catalogue.size,
            unverified=len(unverified),
            unconfirmed=len(unverified & unconfirmed),
            driver_bytes=self._reader.received,
            seconds=round(seconds, 3),
            startup=round(self._startup, 3),
            nodes=report_nodes(self._state.members, set(tracker.untrusted_nodes)),
            direct=tracker.direct_reads_reason,
            curve=tuple(self._recorder.curve),
            refused=self._known.refused,
        )
