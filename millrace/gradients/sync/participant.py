"""Training-loop API of a worker with one or more ranks."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch
from safetensors.numpy import load as unpack
from safetensors.numpy import save as pack
from torch import distributed

from millrace import errors
from millrace.checkpoints.tensor_shards import is_distributed
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.sharded_weights import ShardedWeights, divide_tensors
from millrace.gradients.backends.weight_shard import WeightShard
from millrace.gradients.codec.compress import ErrorFeedback, GradientEncoder
from millrace.gradients.codec.payload import Shapes, compute_identity, encode_payload
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.settings import RunSettings, WindowOpening
from millrace.gradients.state import WeightState, copy_state
from millrace.gradients.sync.chain import find_newest_window, read_link, read_link_after
from millrace.gradients.weights import load_newest_weights
from millrace.progress import Event, Progress, ignore_event
from millrace.records import fetch
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.gradient import BUFFER_NAMES, Codec
from millrace.storage import Store, exists, put

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


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


class RankedWeights(ShardedWeights):
    """Weights of a run, with some tensors on each rank of a worker.

    Args:
        shapes: Shapes of all tensors by their names.
        ranks: Group of the worker's ranks.
        state: All weights, of which this rank keeps some; by default none until they are loaded.
        threads: Number of threads; by default one per processor.
    """

    def __init__(
        self,
        shapes: Shapes,
        ranks: RankGroup,
        state: WeightState | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        super().__init__(shapes, ())
        names = divide_tensors(shapes, [(name,) for name in sorted(shapes)], ranks.world)
        self.owners = {name: rank for rank, some in enumerate(names) for name in some}
        mine = [name for name, owner in self.owners.items() if owner == ranks.rank]
        self._shard = WeightShard(mine, state and _select_state(state, mine), threads=threads)
        self._ranks = ranks

    def _call_all(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        return self._ranks.gather_results(partial(method, self._shard, *args, **kwargs))

    @property
    def held(self) -> WeightState:
        """Weights of this rank."""
        return self._shard.get_state()


def _select_state(state: WeightState, names: Sequence[str]) -> WeightState:
    kinds = (state.weights, state.moments)
    return WeightState(*({name: kind[name] for name in names if name in kind} for kind in kinds))


class Participant:
    """Worker of a run, which trains in windows and begins each window with the merged weights.

    ``for window in participant.iterate_windows(): train(model, window.steps);
    participant.submit(model); participant.apply(model)``

    Args:
        settings: Settings of the run.
        uid: Name of the worker, unique in the run.
        store: Bucket that the worker writes to.
        aggregator: Bucket of the chain, which is only read.
        weights: Weights after window ``after``, such as those of a checkpoint of the chain.
        after: Number of the window. Later links are applied.
        group: Process group of the ranks that train one model, which is sharded by FSDP2 or the
            same on all ranks. Each rank makes a participant, and calls the same methods. Each rank
            compresses some tensors and keeps their residuals. The first rank sends all of them.
        threads: Number of threads for the compression; by default one per processor.
        progress: Receives ``chain.applied`` and ``gradient.sent`` with ``window`` and ``bytes``.
    """

    def __init__(
        self,
        settings: RunSettings,
        uid: str,
        store: Store,
        aggregator: Store,
        weights: WeightState | RankedWeights,
        *,
        after: int = 0,
        group: distributed.ProcessGroup | None = None,
        threads: int | None = None,
        progress: Progress = ignore_event,
    ) -> None:
        self._settings, self._uid, self._store = settings, uid, store
        self._aggregator, self._progress, self._number = aggregator, progress, after
        self._ranks = ranks = RankGroup(group)
        if isinstance(weights, WeightState):
            shapes = {name: weight.shape for name, weight in weights.weights.items()}
            weights = RankedWeights(shapes, ranks, weights, threads=threads)
        self._model = weights
        self._before = ranks.run_on_each(lambda: read_link(aggregator, settings.chain, after))
        self._feedback = ErrorFeedback(settings.codec, decay=settings.decay, threads=threads)
        self._threads, self._warned = threads, False
        self._submitted, self._sha256 = 0, ""

    @classmethod
    def join(
        cls,
        settings: RunSettings,
        uid: str,
        store: Store,
        aggregator: Store,
        *,
        group: distributed.ProcessGroup | None = None,
        threads: int | None = None,
        progress: Progress = ignore_event,
    ) -> "Participant":
        """Join a run with the weights of its chain's newest checkpoint.

        The arguments are those of `Participant`. Each rank of a group loads only its own tensors.

        Raises:
            NotFoundError: The run has not begun.
            ChainError: The chain has no undamaged checkpoint, or is broken.
        """
        ranks = RankGroup(group)

        def allocate(shapes: Shapes) -> RankedWeights:
            return RankedWeights(shapes, ranks, threads=threads)

        weights, after = load_newest_weights(
            aggregator, settings.chain, allocate, ranks=ranks, progress=progress
        )
        return cls(
            settings,
            uid,
            store,
            aggregator,
            weights,
            after=after,
            group=group,
            threads=threads,
            progress=progress,
        )

    def iterate_windows(self) -> Iterator[TrainingWindow]:
        """Yield the windows from the open one to the end of the run.

        Raises:
            ChainError: The chain is broken.
        """
        self.catch_up()
        last = self._settings.windows
        while last is None or self._number < last:
            if self._submitted > self._number:  # submitted before a restart of this worker
                self._wait()
                continue
            yield self.turn

    @property
    def turn(self) -> TrainingWindow:
        """Open window. After the end of the run, its number is above that of the last window."""
        return TrainingWindow(self._number + 1, self._before.step, self._settings.steps)

    def catch_up(self) -> None:
        """Apply all new links of the chain."""
        last = self._ranks.run_on_first(
            lambda: find_newest_window(self._aggregator, self._settings.chain)
        )
        for number in range(self._number + 1, last + 1):
            self._advance(number)

    def submit(self, model: torch.nn.Module, *, tokens: int = 0, samples: str = "") -> int:
        """Send the largest changes of the model in this window, and all buffers.

        If the gradient is not merged, its values are added to the next one, except for buffers.

        Args:
            model: Model after its steps. Before them, it had the weights from `apply`.
            tokens: Number of tokens that all ranks trained on.
            samples: Digest of the samples.

        Returns:
            Number of sent bytes.

        Raises:
            ConfigurationError: A weight is not finite, or the model differs from that of the run.
            UnavailableError, DeniedError: The bucket does not answer, or refuses.
        """
        number = self._number + 1
        if self._submitted == number:
            raise errors.ConfigurationError(
                f"Window {number} was submitted already: apply it before the next one."
            )
        with self._feedback.restore_on_error():
            brought = self._ranks.gather_bytes(self._compress(model, number))
            sent = self._ranks.run_on_first(lambda: self._put(brought, number, tokens, samples))
        size, digest = sent
        self._submitted, self._sha256 = number, digest
        self._progress(Event("gradient.sent", self._uid, {"window": number, "bytes": size}))
        return size

    def _compress(self, model: torch.nn.Module, number: int) -> bytes:
        """Compress this rank's tensors of the gradient, and pack them."""
        mask = Mask(self._settings.run, number)
        bodies: dict[str, Any] = {}
        failed: list[Exception] = []
        for name, weight in self._ranks.run_on_each(lambda: self._select_weights(model)).items():
            whole = _gather_tensor(weight)  # a collective: also called after a failure
            if name in self._model.held.weights and not failed:
                try:
                    if self._settings.codec.is_buffer(name):
                        body = self._encode_buffer(name, whole)
                    else:
                        body = self._feedback.compress(
                            name, self._compute_change(name, whole), mask
                        )
                    bodies[name] = np.frombuffer(body, np.uint8)
                except Exception as error:  # noqa: BLE001 - raised after the collectives
                    failed.append(error)

        def end() -> bytes:
            if failed:
                raise failed.pop()  # `failed` must not keep the traceback alive
            return pack(bodies)

        return self._ranks.run_on_each(end)

    def _encode_buffer(self, name: str, buffer: torch.Tensor) -> bytes:
        """Compress the values of a buffer."""
        values = buffer.cpu().float()
        if not torch.isfinite(values).all():
            raise errors.ConfigurationError(
                f"The buffer {name} has values that are not finite: leave this window out."
            )
        return GradientEncoder(self._settings.codec.for_tensor(name), self._threads).encode(values)

    def _compute_change(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        whole = torch.from_numpy(self._model.held.weights[name])  # pyright: ignore[reportUnknownMemberType]
        before = whole.to(weight.dtype).float()  # rounded as the model received it
        return before - weight.detach().cpu().float()

    def _put(self, brought: Sequence[bytes], number: int, tokens: int, samples: str) -> list[Any]:
        bodies = {name: body.tobytes() for one in brought for name, body in unpack(one).items()}
        body = encode_payload(
            bodies,
            self._model.shapes,
            self._settings.codec,
            run=self._settings.run,
            uid=self._uid,
            window=number,
            base=self._before.step,
            tokens=tokens,
            samples=samples,
        )
        put(self._store, self._settings.gradients.gradient(self._uid, number), body)
        return [len(body), compute_identity(body)]

    def apply(self, model: torch.nn.Module, *, timeout: timedelta | None = None) -> ChainLink:
        """Wait until this window is merged, and load the merged weights into the model.

        Args:
            model: Model whose weights and buffers are overwritten.
            timeout: Longest wait; by default twice the length of the window.

        Raises:
            UnavailableError: The window was not merged in time.
            ChainError: The chain is broken.
        """
        self._wait(timeout)
        self.load(model)
        assert isinstance(self._before, ChainLink)
        return self._before

    def _wait(self, timeout: timedelta | None = None) -> None:
        """Wait until this window is merged, and apply its link.

        Args:
            timeout: Longest wait; by default twice the length of the window.
        """
        number, keys = self._number + 1, self._settings.chain
        began = time.monotonic()

        def is_merged() -> bool:
            if exists(self._aggregator, keys.link(number)):
                return True
            waited = time.monotonic() - began
            usual = 2 * self._settings.window if timeout is None else timeout
            if waited <= usual.total_seconds():
                return False
            last = (
                usual if timeout is not None else max(usual, 2 * self._read_window_length(number))
            )
            if waited > last.total_seconds():
                raise errors.UnavailableError(
                    f"Window {number} of {keys.run} was not merged in {last}. Check that the "
                    "aggregator runs, and wait again, or stop; nothing is lost."
                )
            return False

        while not self._ranks.run_on_first(is_merged):  # collectives time out
            time.sleep(self._settings.gather.poll_interval.total_seconds())
        self.catch_up()

    def _read_window_length(self, number: int) -> timedelta:
        """Return the length of a window, which the aggregator's rules may have changed."""
        try:
            opening = self._settings.chain.opening(number)
            return fetch(self._aggregator, opening, WindowOpening).window
        except (errors.NotFoundError, errors.CorruptError):
            return self._settings.window

    def load(self, model: torch.nn.Module) -> None:
        """Load the weights and buffers after the last window into the model."""
        held = self._model.held.weights
        with torch.no_grad():
            for name, weight in self._ranks.run_on_each(
                lambda: self._select_weights(model)
            ).items():
                whole = torch.from_numpy(held[name]) if name in held else None  # pyright: ignore[reportUnknownMemberType]
                self._ranks.broadcast(whole, weight, self._model.owners[name])

    def _select_weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's tensors that belong to the run, in the order of their names."""
        # Untrained tensors may belong to the run, and tied tensors have two names.
        tensors = dict[str, torch.Tensor](model.named_buffers(remove_duplicate=False))
        tensors.update(model.named_parameters(remove_duplicate=False))
        for name, shape in self._model.shapes.items():
            if name not in tensors or tuple(tensors[name].shape) != tuple(shape):
                raise errors.ConfigurationError(
                    f"The model has no {name} of the shape {list(shape)}, which the run has. Use "
                    "the model of the run, or begin a run with this model's tensors."
                )
        self._warn_of_buffers(tensors)
        return {name: tensors[name] for name in self._model.shapes}

    def _warn_of_buffers(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Log the buffers that the run lacks, once."""
        codec = self._settings.codec
        absent = [
            name for name in tensors if codec.is_buffer(name) and name not in self._model.shapes
        ]
        if absent and not self._warned:
            self._warned = True
            log.warning(
                "The run has no %s, which the model has, so each worker keeps its own. Begin the "
                "run with all of `model.state_dict()`.",
                ", ".join(absent),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank for a checkpoint, with the residuals."""
        submitted = {"window": self._submitted, "sha256": self._sha256}
        return {**self._feedback.state_dict(), "submitted": submitted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, with the same number of ranks.

        Raises:
            ChainError: The link of the last submitted window is missing.
        """
        self._feedback.load_state_dict(state)
        self._submitted, self._sha256 = state["submitted"]["window"], state["submitted"]["sha256"]
        if 0 < self._submitted <= self._number:  # the window was merged in the meantime
            keys, window = self._settings.chain, self._submitted
            self._settle(self._ranks.run_on_each(lambda: read_link(self._aggregator, keys, window)))

    def _advance(self, number: int) -> None:
        keys, before = self._settings.chain, self._before
        link = self._ranks.run_on_each(
            lambda: read_link_after(self._aggregator, keys, number, before)
        )
        self._model.replay(self._aggregator, link)
        figures = {"window": link.window, "step": link.step}
        self._progress(Event("chain.applied", link.run, figures))
        if self._submitted == number:
            self._settle(link)
        self._before, self._number = link, number

    def _settle(self, link: ChainStart | ChainLink) -> None:
        """Add the submitted values to the residuals again, unless the link has merged them."""
        taken = link.taken.get(self._uid) if isinstance(link, ChainLink) else None
        if taken is None or taken.sha256 != self._sha256:
            self._feedback.restore_sent()


def select_weights(model: torch.nn.Module, *, buffers: Sequence[str] = BUFFER_NAMES) -> WeightState:
    """Return the trained weights and the buffers of a model in float32, to begin a run with.

    All ranks of a sharded model call this function. Each then has all weights in memory.

    Args:
        model: Model of the run.
        buffers: Names of buffers to include, as in `Codec.buffers`.
    """
    codec = Codec(buffers=tuple(buffers))
    tensors = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    tensors |= {name: value for name, value in model.named_buffers() if codec.is_buffer(name)}
    return copy_state({name: _gather_tensor(tensor) for name, tensor in tensors.items()})


def _gather_tensor(weight: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. For a DTensor, this is a collective."""
    weight = weight.detach()
    return cast("Any", weight).full_tensor() if is_distributed(weight) else weight
