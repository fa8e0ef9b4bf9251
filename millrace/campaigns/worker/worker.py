"""Worker of a campaign, for its training script: windows, shards, and the ends of epochs."""

import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from millrace import errors
from millrace.campaigns.worker.settings import SETTINGS_VARIABLE, WorkerSettings
from millrace.campaigns.worker.shards import fetch_shard
from millrace.campaigns.worker.window_batches import WindowBatches, WindowLoader
from millrace.checkpoints.cooldown.epochs import EpochSaver
from millrace.checkpoints.cooldown.membership import Membership
from millrace.dataset_ledger import read_manifest
from millrace.gradients.sync.participant import Participant, TrainingWindow
from millrace.keys.campaigns import CampaignKeys
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once
from millrace.schemas.dataset import Manifest, ManifestShard
from millrace.schemas.gradient import StartWindow
from millrace.settings import load_settings
from millrace.storage import exists, open_store, put, read

_POLL_INTERVAL = 1.0  # seconds between two checks whether the run has begun
_CACHE_FOLDER = "_cache"  # below the folder for the dataset's files
_JOIN_TIMEOUT = timedelta(hours=2)  # of a run that has not begun

log = logging.getLogger(__name__)


class Worker:
    """A worker of a campaign, for its training script. A context manager.

    ``with Worker.from_environment() as worker: participant = worker.join(); for window in
    participant.iterate_windows(): participant.load(model); worker.begin_window(window,
    model.state_dict()); ...``

    Args:
        settings: Settings of the worker.
        progress: Receives the events of `Participant` and `EpochSaver`.
    """

    def __init__(self, settings: WorkerSettings, *, progress: Progress = ignore_event) -> None:
        self.settings, self._progress = settings, progress
        self._keys = CampaignKeys(settings.campaign)
        self._read_store, self._write_store = (
            open_store(settings.read_store),
            open_store(settings.write_store),
        )
        self._stack = ExitStack()
        self._saver: EpochSaver | None = None
        self._verified: set[str] = set()  # keys of shards whose digest was checked
        self._loaders: dict[tuple[int, str, bool], WindowLoader] = {}

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, *, progress: Progress = ignore_event
    ) -> "Worker":
        """Return the worker of this process, from the environment of `millrace campaign worker`.

        Raises:
            ConfigurationError: The variable of the settings file is not set.
        """
        environ = os.environ if environ is None else environ
        if SETTINGS_VARIABLE not in environ:
            raise errors.ConfigurationError(
                f"{SETTINGS_VARIABLE} is not set: a training script is started by "
                "`millrace campaign worker SETTINGS`, or by a campaign."
            )
        return cls(
            load_settings(Path(environ[SETTINGS_VARIABLE]), WorkerSettings, environ),
            progress=progress,
        )

    def __enter__(self) -> Self:
        """Join the job of the epochs' checkpoints as a member.

        Raises:
            ConflictError: Another process has this worker's name.
        """
        with ExitStack() as stack:
            job, uid = self._keys.job, self.settings.uid
            membership = Membership(self._write_store, job, uid, reads=self._read_store)
            stack.enter_context(membership)
            saver = EpochSaver(membership, self.settings.training.cooldown, progress=self._progress)
            self._saver = stack.enter_context(saver)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def fetch_shards(self, split: str = "train", *, only_own: bool = False) -> list[Path]:
        """Return the paths of the dataset's shards on this machine, in the order of their names.

        Missing shards are downloaded, and their digests checked. Of a damaged shard, only the
        damaged blocks are read again.

        Args:
            split: Split of the dataset: ``train``, or ``val`` if the dataset has one.
            only_own: Whether to return only this worker's share. If there are fewer shards than
                workers, every worker gets all shards.

        Raises:
            ConfigurationError: The campaign has no dataset, or the dataset has no shards of the
                split in the format webdataset.
            NotFoundError: The dataset is not complete.
            CorruptError: A shard differs from its manifest.
        """
        if self.settings.dataset is None:
            raise errors.ConfigurationError("The campaign names no dataset: give it one.")
        manifest = read_manifest(self._read_store, DatasetKeys(self.settings.dataset))
        readable = [one for one in manifest.shards if one.format == "webdataset"]
        if not readable:
            raise errors.ConfigurationError(
                f"{manifest.dataset} has no shards of the format webdataset, which workers read. "
                "Shard it again with `formats: [webdataset]`, under another name."
            )
        shards = [one for one in readable if one.split == split]
        if not shards:
            splits = " or ".join(repr(one) for one in sorted({one.split for one in readable}))
            raise errors.ConfigurationError(
                f"{manifest.dataset} has no shards of the split {split!r}: name {splits}."
            )
        if only_own and len(shards) >= self.settings.training.workers:
            shards = shards[self.settings.number :: self.settings.training.workers]
        return [self._fetch_shard(manifest, one) for one in shards]

    def load_batches(
        self, window: TrainingWindow, batch_size: int, *, split: str = "train", decode: bool = True
    ) -> WindowBatches:
        """Return this worker's batches of a window: one for each of its steps.

        They follow from the dataset, the run, the number of the worker and the window. Shards are
        read from the store or its mirrors, and kept on the disk of the machine.

        Args:
            window: The window.
            batch_size: Samples of a batch.
            split: Split of the dataset.
            decode: Whether fields are decoded. Otherwise they are the bytes in tar shards.

        Raises:
            ConfigurationError: The campaign has no dataset, or too few samples for a batch.
            NotFoundError: The dataset is not complete.
        """
        if self.settings.dataset is None:
            raise errors.ConfigurationError("The campaign names no dataset: give it one.")
        chosen = batch_size, split, decode
        loader = self._loaders.get(chosen)
        if loader is None:
            loader = self._loaders[chosen] = WindowLoader(
                [self.settings.read_store, *self.settings.mirrors],
                self.settings.dataset,
                run=self.settings.run.name,
                number=self.settings.number,
                workers=self.settings.training.workers,
                batch_size=batch_size,
                steps=self.settings.run.steps,
                split=split,
                decode=decode,
                cache=self.settings.data_folder / _CACHE_FOLDER,
                warmed=[self.settings.data_folder],
            )
        return loader.load(window.number)

    def _fetch_shard(self, manifest: Manifest, shard: ManifestShard) -> Path:
        path = self.settings.data_folder / shard.key
        if shard.key not in self._verified:
            fetch_shard(self._read_store, manifest, shard, path)
            self._verified.add(shard.key)
        return path

    def join(
        self, *, threads: int | None = None, timeout: timedelta = _JOIN_TIMEOUT
    ) -> Participant:
        """Join the campaign's run at its current window, after waiting for its begin.

        A worker is one process. A worker of several ranks uses `Participant` and `Membership`.

        Args:
            threads: Number of threads, as in `Participant`.
            timeout: Longest wait for the begin of the run.

        Raises:
            UnavailableError: The run has not begun within the timeout.
        """
        run = self.settings.run
        deadline = time.monotonic() + timeout.total_seconds()
        while not exists(self._read_store, run.chain_keys.make_link_key(0)):
            if time.monotonic() > deadline:
                raise errors.UnavailableError(
                    f"The run {run.name} has not begun in {timeout}: is there an aggregator?"
                )
            time.sleep(_POLL_INTERVAL)
        participant = Participant.join(
            run,
            self.settings.uid,
            self._write_store,
            self._read_store.with_warmed(self.settings.data_folder),
            is_named=True,
            threads=threads,
            progress=self._progress,
        )
        participant.catch_up()
        self._renew_report(participant.open_window.number)
        return participant

    def _renew_report(self, window: int) -> None:
        """Write the report of a window again if an earlier process of this worker has written it.

        By its time, a campaign that was started again sees that this process has joined.
        """
        key = self.settings.run.gradient_keys.make_start_window_key(self.settings.uid, window)
        # No report, one that no reader accepts, or no right to read.
        with suppress(errors.NotFoundError, errors.CorruptError, errors.DeniedError):
            report = read(self._write_store, key, max_size=StartWindow.record_bytes)
            put(self._write_store, key, report)

    def begin_window(
        self, window: TrainingWindow, state: Mapping[str, Any], **metrics: float
    ) -> None:
        """Report the begin of a window. After an epoch's last window, also save its checkpoint.

        All workers save the checkpoint together: each sends a part (`EpochSaver`). Call it before
        each window, and once more when the run is over.

        Args:
            window: Window that begins.
            state: State of the epoch's checkpoint, as in `Saver.save`. It has to be equal on all
                workers, such as the common weights from `Participant.load`.
            metrics: Metrics of the weights, such as ``loss``, for the campaign's report.

        Raises:
            UnavailableError: The epoch has not ended. Do not continue the training.
        """
        number = window.number
        start = StartWindow(
            uid=self.settings.uid,
            window=number,
            step=window.step,
            measured={name: value for name, value in metrics.items() if math.isfinite(value)},
        )
        key = self.settings.run.gradient_keys.make_start_window_key(start.uid, number)
        if not commit_once(self._write_store, key, start).mine:
            self._renew_report(number)
        done, rest = divmod(number - 1, self.settings.training.windows_per_epoch)
        if done and not rest:
            self._end_training_epoch(done - 1, number - 1, window.step, state)

    def _end_training_epoch(
        self, epoch: int, window: int, step: int, state: Mapping[str, Any]
    ) -> None:
        if self._saver is None:
            raise errors.ConfigurationError(
                "Use the worker as a context: `with Worker.from_environment() ...`"
            )
        result = self._saver.end(
            state, epoch=epoch, step=step, run=self.settings.run.name, position={"window": window}
        )
        log.info("epoch %d: %s %s", epoch, result.outcome, result.reason)
        if result.epoch is None:
            raise errors.UnavailableError(f"Epoch {epoch} has not ended: {result.reason}")
