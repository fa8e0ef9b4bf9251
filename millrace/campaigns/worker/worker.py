"""Worker of a campaign, for its training script: the plan, the shards, and the ends of epochs."""

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from millrace import errors
from millrace.campaigns.worker.settings import FILE, WorkerSettings
from millrace.checkpoints.cooldown.epochs import EpochSaver
from millrace.checkpoints.cooldown.membership import Membership
from millrace.digest import sha256_of
from millrace.gradients.sync.participant import Participant, TrainingWindow
from millrace.keys import CampaignKeys, DatasetKeys
from millrace.progress import Progress, silent
from millrace.records import commit_once, fetch
from millrace.schemas.dataset import Manifest, ManifestShard
from millrace.schemas.gradient import StartWindow
from millrace.settings import load
from millrace.storage import exists, open_store, stream

_LOOK = 1.0  # seconds between two looks for a run that has not begun
_PATIENCE = timedelta(hours=2)  # that it is waited for
_BLOCK = 1 << 20

log = logging.getLogger(__name__)


class Worker:
    """A worker of a campaign, for its training script. A context manager.

    ``with Worker.here() as worker: participant = worker.join(); for turn in
    participant.windows(): participant.load(model); worker.begin(turn, model.state_dict()); ...``

    Args:
        settings: As the campaign says.
        progress: Told what `Participant` and `EpochSaver` tell.
    """

    def __init__(self, settings: WorkerSettings, *, progress: Progress = silent) -> None:
        self.settings, self._progress = settings, progress
        self._keys = CampaignKeys(settings.campaign)
        self._reads, self._writes = open_store(settings.reads), open_store(settings.writes)
        self._stack = ExitStack()
        self._saver: EpochSaver | None = None
        self._seen: set[str] = set()  # of shards: whose bytes were looked at

    @classmethod
    def here(
        cls, environ: Mapping[str, str] | None = None, *, progress: Progress = silent
    ) -> "Worker":
        """Return the worker that this process is, by the environment that `millrace work` gives it.

        Raises:
            ConfigurationError: It is none.
        """
        environ = os.environ if environ is None else environ
        if FILE not in environ:
            raise errors.ConfigurationError(
                f"{FILE} is not set: a training script is started by `millrace work SETTINGS`, or "
                "by a campaign."
            )
        return cls(load(Path(environ[FILE]), WorkerSettings, environ), progress=progress)

    def __enter__(self) -> Self:
        """Become a member of the job whose checkpoints the epochs end with.

        Raises:
            ConflictError: A worker of this name lives.
        """
        with ExitStack() as stack:
            job, uid = self._keys.job, self.settings.uid
            membership = Membership(self._writes, job, uid, reads=self._reads)
            stack.enter_context(membership)
            saver = EpochSaver(membership, self.settings.cooldown, progress=self._progress)
            self._saver = stack.enter_context(saver)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def shards(self, partition: str = "train", *, mine: bool = False) -> list[Path]:
        """Return the dataset's shards on this machine's disk, in the order of their names.

        What is not there yet comes out of the store, each byte verified.

        Args:
            partition: Of the dataset: ``train``, or ``val`` where some of it is held out.
            mine: Only this worker's share; all, where there are fewer than workers.

        Raises:
            ConfigurationError: The campaign has no dataset.
            NotFoundError: It is not complete.
            CorruptError: A shard is not what the manifest says.
        """
        if self.settings.dataset is None:
            raise errors.ConfigurationError("The campaign names no dataset: give it one.")
        keys = DatasetKeys(self.settings.dataset)
        manifest = fetch(self._reads, keys.manifest, Manifest)
        if manifest.dataset != keys.dataset:
            raise errors.CorruptError(
                f"{self._reads.url_of(keys.manifest)} is the manifest of {manifest.dataset}: a "
                "dataset is read under the name that it was made under."
            )
        shards = [one for one in manifest.shards if one.partition == partition]
        if mine and len(shards) >= self.settings.workers:
            shards = shards[self.settings.number :: self.settings.workers]
        return [self._brought(one) for one in shards]

    def _brought(self, shard: ManifestShard) -> Path:
        path = self.settings.root / shard.key
        if shard.key in self._seen or _is(path, shard):
            self._seen.add(shard.key)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with part.open("wb") as file:
                blocks = stream(self._reads, shard.key, end=shard.size)  # not what was put there
                digest, _ = sha256_of(_written(file, blocks))
            if digest != shard.sha256:
                raise errors.CorruptError(
                    f"{self._reads.url_of(shard.key)} is not what its manifest says: run "
                    "`millrace verify`."
                )
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    def join(self, *, threads: int | None = None, patience: timedelta = _PATIENCE) -> Participant:
        """Take part in the campaign's run, from where it is; waited for until it has begun.

        A worker is one process. One of several ranks uses `Participant` and `Membership` itself.

        Args:
            threads: As of `Participant`.
            patience: How long the run is waited for.

        Raises:
            UnavailableError: It has not begun by then.
        """
        run = self.settings.run
        deadline = time.monotonic() + patience.total_seconds()
        while not exists(self._reads, run.chain.link(0)):
            if time.monotonic() > deadline:
                raise errors.UnavailableError(
                    f"The run {run.run} has not begun in {patience}: is there an aggregator?"
                )
            time.sleep(_LOOK)
        return Participant.join(
            run,
            self.settings.uid,
            self._writes,
            self._reads,
            threads=threads,
            progress=self._progress,
        )

    def begin(self, turn: TrainingWindow, state: Mapping[str, Any], **measured: float) -> None:
        """Say with what weights a window begins; where it ends an epoch, save them with the others.

        Call it before each window, and once more when the run is over.

        Args:
            turn: `Participant.turn`.
            state: What an epoch ends with, as of `Saver.save`: the same on all workers, such as
                the weights of all that `Participant.load` gives.
            measured: What the weights are worth, such as ``loss``: for the campaign's report.

        Raises:
            UnavailableError: The epoch has not ended: do not train on.
        """
        number = turn.number
        said = StartWindow(
            uid=self.settings.uid,
            window=number,
            step=turn.step,
            measured={name: value for name, value in measured.items() if math.isfinite(value)},
        )
        key = self.settings.run.gradients.start_window(said.uid, number)
        commit_once(self._writes, key, said)  # one that was started again has said it before
        done, rest = divmod(number - 1, self.settings.epoch)
        if done and not rest:
            self._end(done - 1, number - 1, turn.step, state)

    def _end(self, epoch: int, window: int, step: int, state: Mapping[str, Any]) -> None:
        if self._saver is None:
            raise errors.ConfigurationError("Use the worker as a context: `with Worker.here() ...`")
        cooled = self._saver.end(
            state, epoch=epoch, step=step, run=self.settings.run.run, position={"window": window}
        )
        log.info("epoch %d: %s %s", epoch, cooled.outcome, cooled.reason)
        if cooled.epoch is None:
            raise errors.UnavailableError(f"Epoch {epoch} has not ended: {cooled.reason}")


def _is(path: Path, shard: ManifestShard) -> bool:
    """Tell whether a file is a shard: the folder may hold anything."""
    if not path.exists() or path.stat().st_size != shard.size:
        return False
    with path.open("rb") as file:
        return sha256_of(iter(partial(file.read, _BLOCK), b""))[0] == shard.sha256


def _written(file: IO[bytes], blocks: Iterable[bytes]) -> Iterator[bytes]:
    for block in blocks:
        file.write(block)
        yield block
