"""Ends of epochs for a training loop."""

from collections.abc import Mapping
from contextlib import suppress
from threading import Event as Flag
from typing import Any, Self

from millrace.checkpoints.cooldown.cooldown import cool_down
from millrace.checkpoints.cooldown.membership import Membership
from millrace.checkpoints.cooldown.result import EpochResult
from millrace.checkpoints.settings import CooldownSettings
from millrace.checkpoints.snapshot import SnapshotBuffers, StateShards
from millrace.progress import Progress, ignore_event


class EpochSaver:
    """Member's copy of the state, with which it ends epochs together with the other members.

    Memory: one copy of the state, which is reused by later epochs.

    Args:
        membership: Entered membership of the job; None if the member has no destination.
        settings: Settings of the end of an epoch.
        progress: Receives the events of `cool_down`.
    """

    def __init__(
        self,
        membership: Membership | None,
        settings: CooldownSettings | None = None,
        *,
        progress: Progress = ignore_event,
    ) -> None:
        self._membership = membership
        self._settings = settings or CooldownSettings()
        self._progress = progress
        self._memory = SnapshotBuffers()
        self._last: EpochResult | None = None
        self._cancel = Flag()

    def end(
        self,
        state: Mapping[str, Any],
        *,
        epoch: int,
        step: int,
        run: str = "",
        position: Mapping[str, Any] | None = None,
        notes: Mapping[str, str] | None = None,
        seed: int | None = None,
    ) -> EpochResult:
        """Copy the state, and end the epoch with the copy. An earlier upload is awaited first.

        Args:
            state: State as for `Saver.save`, the same on all members.
            epoch: Number of the epoch.
            step: Step of the training.
            run: Name of the run, the same on all members.
            position: Position in the data at which training continues, the same on all members.
            notes: Free text.
            seed: Seed of the order of the checkpointers.

        Raises:
            ConfigurationError: A value cannot be saved (the message has its path), or the step is
                negative or has more than 18 digits.
            UnavailableError: The store does not answer.
            DeniedError: The credentials may not write to the job.
        """
        self.wait()
        part_bytes = self._settings.save.part_bytes
        content = self._memory.snapshot(StateShards(state), part_bytes).make_content(step)
        self._last = cool_down(
            self._membership,
            content,
            epoch=epoch,
            run=run,
            position=position,
            notes=notes,
            seed=seed,
            settings=self._settings,
            cancel=self._cancel,
            progress=self._progress,
        )
        return self._last

    def wait(self) -> EpochResult | None:
        """Wait for the upload in the background, and return the result of the last epoch."""
        if self._last is not None and self._last.background_result is not None:
            self._last = self._last.background_result.result()
        return self._last

    def cancel(self) -> None:
        """Stop the current save from another thread. No later save is possible."""
        self._cancel.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.cancel()
            with suppress(Exception):  # the error of the block is more important
                self.wait()
        else:
            self.wait()
        self._memory.clear()
