"""End epochs with a checkpoint: what a training loop calls."""

from collections.abc import Mapping
from contextlib import suppress
from threading import Event as Flag
from typing import Any, Self

from millrace.checkpoints.cooldown.cooldown import EpochResult, cool_down
from millrace.checkpoints.cooldown.membership import Membership
from millrace.checkpoints.settings import CooldownSettings
from millrace.checkpoints.snapshot import SnapshotBuffers
from millrace.progress import Progress, ignore_event


class EpochSaver:
    """Ends the epochs of a job together with its other members. Each of them has one.

    Memory: one copy of the state, kept from one epoch to the next.

    Args:
        membership: Of the job, entered; None where there is nowhere to save to.
        settings: How.
        progress: As `cool_down` tells.
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
        """Copy the state, and end the epoch with it; an upload still under way is waited for.

        Args:
            state: As of `Saver.save`; the same on all members.
            epoch: The epoch that ends.
            step: Of the training.
            run: Which run of the job this is; the same on all members.
            position: Where the data goes on; the same on all members.
            notes: Free text.
            seed: From which the order of the checkpointers follows.

        Raises:
            ConfigurationError: Something in the state cannot be saved; its path is named.
            UnavailableError, DeniedError: The store does not answer, or not to us.
        """
        self.wait()
        content = self._memory.snapshot(state, self._settings.save.part_bytes).make_content(step)
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
        """Wait for what goes on in the background; what the last epoch came to."""
        if self._last is not None and self._last.rest is not None:
            self._last = self._last.rest.result()
        return self._last

    def cancel(self) -> None:
        """Break off what is under way, from another thread. Nothing can be saved afterwards."""
        self._cancel.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.cancel()
            with suppress(Exception):  # what was raised in the block says more
                self.wait()
        else:
            self.wait()
        self._memory.clear()
