"""A `ShardLoader` as an ``IterableDataset`` of PyTorch."""

from collections.abc import Iterator, Mapping, Sequence
from ctypes import Structure, c_bool, c_longlong
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from typing import Any, ClassVar, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from millrace.datasets.loader.loader_state import find_states
from millrace.datasets.loader.shard_loader import ShardLoader
from millrace.errors import ConfigurationError


class _SharedState(Structure):
    """State of a dataset that its worker processes share.

    Attributes:
        is_elsewhere: Whether worker processes read the samples.
        changes: Number of calls of this process that have moved the dataset.
        epoch: Epoch of the last of these calls; -1 if a state was loaded.
    """

    _fields_: ClassVar = [("is_elsewhere", c_bool), ("changes", c_longlong), ("epoch", c_longlong)]
    is_elsewhere: bool
    changes: int
    epoch: int


class TorchShards(IterableDataset[Any]):
    """Samples of a loader, for a ``DataLoader`` with any number of workers.

    Each worker process reads whole streams of the rank. Each iteration of workers that stay is the
    next epoch, also after a break, or that of `set_epoch`. Others take the epoch of this process,
    so call `set_epoch` before each.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: ShardLoader) -> None:
        super().__init__()
        self._loader = loader
        self._epoch: int | None = None  # that `set_epoch` has named last
        self._shared = RawValue(_SharedState)
        self._changes = 0  # that this copy of the dataset knows
        self._next_epoch: int | None = None  # of a worker that has begun to read

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, or over the worker's share of it."""
        self._take_share()
        is_worker = get_worker_info() is not None
        self._shared.is_elsewhere = is_worker
        if is_worker and self._changes != self._shared.changes:
            if self._shared.epoch < 0:
                return iter(_refuse_state, None)
            self._changes = self._shared.changes
            self._go_to(self._shared.epoch)
        elif self._next_epoch is not None:
            self._go_to(self._next_epoch)
        is_rest = self._loader.is_at_end
        samples = iter(self._loader)
        if is_worker:
            self._next_epoch = self._loader.epoch + (not is_rest)
        return samples

    def __len__(self) -> int:
        """Return the number of samples or batches of an epoch, see `ShardLoader.__len__`.

        Raises:
            TypeError: The number is not known before the samples are read.
        """
        return len(self._loader)

    def __bool__(self) -> bool:
        """Return True, also where `len` is not known."""
        return True

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, see `ShardLoader.set_epoch`."""
        self._loader.set_epoch(epoch)
        self._epoch = epoch
        self._note_own_position(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process, see `ShardLoader.state_dict`.

        Raises:
            ConfigurationError: Other processes read the samples.
        """
        if get_worker_info() is None and self._shared.is_elsewhere:
            raise ConfigurationError(
                "Worker processes read the samples, and this process does not know how far they "
                "are. Use `state_dict` of torchdata's StatefulDataLoader, or `num_workers=0`."
            )
        self._take_share()
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go to the position of a state, see `ShardLoader.load_state_dict`.

        If the state is of the end of the epoch that `set_epoch` has named, the next iteration is
        the rest of this epoch, without a sample. So it is in a worker process, where torchdata
        begins a further iteration if the state is of a whole epoch.

        Raises:
            ConfigurationError: The state is refused by the loader, or is of another epoch than that
                which `set_epoch` has named. The dataset stays where it is.
        """
        for one in find_states(state):
            if self._epoch is not None and self._epoch not in one.list_epochs():
                raise ConfigurationError(
                    f"The state is of epoch {one.epoch}, and `set_epoch` has named epoch "
                    f"{self._epoch}. A StatefulDataLoader with workers has the state of the epoch "
                    "that it read last, also after `set_epoch`. Call `set_epoch"
                    f"({one.epoch})` before the state is loaded to read the rest of that epoch, or "
                    f"load no state to begin epoch {self._epoch}."
                )
        self._take_share()
        self._loader.load_state_dict(state)
        if get_worker_info() is not None:
            self._loader.stay_at_end()
        elif self._epoch is not None:
            self._loader.stay_at_end(self._epoch)
        self._note_own_position(-1)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a worker process. A copy reads by itself."""
        state = dict(vars(self))
        if get_spawning_popen() is None:
            del state["_shared"], state["_changes"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes of another process, or of the original."""
        vars(self).update({"_shared": RawValue(_SharedState), "_changes": 0, **state})

    def _note_own_position(self, epoch: int) -> None:
        """Note that the next samples are those of this process's position, also in workers."""
        if get_worker_info() is None:
            self._shared.is_elsewhere, self._shared.epoch = False, epoch
            self._shared.changes += 1
            self._changes = self._shared.changes

    def _go_to(self, epoch: int) -> None:
        """Go to the beginning of an epoch in a worker.

        A worker that has begun to read is ahead of the trainer, and may have ended the epoch before
        another worker of the rank.
        """
        if self._next_epoch is None:
            self._loader.set_epoch(epoch)
        else:
            self._loader.begin_epoch(epoch)

    def _take_share(self) -> None:
        worker = get_worker_info()
        if worker is not None:
            self._loader.read_as_worker(worker.id, worker.num_workers)


def _refuse_state() -> NoReturn:
    """Raise an error at each sample. PyTorch ends a worker that has an error before."""
    raise ConfigurationError(
        "A state was loaded after the worker processes began, and they stay where they are. Make a "
        "new DataLoader after `load_state_dict`."
    )
