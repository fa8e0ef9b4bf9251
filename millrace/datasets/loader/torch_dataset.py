"""A `ShardLoader` as an ``IterableDataset`` of PyTorch."""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from millrace.datasets.loader.shard_loader import ShardLoader
from millrace.errors import ConfigurationError


class TorchShards(IterableDataset[Any]):
    """Samples of a loader, for a ``DataLoader`` with any number of workers.

    Each worker process reads whole streams of the rank. A worker that stays for several epochs goes
    on with the next epoch. Others take the epoch of this process, so call `set_epoch` before each.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: ShardLoader) -> None:
        super().__init__()
        self._loader = loader
        self._is_elsewhere = mmap.mmap(-1, 1)  # forked workers share it

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, or over the worker's share of it."""
        self._take_share()
        return iter(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. The current epoch stays where it is."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process, see `ShardLoader.state_dict`.

        Raises:
            ConfigurationError: Other processes read the samples.
        """
        if get_worker_info() is None and self._is_elsewhere[0]:
            raise ConfigurationError(
                "Worker processes read the samples, and this process does not know how far they "
                "are. Use `state_dict` of torchdata's StatefulDataLoader, or `num_workers=0`."
            )
        self._take_share()
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go to the position of a state, see `ShardLoader.load_state_dict`."""
        self._take_share()
        self._loader.load_state_dict(state)
        if get_worker_info() is None:
            self._is_elsewhere[0] = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a worker process."""
        self._is_elsewhere[0] = 1
        return {name: value for name, value in vars(self).items() if name != "_is_elsewhere"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes in a worker process."""
        vars(self).update(state)
        self._is_elsewhere = mmap.mmap(-1, 1)

    def _take_share(self) -> None:
        worker = get_worker_info()
        if worker is not None:
            self._is_elsewhere[0] = 1
            self._loader.read_as_worker(worker.id, worker.num_workers)
