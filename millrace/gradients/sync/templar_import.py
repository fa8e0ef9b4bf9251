"""Import of a Templar run: a chain of links that is made of its workers' gradients.

The windows of the Templar run become the windows 1, 2, … of a run. Each payload is checked, and
compressed again with the codec of the run. The run's own rule merges the gradients, so the weights
are those of the run, and not those of Templar: its rules clip or normalise each tensor by itself.
"""

import heapq
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from millrace import errors
from millrace.gradients.codec.gradient_object import (
    CheckedGradient,
    GradientError,
    check_gradient,
    explain_failure,
    read_untrusted_range,
)
from millrace.gradients.gather_window import GatherWindow
from millrace.gradients.merging.links import catch_up, read_link
from millrace.gradients.progress_events import GradientRefused, PayloadConverted
from millrace.gradients.settings import RunSettings
from millrace.gradients.state import WeightState
from millrace.gradients.sync.aggregator import acquire_run_lease, load_or_begin_run
from millrace.gradients.sync.gather_results import GatherOutcome
from millrace.gradients.sync.window_merge import merge_gathered
from millrace.gradients.templar.conversion import convert_payload
from millrace.gradients.templar.payload import ExpectedPayload, parse_payload
from millrace.gradients.templar.settings import TemplarImportSettings, TemplarSource
from millrace.gradients.weights import save_weights
from millrace.keys.templar import TemplarKey, TemplarKind, make_templar_key, parse_templar_key
from millrace.lease import Heartbeat
from millrace.progress import Progress, ignore_event
from millrace.schemas.chain import ChainLink, ChainStart, ExcludedWorker
from millrace.schemas.gradient import Codec, ExclusionReason, Transform
from millrace.storage import Stat, Store, head, list_objects, open_store, read_range


def import_templar_run(
    settings: TemplarImportSettings, *, progress: Progress = ignore_event
) -> Iterator[ChainLink]:
    """Make a chain of the gradients of a Templar run. After a kill, call this function again.

    Memory: the weights, the gradients of one window, and a payload with its values.

    Args:
        settings: Settings of the import.
        progress: Receives `PayloadConverted` or `GradientRefused` for each payload, and the events
            of `merge_gathered`.

    Yields:
        Link of each imported window.

    Raises:
        HeldError: Another import or an aggregator holds the run's lease.
        NotFoundError: The run has not begun, and the settings have no initial weights. Or a payload
            of the shared bucket was removed after it was listed.
        ConfigurationError: The model has parameters that Templar cannot send.
        ConflictError: The windows of the run were merged differently, with other settings, or were
            imported with another first window.
        ChainError: The chain is broken.
        DeniedError, UnavailableError, ChangedError, CorruptError: The shared bucket cannot be
            listed, or one of its payloads cannot be read. The window has no link, so another call
            continues with it.
    """
    keys, source = settings.run.chain_keys, settings.templar
    store = open_store(settings.store)
    origins = _Origins(source)
    last = source.last_window - source.first_window + 1
    with ExitStack() as stack:
        heartbeat = stack.enter_context(Heartbeat(settings.lease_timeout))
        heartbeat.keep(acquire_run_lease(store, keys, settings.lease_timeout))
        sharded, window = load_or_begin_run(settings, store, progress=progress)
        stack.callback(sharded.close)
        state = sharded.collect_state()
        applied = catch_up(store, keys, state, after=window)
        before: ChainStart | ChainLink = applied or read_link(store, keys, window)
        window = before.window if isinstance(before, ChainLink) else 0
        unsaved = applied  # an import that was killed has not saved these weights
        if isinstance(before, ChainLink):
            _check_first_window(store, settings, origins, state, before)
        while window < last:
            window += 1
            before = _import_window(store, settings, origins, state, window, before, progress)
            unsaved = before
            if window % settings.every == 0:
                save_weights(state, store, keys.job, step=before.step, window=window)
                unsaved = None
            yield before
        if unsaved is not None:
            save_weights(state, store, keys.job, step=unsaved.step, window=unsaved.window)


def _import_window(
    store: Store,
    settings: TemplarImportSettings,
    origins: "_Origins",
    state: WeightState,
    number: int,
    before: ChainStart | ChainLink,
    progress: Progress,
) -> ChainLink:
    run, began = settings.run, time.monotonic()
    window = _make_window(run, state, number, before.step, run.codec)
    found = _WindowPayloads()
    listing = origins.list_window(settings.templar.first_window + number - 1)
    for uid, error in listing.failures.items():
        found.exclude(uid, error, progress)
    for sent in listing.payloads:
        found.add(sent, window, settings, progress)
    gathered = found.finish(time.monotonic() - began)
    return merge_gathered(
        store, run, window, gathered, before, state, quorum=run.gather.quorum,
        threads=settings.threads, progress=progress,
    )  # fmt: skip


def _make_window(
    run: RunSettings, state: WeightState, number: int, base: int, codec: Codec
) -> GatherWindow:
    now = datetime.now(UTC)
    return GatherWindow(
        keys=run.gradient_keys,
        number=number,
        base=base,
        codec=codec,
        shapes={name: weight.shape for name, weight in state.weights.items()},
        opens=now,
        closes=now,
        max_norm=run.gather.max_norm,
    )


def _check_first_window(
    store: Store,
    settings: TemplarImportSettings,
    origins: "_Origins",
    state: WeightState,
    link: ChainLink,
) -> None:
    """Refuse a first window by which the newest link would be of another window of Templar.

    The payloads of that window are converted again, until one has the digest in the link. Payloads
    that cannot be read are not compared, nor are those of the DCT: their bytes depend on the
    machine.

    Raises:
        ConflictError: No payload has the digest in the link.
    """
    run, source = settings.run, settings.templar
    if Transform.DCT in (source.transform, link.codec.transform):
        return
    number = source.first_window + link.window - 1
    differs = compared = False
    with suppress(errors.MillraceError):
        base = read_link(store, run.chain_keys, link.window - 1).step
        window = _make_window(run, state, link.window, base, link.codec)
        for sent in origins.list_window(number).payloads:
            uid = _make_name(sent.uid)
            if uid not in link.taken:
                continue
            with suppress(GradientError):
                if _read_payload(sent, uid, window, settings)[0].digest == link.taken[uid].digest:
                    return
                compared = True
        differs = compared
    if differs:
        raise errors.ConflictError(
            f"Window {link.window} of {run.name} was not made of Templar's window {number}: leave "
            "`first_window` as it was, and raise `last_window` to import later windows."
        )


@dataclass(frozen=True, slots=True)
class _SentPayload:
    """Payload of a worker that is in a bucket.

    Attributes:
        uid: Number of the worker.
        window: Number of the window.
        store: Bucket with the payload.
        stat: Description of the payload.
        written: Time of the upload, by which copies are told from originals.
        is_own: Whether the bucket is the worker's own, rather than the shared one.
    """

    uid: int
    window: int
    store: Store
    stat: Stat
    written: datetime
    is_own: bool


@dataclass(frozen=True, slots=True)
class _WindowListing:
    """Payloads of a window.

    Attributes:
        payloads: Payloads that are in the buckets, the earliest upload first.
        failures: Errors of own buckets that do not say whether they have a payload, by the workers'
            numbers.
    """

    payloads: list[_SentPayload]
    failures: dict[int, GradientError]


class _Origins:
    """Buckets of the workers. Their listings may have any keys."""

    def __init__(self, source: TemplarSource) -> None:
        self._source = source
        self._shared = open_store(source.store, make_folder=False, is_foreign=True)
        self._own = {
            uid: open_store(spec, make_folder=False, is_foreign=True)
            for uid, spec in source.worker_stores.items()
        }

    def list_window(self, window: int) -> _WindowListing:
        """Return the payloads of a window. The failure of an own bucket concerns only its worker.

        Raises:
            MillraceError: The shared bucket cannot be listed.
        """
        own: list[_SentPayload] = []
        failures: dict[int, GradientError] = {}
        for uid, store in self._own.items():
            try:
                if (sent := self._find_own(uid, store, window)) is not None:
                    own.append(sent)
            except GradientError as error:
                failures[uid] = error
        listed = (
            _SentPayload(uid, window, self._shared, stat, stat.last_modified, is_own=False)
            for stat in list_objects(self._shared, f"gradient-{window}-")
            if (uid := self._parse(stat.key, window)) is not None and uid not in self._own
        )
        most = self._source.max_workers
        first = heapq.nsmallest(most, listed, key=_get_uid)  # no memory for the others
        payloads = heapq.nsmallest(most, [*own, *first], key=_get_uid)
        return _WindowListing(_order_by_upload(payloads), failures)

    def _find_own(self, uid: int, store: Store, window: int) -> _SentPayload | None:
        """Return the payload in a worker's own bucket, if there is one.

        Raises:
            GradientError: The bucket does not answer, refuses, or gives an invalid answer.
        """
        key = make_templar_key(TemplarKey(TemplarKind.GRADIENT, self._source.version, window, uid))
        try:
            stat = head(store, key)
        except errors.NotFoundError:
            return None
        except errors.MillraceError as error:
            raise GradientError(ExclusionReason.UNAVAILABLE, explain_failure(error)) from error
        return _SentPayload(uid, window, store, stat, stat.last_modified, is_own=True)

    def _parse(self, key: str, window: int) -> int | None:
        parsed = parse_templar_key(key)
        if parsed is None or parsed.kind is not TemplarKind.GRADIENT:
            return None
        if (parsed.version, parsed.window) != (self._source.version, window):
            return None
        return parsed.uid


def _order_by_upload(payloads: list[_SentPayload]) -> list[_SentPayload]:
    """Return the payloads in the order in which they count: of two equal ones, the first.

    The clock of the shared bucket is believed. The endpoint of an own bucket may be the worker's,
    and state any time, such as one before that of a copied payload. The run is over, so no earlier
    listing has seen the payload. So payloads of own buckets follow all of the shared bucket, and
    have later times.

    Own buckets are ordered by the times that they state. Names would be worse: each worker could
    copy from those with higher numbers, while most own buckets have the clock of a provider.
    """
    found: list[_SentPayload] = []
    for sent in sorted(payloads, key=lambda sent: (sent.is_own, sent.written, sent.uid)):
        least = sent.written
        if sent.is_own and found:
            least = max(least, found[-1].written + timedelta(microseconds=1))
        found.append(replace(sent, written=least))
    return found


def _get_uid(sent: _SentPayload) -> int:
    return sent.uid


def _make_name(number: int) -> str:
    return f"templar-{number}"


@dataclass(slots=True)
class _WindowPayloads:
    """Converted gradients of a window, and the reasons why workers are excluded."""

    _taken: dict[str, CheckedGradient] = field(default_factory=dict[str, CheckedGradient])
    _written: dict[str, datetime] = field(default_factory=dict[str, datetime])
    _excluded: dict[str, ExcludedWorker] = field(default_factory=dict[str, ExcludedWorker])
    _bodies: set[str] = field(default_factory=set[str])

    def add(
        self,
        sent: _SentPayload,
        window: GatherWindow,
        settings: TemplarImportSettings,
        progress: Progress,
    ) -> None:
        """Read, check and convert a payload, or exclude its worker.

        Raises:
            MillraceError: The shared bucket does not give the payload.
        """
        uid = _make_name(sent.uid)
        try:
            gradient, lost = _read_payload(sent, uid, window, settings)
            self._check_unique(gradient)
        except GradientError as error:
            self.exclude(sent.uid, error, progress)
            return
        self._taken[uid], self._written[uid] = gradient, sent.written
        progress(PayloadConverted(uid=uid, window=window.number, size=sent.stat.size, lost=lost))

    def exclude(self, number: int, error: GradientError, progress: Progress) -> None:
        """Exclude a worker with the reason of an error."""
        uid = _make_name(number)
        self._excluded[uid] = ExcludedWorker(reason=error.reason, sentence=str(error))
        progress(GradientRefused(uid=uid, reason=error.reason))

    def _check_unique(self, gradient: CheckedGradient) -> None:
        if gradient.header.body in self._bodies:
            raise GradientError(
                ExclusionReason.DUPLICATE, "Another worker had sent the same gradient before."
            )
        self._bodies.add(gradient.header.body)

    def finish(self, seconds: float) -> GatherOutcome:
        """Return the window."""
        size = sum(gradient.size for gradient in self._taken.values())
        return GatherOutcome(self._taken, self._excluded, (), size, seconds, self._written)


def _read_payload(
    sent: _SentPayload, uid: str, window: GatherWindow, settings: TemplarImportSettings
) -> tuple[CheckedGradient, float]:
    """Return the gradient of a payload, and the share that was lost.

    Raises:
        GradientError: The worker's own bucket does not give the payload, or the payload does not
            meet the conditions.
        MillraceError: The shared bucket does not give the payload.
    """
    source = settings.templar
    expected = ExpectedPayload(window.shapes, source.k, source.transform, sent.window)
    if sent.stat.size > expected.size:
        raise GradientError(
            ExclusionReason.TOO_LARGE,
            f"{sent.stat.size:,} bytes, where {expected.size:,} are the most there are.",
        )
    body = _read_body(sent)
    target = window.make_expected(uid)
    converted = convert_payload(parse_payload(body, expected), target, threads=settings.threads)
    return check_gradient(converted.body, target), converted.lost


def _read_body(sent: _SentPayload) -> bytes:
    """Read the bytes of a payload, with the retries of its bucket.

    A failure of the shared bucket is no fault of the worker. An import has no deadline, and a link
    is final. So the failure ends the import, which later continues with the same window. A failure
    of a worker's own bucket may be the worker's intention, and excludes only that worker.
    """
    if sent.is_own:
        return read_untrusted_range(sent.store, sent.stat, 0, sent.stat.size)
    return read_range(sent.store, sent.stat.key, 0, sent.stat.size, etag=sent.stat.etag)
