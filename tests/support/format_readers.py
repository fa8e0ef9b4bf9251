"""Readers of shards from other projects, each in a process of its own.

``python -m tests.support.format_readers NAME`` reads a pickled call on its standard input, and
writes the pickled result into the file that the call names. The processes keep the settings that
these libraries change, and the processes that they fork, away from the tests.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.testing.mosaicml import prepare_import
from millrace.testing.process import REPOSITORY

Item = dict[str, Any]


def read_litdata(
    folder: str,
    *,
    shuffle: bool = False,
    workers: int = 0,
    storage_options: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Item]:
    """Return the samples that ``litdata.StreamingDataset`` reads, in its order.

    Args:
        folder: Folder or URL of the shards of one split.
        shuffle: Whether the samples are shuffled.
        workers: Processes of the `DataLoader`; 0 iterates without one.
        storage_options: Options for the store of a URL.
        environment: Variables to add to the environment.
    """
    return _call(
        "litdata",
        {
            "folder": folder,
            "shuffle": shuffle,
            "workers": workers,
            "storage_options": storage_options or {},
        },
        environment or {},
    )


def read_mds(
    packages: Path, folder: Path, *, shuffle: bool = False, workers: int = 0
) -> list[Item]:
    """Return the samples that ``streaming.StreamingDataset`` reads, in its order.

    Args:
        packages: Folder of `millrace.testing.mosaicml.install_mosaicml`.
        folder: Folder of the shards of one split.
        shuffle: Whether the samples are shuffled.
        workers: Processes of the `DataLoader`; 0 iterates without one.
    """
    call = {"folder": str(folder), "shuffle": shuffle, "workers": workers}
    return _call("mds", call, {"PYTHONPATH": str(packages)})


def write_mds(
    packages: Path, folder: Path, columns: Mapping[str, str], items: Sequence[Item]
) -> None:
    """Write a folder of one shard with ``streaming.MDSWriter``."""
    call = {"folder": str(folder), "columns": dict(columns), "items": list(items)}
    _call("mds-write", call, {"PYTHONPATH": str(packages)})


def _call(name: str, call: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    with tempfile.TemporaryDirectory(prefix="format-reader-") as folder:
        result = Path(folder) / "result"
        child = subprocess.run(
            [sys.executable, "-m", "tests.support.format_readers", name, str(result)],
            input=pickle.dumps(call),
            capture_output=True,
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": folder, "HOME": folder, **environment},
            check=False,
            timeout=300,
        )
        assert child.returncode == 0, child.stderr.decode()[-4000:]
        return pickle.loads(result.read_bytes())


def main() -> None:
    call = pickle.load(sys.stdin.buffer)
    functions = {"litdata": _read_litdata, "mds": _read_mds, "mds-write": _write_mds}
    Path(sys.argv[2]).write_bytes(pickle.dumps(functions[sys.argv[1]](**call)))


def _read_litdata(folder: str, *, shuffle: bool, workers: int, storage_options: Any) -> list[Item]:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(folder, shuffle=shuffle, storage_options=storage_options)
    return _iterate(dataset, StreamingDataLoader, workers)


def _read_mds(folder: str, *, shuffle: bool, workers: int) -> list[Item]:
    prepare_import()
    from streaming.base import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=folder, shuffle=shuffle, batch_size=4)
    return _iterate(dataset, StreamingDataLoader, workers)


def _write_mds(folder: str, columns: dict[str, str], items: list[Item]) -> None:
    prepare_import()
    from streaming.base import MDSWriter

    with MDSWriter(out=folder, columns=columns, size_limit=None) as writer:
        for item in items:
            writer.write(item)


def _iterate(dataset: Any, loader: Any, workers: int) -> list[Item]:
    if not workers:
        return list(dataset)
    batches = loader(dataset, batch_size=4, num_workers=workers, collate_fn=list)
    return [item for batch in batches for item in batch]


if __name__ == "__main__":
    main()
