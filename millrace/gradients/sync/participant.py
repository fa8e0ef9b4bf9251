"""A worker of a run: the face for training code, also where a model is sharded over ranks."""

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
from millrace.gradients.codec.compress import Feedback, GradientEncoder
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
    """A window that a worker trains in.

    Attributes:
        number: Of the window.
        step: That the weights are at when it begins.
        steps: That the worker makes in it.
    """

    number: int
    step: int
    steps: int


class RankedWeights(ShardedWeights):
    """The weights of a run, each rank of a worker with some of them.

    Args:
        shapes: Of all tensors, by their names.
        ranks: Of the worker.
        state: All weights, of which this rank keeps some; by default none, until they are loaded.
        threads: How many work side by side; by default one a processor.
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
        self._portion = WeightShard(mine, state and _select_state(state, mine), threads=threads)
        self._ranks = ranks

    def _all(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        return self._ranks.gather_results(partial(method, self._portion, *args, **kwargs))

    @property
    def held(self) -> WeightState:
        """Weights that this rank has."""
        return self._portion.state()


def _select_state(state: WeightState, names: Sequence[str]) -> WeightState:
    kinds = (state.weights, state.moments)
    return WeightState(*({name: kind[name] for name in names if name in kind} for kind in kinds))


class Participant:
    """A worker of a run: trains in windows, and begins each with the weights of all.

    ``for window in participant.windows(): train(model, window.steps); participant.submit(model);
    participant.apply(model)``

    Args:
        settings: Of the run.
        uid: Its name: no other has it.
        store: Its own bucket, or its prefix's.
        aggregator: The bucket of the chain; to be read.
        weights: Those after window ``after``, such as of the checkpoint that the chain names.
        after: Which. It catches up from there.
        group: Of the ranks that train one model: sharded by FSDP2, or the same on all. Each makes a
            participant and calls its methods as the others do; each compresses some of the tensors,
            keeps what was not sent of them, and the first sends all.
        threads: How many compress side by side; by default one a processor.
        progress: Told ``chain.applied`` and ``gradient.sent``, with ``window`` and ``bytes``.
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
        self._feedback = Feedback(settings.codec, decay=settings.decay, threads=threads)
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
        """Take part in a run from where it is: with the newest checkpoint that its chain names.

        The arguments are those of `Participant`. Each rank of a group loads its own tensors alone.

        Raises:
            NotFoundError: The run has not begun.
            ChainError: No such checkpoint is there and undamaged, or the chain is broken.
        """
        ranks = RankGroup(group)

        def place(shapes: Shapes) -> RankedWeights:
            return RankedWeights(shapes, ranks, threads=threads)

        weights, after = load_newest_weights(
            aggregator, settings.chain, place, ranks=ranks, progress=progress
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
        """Yield the windows, from the one that is open on, until the run is over.

        Raises:
            ChainError: The chain is broken.
        """
        self.catch_up()
        last = self._settings.windows
        while last is None or self._number < last:
            if self._submitted > self._number:  # by this worker before it was started again
                self._wait()
                continue
            yield self.turn

    @property
    def turn(self) -> TrainingWindow:
        """The window that is open; one past the last when the run is over."""
        return TrainingWindow(self._number + 1, self._before.step, self._settings.steps)

    def catch_up(self) -> None:
        """Apply what was merged meanwhile."""
        last = self._ranks.run_on_first(
            lambda: find_newest_window(self._aggregator, self._settings.chain)
        )
        for number in range(self._number + 1, last + 1):
            self._advance(number)

    def submit(self, model: torch.nn.Module, *, tokens: int = 0, samples: str = "") -> int:
        """Send how the model has changed in this window, the largest of it, and all its buffers.

        If it is not taken, what was sent is kept and sent with what comes next; of buffers nothing
        is kept.

        Args:
            model: After its steps; its weights were those of `apply` before.
            tokens: That it was trained on: by all ranks.
            samples: The digest of what it was trained on.

        Returns:
            Bytes that were sent.

        Raises:
            ConfigurationError: A weight is not finite, or not of the run.
            UnavailableError, DeniedError: The bucket does not take it.
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
        """Return this rank's tensors of the gradient, packed."""
        mask = Mask(self._settings.run, number)
        bodies: dict[str, Any] = {}
        failed: list[Exception] = []
        for name, weight in self._ranks.run_on_each(lambda: self._select_weights(model)).items():
            whole = _gather_tensor(weight)  # of all ranks: also of one that has failed
            if name in self._model.held.weights and not failed:
                try:
                    if self._settings.codec.is_buffer(name):
                        body = self._encode_buffer(name, whole)
                    else:
                        body = self._feedback.compress(
                            name, self._compute_change(name, whole), mask
                        )
                    bodies[name] = np.frombuffer(body, np.uint8)
                except Exception as error:  # noqa: BLE001 - raised when all have done theirs
                    failed.append(error)

        def end() -> bytes:
            if failed:
                raise failed.pop()  # kept by nothing that its traceback keeps
            return pack(bodies)

        return self._ranks.run_on_each(end)

    def _encode_buffer(self, name: str, buffer: torch.Tensor) -> bytes:
        """Return the values of a buffer, packed."""
        values = buffer.cpu().float()
        if not torch.isfinite(values).all():
            raise errors.ConfigurationError(
                f"The buffer {name} has values that are not finite: leave this window out."
            )
        return GradientEncoder(self._settings.codec.for_tensor(name), self._threads).encode(values)

    def _compute_change(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        whole = torch.from_numpy(self._model.held.weights[name])  # pyright: ignore[reportUnknownMemberType]
        before = whole.to(weight.dtype).float()  # as the model was given it
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
        """Wait until this window is merged, and give the model the weights of all.

        Args:
            model: Its weights are overwritten, and its buffers by their averages.
            timeout: How long; by default twice as long as the window lasts.

        Raises:
            UnavailableError: It was not merged by then.
            ChainError: The chain is broken.
        """
        self._wait(timeout)
        self.load(model)
        assert isinstance(self._before, ChainLink)
        return self._before

    def _wait(self, timeout: timedelta | None = None) -> None:
        """Wait until this window is merged, and apply it.

        Args:
            timeout: How long; by default twice as long as the window lasts.
        """
        number, keys = self._number + 1, self._settings.chain
        began = time.monotonic()

        def merged() -> bool:
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
                    f"Window {number} of {keys.run} was not merged in {last}: is there an "
                    "aggregator? Wait again, or stop; nothing is lost."
                )
            return False

        while not self._ranks.run_on_first(merged):  # a collective does not wait for ever
            time.sleep(self._settings.gather.poll_interval.total_seconds())
        self.catch_up()

    def _read_window_length(self, number: int) -> timedelta:
        """Return how long a window lasts: the aggregator may have been given other rules."""
        try:
            opening = self._settings.chain.opening(number)
            return fetch(self._aggregator, opening, WindowOpening).window
        except (errors.NotFoundError, errors.CorruptError):
            return self._settings.window

    def load(self, model: torch.nn.Module) -> None:
        """Give the model the weights and buffers of all, as they are after the last window."""
        held = self._model.held.weights
        with torch.no_grad():
            for name, weight in self._ranks.run_on_each(
                lambda: self._select_weights(model)
            ).items():
                whole = torch.from_numpy(held[name]) if name in held else None  # pyright: ignore[reportUnknownMemberType]
                self._ranks.broadcast(whole, weight, self._model.owners[name])

    def _select_weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors of a model that the run's weights are, in the order of their names."""
        # What is not trained may be among them, and what is tied has two names.
        tensors = dict[str, torch.Tensor](model.named_buffers(remove_duplicate=False))
        tensors.update(model.named_parameters(remove_duplicate=False))
        for name, shape in self._model.shapes.items():
            if name not in tensors or tuple(tensors[name].shape) != tuple(shape):
                raise errors.ConfigurationError(
                    f"The model has no {name} of the shape {list(shape)}, which the run has: it is "
                    "another model, or the run began with more than the model's tensors."
                )
        self._warn_of_buffers(tensors)
        return {name: tensors[name] for name in self._model.shapes}

    def _warn_of_buffers(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Log once which buffers the model has and the run has not."""
        codec = self._settings.codec
        absent = [
            name for name in tensors if codec.is_buffer(name) and name not in self._model.shapes
        ]
        if absent and not self._warned:
            self._warned = True
            log.warning(
                "The run has no %s, which the model has: each worker keeps its own. Begin the run "
                "with all of `model.state_dict()`.",
                ", ".join(absent),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint of this rank: the values that it has not sent yet."""
        submitted = {"window": self._submitted, "sha256": self._sha256}
        return {**self._feedback.state_dict(), "submitted": submitted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with as many ranks.

        Raises:
            ChainError: The link of the window that was submitted last is missing.
        """
        self._feedback.load_state_dict(state)
        self._submitted, self._sha256 = state["submitted"]["window"], state["submitted"]["sha256"]
        if 0 < self._submitted <= self._number:  # it was merged meanwhile, with it or without
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
        """Keep what was submitted for a window if nobody has it: it is sent with what is next."""
        taken = link.taken.get(self._uid) if isinstance(link, ChainLink) else None
        if taken is None or taken.sha256 != self._sha256:
            self._feedback.give_back()


def select_weights(model: torch.nn.Module, *, buffers: Sequence[str] = BUFFER_NAMES) -> WeightState:
    """Return the weights of a model as a run has them: what is trained, and buffers, in float32.

    Of a model that is sharded, all ranks call it, and each has all of it in memory.

    Args:
        model: The model.
        buffers: Names of its buffers, as of `Codec.buffers`.
    """
    codec = Codec(buffers=tuple(buffers))
    tensors = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    tensors |= {name: value for name, value in model.named_buffers() if codec.is_buffer(name)}
    return copy_state({name: _gather_tensor(tensor) for name, tensor in tensors.items()})


def _gather_tensor(weight: torch.Tensor) -> torch.Tensor:
    """All of a tensor; of a sharded one, brought together: a collective."""
    weight = weight.detach()
    return cast("Any", weight).full_tensor() if is_distributed(weight) else weight
