"""Training-loop API of a worker with one or more ranks."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from safetensors.numpy import load as unpack
from torch import distributed

from millrace import errors
from millrace.audit import check_access
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.ranks import RankedWeights
from millrace.gradients.codec.gradient_object import Shapes, encode_gradient
from millrace.gradients.progress_events import GradientSent
from millrace.gradients.settings import RunSettings
from millrace.gradients.state import WeightState
from millrace.gradients.sync.chain_follower import ChainFollower
from millrace.gradients.sync.change_compressor import ChangeCompressor
from millrace.gradients.sync.model_tensors import ModelTensors
from millrace.gradients.sync.worker_key import WorkerKey
from millrace.gradients.sync.worker_registration import WorkerRegistration
from millrace.gradients.weights import load_newest_weights
from millrace.progress import Progress, ignore_event
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.gradient import ExclusionReason
from millrace.storage import Right, Store, put

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingWindow:
    """Window in which a worker trains.

    Attributes:
        number: Number of the window.
        step: Step of the weights at the begin of the window.
        steps: Number of the worker's steps in the window.
    """

    number: int
    step: int
    steps: int


class Participant:
    """Worker of a run, which trains in windows and begins each window with the merged weights.

    ``for window in participant.iterate_windows(): train(model, window.steps);
    participant.submit(model); participant.receive(model)``

    Args:
        settings: Settings of the run.
        uid: Name of the worker, unique in the run.
        store: Bucket that the worker writes to.
        chain_store: Bucket of the aggregator, which has the chain. It is only read.
        weights: Weights after window ``after``, such as those of a checkpoint of the chain.
        after: Number of the window. Later links are applied.
        group: Process group of the ranks that train one model, which is sharded by FSDP2 or the
            same on all ranks. Each rank makes a participant, and calls the same methods. Each rank
            compresses some tensors and keeps their residuals. The first rank sends all of them.
        threads: Number of threads for the compression; by default one per processor.
        progress: Receives `LinkApplied` and `GradientSent`.
    """

    def __init__(
        self,
        settings: RunSettings,
        uid: str,
        store: Store,
        chain_store: Store,
        weights: WeightState | RankedWeights,
        *,
        after: int = 0,
        group: distributed.ProcessGroup | None = None,
        threads: int | None = None,
        progress: Progress = ignore_event,
    ) -> None:
        self._settings, self._uid = settings, uid
        self._store, self._chain_store = store, chain_store
        self._progress = progress
        self._ranks = ranks = RankGroup(group)
        if isinstance(weights, WeightState):
            shapes = {name: weight.shape for name, weight in weights.weights.items()}
            weights = RankedWeights(shapes, ranks, weights, threads=threads)
        self._shapes = weights.shapes
        self._chain = ChainFollower(
            settings, chain_store, weights, ranks, after=after, progress=progress
        )
        self._tensors = ModelTensors(weights, ranks, settings.codec)
        self._compressor = ChangeCompressor(
            settings, weights, ranks, self._tensors, threads=threads
        )
        self._submitted = 0
        self._packed: Sequence[bytes] | None = None  # gradient whose upload has failed
        self._has_registered = False
        self._registration: WorkerRegistration | None = None  # on the first rank

    @classmethod
    def join(
        cls,
        settings: RunSettings,
        uid: str,
        store: Store,
        chain_store: Store,
        *,
        is_named: bool = False,
        key: WorkerKey | None = None,
        group: distributed.ProcessGroup | None = None,
        threads: int | None = None,
        progress: Progress = ignore_event,
    ) -> "Participant":
        """Join a run with the weights of its chain's newest checkpoint.

        The other arguments are those of `Participant`. Each rank of a group loads only its own
        tensors. A worker that cannot send its gradients does not join: objects are created,
        described and deleted below its prefix first. If the workers of the run register, this one
        does, with ``key`` or the key in `DEFAULT_KEY_FILE`, unless ``is_named``: the settings of
        the aggregator name it. The gradients of a worker that registers are read from the next
        window on. If the aggregator removes it meanwhile, `submit` registers it again.

        Raises:
            ConfigurationError: The name is registered by another key, or is not admitted.
            DeniedError: The credentials may not write or delete below the worker's prefix.
            NotFoundError: The run has not begun.
            ChainError: The chain has no undamaged checkpoint, or is broken.
        """
        ranks = RankGroup(group)
        scope = settings.gradient_keys.make_worker_prefix(uid).rstrip("/")
        ranks.run_on_first(lambda: check_access(store, Right.WRITE, scope))

        def allocate(shapes: Shapes) -> RankedWeights:
            return RankedWeights(shapes, ranks, threads=threads)

        weights, after = load_newest_weights(
            chain_store, settings.chain_keys, allocate, ranks=ranks, progress=progress
        )
        participant = cls(
            settings,
            uid,
            store,
            chain_store,
            weights,
            after=after,
            group=group,
            threads=threads,
            progress=progress,
        )
        if settings.registration is not None and not is_named:
            participant._register(key)
        return participant

    def _register(self, key: WorkerKey | None) -> None:
        """Register the worker, on its first rank."""

        def register() -> None:
            self._registration = WorkerRegistration(
                self._settings, self._uid, self._store, self._chain_store, key
            )
            self._registration.join()

        self._ranks.run_on_first(register)
        self._has_registered = True

    def iterate_windows(self) -> Iterator[TrainingWindow]:
        """Yield the windows from the open one to the end of the run.

        Raises:
            ChainError: The chain is broken.
        """
        self.catch_up()
        last = self._settings.windows
        while last is None or self._chain.window < last:
            if self._submitted > self._chain.window:  # submitted before a restart of this worker
                self._wait()
                continue
            yield self.open_window

    @property
    def open_window(self) -> TrainingWindow:
        """Open window. After the end of the run, its number is above that of the last window."""
        return TrainingWindow(self._chain.window + 1, self._chain.link.step, self._settings.steps)

    def catch_up(self) -> None:
        """Apply all new links of the chain."""
        for link in self._chain.iterate_new_links():
            self._settle(link)

    def submit(self, model: torch.nn.Module, *, tokens: int = 0, samples: str = "") -> int:
        """Send the largest changes of the model in this window, and all buffers.

        If the gradient is not merged, its values are added to the next one, except for buffers.
        That also holds if the upload fails. Then call this method again, which uploads the same
        values, or continue with `receive`.

        Args:
            model: Model after its steps. Before them, it had the weights from `receive`.
            tokens: Number of tokens that all ranks trained on.
            samples: Digest of the samples.

        Returns:
            Number of sent bytes.

        Raises:
            ConfigurationError: A weight is not finite, or the model differs from that of the run.
            UnavailableError, DeniedError: The bucket does not answer, or refuses.
        """
        window = self._chain.window + 1
        if self._submitted != window:
            with self._compressor.feedback.restore_on_error():
                packed = self._ranks.gather_bytes(self._compressor.compress(model, window))
            self._submitted, self._packed = window, packed
        elif self._packed is None:
            raise errors.ConfigurationError(
                f"Window {window} was submitted already: apply it before the next one."
            )
        packed = self._packed
        size = self._ranks.run_on_first(lambda: self._put(packed, window, tokens, samples))
        self._packed = None
        self._progress(GradientSent(uid=self._uid, window=window, size=size))
        if self._registration is not None:
            self._registration.renew(window)
        return size

    def _put(self, packed: Sequence[bytes], window: int, tokens: int, samples: str) -> int:
        bodies = {name: body.tobytes() for one in packed for name, body in unpack(one).items()}
        body = encode_gradient(
            bodies,
            self._shapes,
            self._settings.codec,
            run=self._settings.name,
            uid=self._uid,
            window=window,
            base=self._chain.link.step,
            tokens=tokens,
            samples=samples,
        )
        put(self._store, self._settings.gradient_keys.make_gradient_key(self._uid, window), body)
        return len(body)

    def receive(self, model: torch.nn.Module, *, timeout: timedelta | None = None) -> ChainLink:
        """Wait until this window is merged, and load the merged weights into the model.

        Args:
            model: Model whose weights and buffers are overwritten.
            timeout: Longest wait; by default twice the length of the window from its opening on,
                and two hours for the opening.

        Returns:
            Newest link, whose weights the model has. It is that of a later window if more windows
            were merged meanwhile.

        Raises:
            UnavailableError: The window was not merged in time.
            ChainError: The chain is broken.
        """
        self._wait(timeout)
        self.load(model)
        assert isinstance(self._chain.link, ChainLink)
        return self._chain.link

    def load(self, model: torch.nn.Module) -> None:
        """Load the weights and buffers after the last window into the model."""
        self._tensors.load(model)

    def _wait(self, timeout: timedelta | None = None) -> None:
        """Wait until this window is merged, and apply its link."""
        self._chain.wait_for_next_link(timeout)
        self.catch_up()

    def leave(self) -> None:
        """Leave the run after the last window that this worker has sent a gradient for.

        Call it after `submit` and before `receive` of that window: then no window waits for the
        worker. After `receive`, the next window may be open already, and waits for it. A worker
        that leaves may join again, and warms up again.

        Raises:
            ConfigurationError: The worker has not registered.
            DeniedError: The credentials may not write below the worker's prefix.
        """
        if not self._has_registered:
            raise errors.ConfigurationError(
                f"{self._uid} has not registered in {self._settings.name}: the settings of the "
                "aggregator name it, and it leaves when they no longer do."
            )
        last, registration = max(self._submitted, self._chain.window), self._registration
        self._ranks.run_on_first(lambda: registration.leave(last) if registration else None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank for a checkpoint, with the residuals."""
        submitted = {"window": self._submitted}
        return {**self._compressor.feedback.state_dict(), "submitted": submitted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, with the same number of ranks.

        If a gradient of this worker was merged after the state was made, the state's values may be
        in it: then they are dropped, so that no value is sent twice.

        Raises:
            ChainError: The link of the last submitted window, or a later one, is missing.
        """
        self._compressor.feedback.load_state_dict(state)
        self._submitted = submitted = state["submitted"]["window"]
        self._packed = None
        if not submitted:
            return  # the state has no values
        for window in range(submitted, self._chain.window + 1):  # merged in the meantime
            link = self._chain.read_link(window)
            self._settle(link)
            if window > submitted and self._is_merged(link):
                return  # no value is left

    def _settle(self, link: ChainStart | ChainLink) -> None:
        """Correct the residuals by the link of the last submitted window, or of a later one.

        Add the submitted values to the residuals again, unless the link has merged them. The merged
        gradient may be that of an earlier process of this worker, which had trained in the same
        window. Then its change is merged already, and sending this one repeats it. The values of a
        gradient whose norm is too large are dropped with the rest of its change. So are those of a
        worker that warms up: they would be old, and add up, until its first merged gradient.

        In a later window, another process of this worker may have sent values of the residuals.
        """
        if not isinstance(link, ChainLink) or link.window < self._submitted:
            return
        feedback, merged = self._compressor.feedback, self._is_merged(link)
        if link.window > self._submitted:
            if merged and feedback.clear():
                log.warning(
                    "Window %d merged a gradient of %s that is newer than the loaded state: values "
                    "that were not sent are dropped, since they may be merged already.",
                    link.window,
                    self._uid,
                )
        elif self._find_exclusion(link) is ExclusionReason.WARM_UP:
            feedback.clear()
        elif self._find_exclusion(link) is ExclusionReason.NORM:
            feedback.clear()
            log.warning(
                "The gradient of %s in window %d was refused for its norm: its values and those "
                "that were not sent are dropped, as the next gradient would be refused for them "
                "too.",
                self._uid,
                link.window,
            )
        elif not merged:
            feedback.restore_sent()

    def _find_exclusion(self, link: ChainLink) -> ExclusionReason | None:
        """Return the reason why a link excludes this worker, if it does."""
        excluded = link.excluded.get(self._uid)
        return None if excluded is None else excluded.reason

    def _is_merged(self, link: ChainStart | ChainLink) -> bool:
        """Decide whether a link has merged a gradient of this worker."""
        taken = link.taken.get(self._uid) if isinstance(link, ChainLink) else None
        return taken is not None and taken.share > 0  # without a share, no update has the gradient
