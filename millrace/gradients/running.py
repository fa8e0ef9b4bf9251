"""A run of windows: the aggregator's side, and the worker's, which is the face for training code.

A window opens when the link before it was committed, by the store's clock, and is merged when it is
whole or its time is up. Both sides know it from the chain alone.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from millrace import errors
from millrace.gradients.aggregating import Step, aggregate
from millrace.gradients.chain import apply_link, link_after, link_at, newest
from millrace.gradients.compress import Feedback
from millrace.gradients.gathering import GatherSettings, QuorumError, Window, Worker, gather
from millrace.gradients.merging import MergeSettings
from millrace.gradients.payload import Shapes, identity_of, payload_bytes
from millrace.gradients.shared import Mask
from millrace.gradients.spread import Spread, here
from millrace.gradients.state import State, state_of
from millrace.gradients.weights import newest_state
from millrace.keys import ChainKeys, GradientKeys
from millrace.lease import Holder, StoreClock
from millrace.models.chain import Link, Outer, Start
from millrace.models.gradient import Codec
from millrace.progress import Event, Progress, silent
from millrace.storage import Store, exists, head, put


class RunSettings(BaseModel):
    """What all who take part in a run have alike."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field(description="Its name: a prefix below the buckets' URLs.")
    version: str = Field(default="1", description="Of what the workers run; others are not heard.")
    codec: Codec = Field(default=Codec(), description="How gradients are compressed.")
    decay: float = Field(
        default=1.0, ge=0, le=1, description="Of what a worker has not sent, from window to window."
    )
    outer: Outer = Field(default=Outer(), description="How what is merged changes the weights.")
    merge: MergeSettings = Field(default=MergeSettings(), description="How they are merged.")
    gather: GatherSettings = Field(default=GatherSettings(), description="How they are gathered.")
    window: timedelta = Field(
        default=timedelta(minutes=20), gt=timedelta(0), description="How long a window lasts."
    )
    steps: int = Field(default=30, ge=1, description="Steps of a worker in each window.")
    windows: int | None = Field(
        default=None, ge=1, description="After so many the run is over; left out, it never is."
    )

    @property
    def gradients(self) -> GradientKeys:
        return GradientKeys(self.run, self.version)

    @property
    def chain(self) -> ChainKeys:
        return ChainKeys(self.run, self.version)


def follow(
    store: Store,
    settings: RunSettings,
    workers: Sequence[Worker],
    model: State | Spread,
    *,
    reserves: Sequence[Worker] = (),
    after: int = 0,
    until: int | None = None,
    threads: int = 1,
    progress: Progress = silent,
) -> Iterator[Link]:
    """Aggregate window after window. Killed at any moment, it can be called again.

    Windows that are merged already are applied from the chain. One to which fewer than the quorum
    came has a link too, which changes nothing.

    Args:
        store: The aggregator's bucket, whose chain has begun.
        settings: Of the run.
        workers: Who is asked first in each window.
        model: The weights after window ``after``; changed in place.
        reserves: Who stands in.
        after: The window that ``model`` is of.
        until: The last window; by default it goes on for ever.
        threads: How many work side by side, if the weights are here.
        progress: As `gather` and `aggregate` tell, and ``chain.applied`` and ``window.merged``
            with ``window``, ``taken`` and ``out``.

    Yields:
        The link of each window that it has merged.

    Raises:
        ConflictError: Another aggregator has merged a window otherwise: catch up from the chain.
        ChainError: The chain is broken.
        WorkerError: A node that had some of the weights is gone.
    """
    if isinstance(model, State):
        model = here(model, threads=threads)
    clock = StoreClock.read(store, settings.chain.job, Holder.this_process())
    number, last = after, newest(store, settings.chain)
    before = link_at(store, settings.chain, number)
    while until is None or number < until:
        number += 1
        if number <= last:
            before = link_after(store, settings.chain, number, before)
            model.replay(store, before)
            figures = {"window": number, "step": before.step}
            progress(Event("chain.applied", settings.run, figures))
            continue
        window = _window(store, settings, model.shapes, number, before.step)
        model.open(window)
        try:
            gathered = gather(
                window,
                workers,
                settings.gather,
                reserves=reserves,
                reading=model.read,
                clock=clock,
                progress=progress,
            )
        except QuorumError as error:
            gathered = error.gathered  # the window is over all the same, and its link says so
        step = Step(before, before.step + settings.steps, settings.outer, settings.merge)
        before = aggregate(store, window, gathered, step, model, progress=progress)
        figures = {"window": number, "taken": len(before.taken), "out": len(before.out)}
        progress(Event("window.merged", settings.run, figures))
        yield before


@dataclass(frozen=True, slots=True)
class Turn:
    """A window that a worker trains in.

    Attributes:
        number: Of the window.
        step: That the weights are at when it begins.
        steps: That the worker makes in it.
    """

    number: int
    step: int
    steps: int


class Participant:
    """A worker of a run: trains in windows, and begins each with the weights of all.

    ``for window in participant.windows(): train(model, window.steps); participant.submit(model);
    participant.apply(model)``

    Args:
        settings: Of the run.
        uid: Its name: no other has it.
        store: Its own bucket, or its prefix's.
        aggregator: The bucket of the chain; to be read.
        state: The weights after window ``after``, such as of the checkpoint that the chain names.
        after: Which. It catches up from there.
        threads: How many compress side by side; by default one a processor.
        progress: Told ``chain.applied`` and ``gradient.sent``, with ``window`` and ``bytes``.
    """

    def __init__(
        self,
        settings: RunSettings,
        uid: str,
        store: Store,
        aggregator: Store,
        state: State,
        *,
        after: int = 0,
        threads: int | None = None,
        progress: Progress = silent,
    ) -> None:
        self._settings, self._uid, self._store = settings, uid, store
        self._aggregator, self._state, self._progress = aggregator, state, progress
        self._number = after
        self._before = link_at(aggregator, settings.chain, after)
        self._feedback = Feedback(settings.codec, decay=settings.decay, threads=threads)
        self._submitted, self._sha256 = 0, ""

    @classmethod
    def join(
        cls,
        settings: RunSettings,
        uid: str,
        store: Store,
        aggregator: Store,
        *,
        threads: int | None = None,
        progress: Progress = silent,
    ) -> "Participant":
        """Take part in a run from where it is: with the newest checkpoint that its chain names.

        The arguments are those of `Participant`.

        Raises:
            NotFoundError: The run has not begun.
            ChainError: No such checkpoint is there and undamaged, or the chain is broken.
        """
        state, after = newest_state(aggregator, settings.chain, progress=progress)
        return cls(
            settings, uid, store, aggregator, state, after=after, threads=threads, progress=progress
        )

    def windows(self) -> Iterator[Turn]:
        """The windows, from the one that is open on, until the run is over.

        Raises:
            ChainError: The chain is broken.
        """
        self.catch_up()
        last = self._settings.windows
        while last is None or self._number < last:
            if self._submitted > self._number:  # by this worker before it was started again
                self._wait(2 * self._settings.window)
                continue
            yield Turn(self._number + 1, self._before.step, self._settings.steps)

    def catch_up(self) -> None:
        """Apply what was merged meanwhile."""
        for number in range(self._number + 1, newest(self._aggregator, self._settings.chain) + 1):
            self._advance(number)

    def submit(self, model: torch.nn.Module, *, tokens: int = 0, samples: str = "") -> int:
        """Send how the model has changed in this window, the largest of it.

        If it is not taken, what was sent is kept and sent with what comes next.

        Args:
            model: After its steps; its weights were those of `apply` before.
            tokens: That it was trained on.
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
        with self._feedback.all_or_nothing():
            body = self._body(model, number, tokens, samples)
            put(self._store, self._settings.gradients.gradient(self._uid, number), body)
        self._submitted, self._sha256 = number, identity_of(body)
        figures = {"window": number, "bytes": len(body)}
        self._progress(Event("gradient.sent", self._uid, figures))
        return len(body)

    def _body(self, model: torch.nn.Module, number: int, tokens: int, samples: str) -> bytes:
        mask = Mask(self._settings.run, number)
        bodies: dict[str, bytes] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, weight in _weights(model, self._state).items():
            whole = torch.from_numpy(self._state.weights[name])  # pyright: ignore[reportUnknownMemberType]
            before = whole.to(weight.dtype).float()  # as the model was given it
            change = before - weight.detach().cpu().float()
            bodies[name] = self._feedback.compress(name, change, mask)
            shapes[name] = tuple(weight.shape)
        return payload_bytes(
            bodies,
            shapes,
            self._settings.codec,
            run=self._settings.run,
            uid=self._uid,
            window=number,
            base=self._before.step,
            tokens=tokens,
            samples=samples,
        )

    def apply(self, model: torch.nn.Module, *, patience: timedelta | None = None) -> Link:
        """Wait until this window is merged, and give the model the weights of all.

        Args:
            model: Its weights are overwritten.
            patience: How long; by default twice a window.

        Raises:
            UnavailableError: It was not merged by then.
            ChainError: The chain is broken.
        """
        self._wait(2 * self._settings.window if patience is None else patience)
        self.load(model)
        assert isinstance(self._before, Link)
        return self._before

    def _wait(self, patience: timedelta) -> None:
        """Until this window is merged; then it is applied."""
        number, keys = self._number + 1, self._settings.chain
        deadline = time.monotonic() + patience.total_seconds()
        while not exists(self._aggregator, keys.link(number)):
            if time.monotonic() > deadline:
                raise errors.UnavailableError(
                    f"Window {number} of {keys.run} was not merged in {patience}: is there an "
                    "aggregator? Wait again, or stop; nothing is lost."
                )
            time.sleep(self._settings.gather.look.total_seconds())
        self.catch_up()

    def load(self, model: torch.nn.Module) -> None:
        """Give the model the weights of all, as they are after the last window."""
        with torch.no_grad():
            for name, weight in _weights(model, self._state).items():
                weight.copy_(torch.from_numpy(self._state.weights[name]))  # pyright: ignore[reportUnknownMemberType]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this worker holds: what it has not sent yet."""
        submitted = {"window": self._submitted, "sha256": self._sha256}
        return {**self._feedback.state_dict(), "submitted": submitted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ChainError: The link of the window that was submitted last is missing.
        """
        self._feedback.load_state_dict(state)
        self._submitted, self._sha256 = state["submitted"]["window"], state["submitted"]["sha256"]
        if 0 < self._submitted <= self._number:  # it was merged meanwhile, with it or without
            self._settle(link_at(self._aggregator, self._settings.chain, self._submitted))

    def _advance(self, number: int) -> None:
        keys = self._settings.chain
        link = link_after(self._aggregator, keys, number, self._before)
        apply_link(self._aggregator, link, self._state, self._progress)
        if self._submitted == number:
            self._settle(link)
        self._before, self._number = link, number

    def _settle(self, link: Start | Link) -> None:
        """Keep what was submitted for a window if nobody has it: it is sent with what is next."""
        taken = link.taken.get(self._uid) if isinstance(link, Link) else None
        if taken is None or taken.sha256 != self._sha256:
            self._feedback.give_back()


def weights_of_model(model: torch.nn.Module) -> State:
    """The weights of a model as a run has them: those that are trained, in float32."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return state_of(trained)


def _weights(model: torch.nn.Module, state: State) -> dict[str, torch.Tensor]:
    # What is not trained may be among them, and what is tied has two names.
    tensors = dict[str, torch.Tensor](model.named_buffers(remove_duplicate=False))
    tensors.update(model.named_parameters(remove_duplicate=False))
    found = {name: tensor for name, tensor in tensors.items() if name in state.weights}
    missing = sorted(set(state.weights) - set(found))
    if missing:
        raise errors.ConfigurationError(
            f"The model has no {missing[0]}, which the run's weights have: it is another model, or "
            "the run began with more than the model's tensors."
        )
    return found


def _window(store: Store, settings: RunSettings, shapes: Shapes, number: int, base: int) -> Window:
    opens = head(store, settings.chain.link(number - 1)).last_modified
    return Window(
        keys=settings.gradients,
        number=number,
        base=base,
        codec=settings.codec,
        shapes=shapes,
        opens=opens,
        closes=opens + settings.window,
    )
