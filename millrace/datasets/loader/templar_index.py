"""Read the indexes that Templar's datasets have: configs, their files, and the rows of each."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

import numpy as np
import orjson
import yaml

from millrace import errors
from millrace.datasets.loader.draw import Page, PageTable
from millrace.datasets.sources.files import LocatedFiles, Patterns, SourceFiles
from millrace.schemas.dataset import FileRef
from millrace.storage import Store, read

_log = logging.getLogger(__name__)

SHARD_SIZES, METADATA = "_shard_sizes.json", "_metadata.yaml"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TemplarConfig:
    """Config of a dataset: a row of files.

    Attributes:
        name: Name of the config.
        split: Split of its rows.
        files: Path and number of rows of each file, in order.
    """

    name: str
    split: str
    files: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(rows for _, rows in self.files)

    def locate(self, start: int, end: int) -> list[tuple[str, int, int]]:
        """Return the files and the rows in each of them that are some rows of the config.

        Args:
            start: First row in the config.
            end: Row after the last one.

        Raises:
            ConfigurationError: The config has no such rows.
        """
        if not 0 <= start < end <= self.rows:
            raise errors.ConfigurationError(
                f"The config {self.name!r} has no rows from {start} to {end - 1} in {self.rows}. "
                "Draw the pages with the index of this dataset."
            )
        ends = np.cumsum([rows for _, rows in self.files])
        found: list[tuple[str, int, int]] = []
        for number in range(int(np.searchsorted(ends, start, "right")), len(ends)):
            path, rows = self.files[number]
            before = int(ends[number]) - rows
            if before >= end:
                break
            lower, upper = max(start, before) - before, min(end, int(ends[number])) - before
            if lower < upper:
                found.append((path, lower, upper))
        return found


def read_templar_index(store: Store | LocatedFiles) -> dict[str, TemplarConfig]:
    """Return the configs of a dataset by their names; empty if it has no index. Two requests.

    Args:
        store: Store or files of the dataset, below whose URL the index objects are.

    Raises:
        CorruptError: An index object cannot be read.
    """
    try:
        sizes = _read_object(store, SHARD_SIZES)
        metadata = _read_object(store, METADATA)
    except errors.NotFoundError:
        return {}
    try:
        listed: list[dict[str, Any]] = metadata.get("configs") or []
        names = [str(one["config_name"]) for one in listed]
        return {
            name: TemplarConfig(
                name,
                str(sizes[name].get("split", "train")),
                tuple((str(one["path"]), int(one["num_rows"])) for one in sizes[name]["shards"]),
            )
            for name in names
            if name != "default" and sizes.get(name)
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _make_error(store, SHARD_SIZES, error) from error


def group_by_folder(paths: Sequence[str], table: PageTable) -> dict[str, TemplarConfig]:
    """Return a config for each folder of files, for a dataset without an index.

    Args:
        paths: Paths of the listed files.
        table: Pages of the files.
    """
    grouped: dict[str, list[tuple[str, int]]] = {}
    for number, path in enumerate(paths):
        name = path.rpartition("/")[0] or "default"
        grouped.setdefault(name, []).append((path, table.count_rows(number)))
    return {name: TemplarConfig(name, "train", tuple(files)) for name, files in grouped.items()}


def match_files(
    configs: Sequence[TemplarConfig], paths: Sequence[str], patterns: Patterns | None = None
) -> dict[str, int]:
    """Return the number of the listed file of each path of configs.

    All paths in an index begin with the name of a bucket, and perhaps with a prefix. The shortest
    beginning counts without which one of them is the path of a file, and it is that of all: another
    file of the same name in another folder is not taken.

    Args:
        configs: Configs of a dataset.
        paths: Paths of the listed files.
        patterns: Patterns of the listed files, if others were not listed. They are left out.

    Raises:
        NotFoundError: A file of the index is not there.
    """
    numbers = {path: number for number, path in enumerate(paths)}
    named = [path for config in configs for path, _ in config.files]
    for start in _iterate_beginnings(named):
        found = {path: numbers[path[start:]] for path in named if path[start:] in numbers}
        if found:
            break
    else:
        start, found = 0, {}
    for path in named:
        if path not in found and (patterns is None or patterns.matches(path[start:])):
            raise errors.NotFoundError(
                f"{SHARD_SIZES} names {path}, and there is no such file. Restore the file, or make "
                "the index again."
            )
    return found


def find_named(
    files: SourceFiles, index: FileRef, paths: Sequence[str], patterns: Patterns
) -> set[str]:
    """Return the paths of listed files that ``_shard_sizes.json`` names.

    An index of which a file is not there is not that of the files, so all of them are returned,
    after a warning.

    Args:
        files: Files of the dataset.
        index: The index object.
        paths: Paths of the listed files.
        patterns: Patterns of the listed files.

    Raises:
        CorruptError: The index cannot be read.
    """
    if index.size > _MAX_BYTES:
        raise _make_error(files, index.path, ValueError(f"it has {index.size:,} bytes"))
    listed = set(paths)
    try:
        sizes: dict[str, dict[str, Any]] = orjson.loads(files.read(index))
        shards = chain.from_iterable(config["shards"] for config in sizes.values() if config)
        named = [str(shard["path"]) for shard in shards]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _make_error(files, index.path, error) from error
    missing = ""
    for start in _iterate_beginnings(named):
        chosen = {path[start:] for path in named if patterns.matches(path[start:])}
        if chosen and chosen <= listed:
            return chosen
        missing = min(chosen - listed, default=missing)
    if missing:
        _log.warning(
            "%s names %s, which is not there, so all files are read. Restore the file, or make "
            "that index again.",
            files.make_url(index.path),
            missing,
        )
    return listed


def _iterate_beginnings(paths: Sequence[str]) -> Iterator[int]:
    """Yield the lengths of the folders in which all paths are, from none on."""
    levels = zip(*(path.split("/")[:-1] for path in paths), strict=False)
    folder = [words[0] for words in takewhile(lambda words: len(set(words)) == 1, levels)]
    for depth in range(len(folder) + 1):
        yield len("/".join([*folder[:depth], ""]))


def make_pages(config: TemplarConfig, numbers: dict[str, int], start: int, end: int) -> list[Page]:
    """Return the pages of a loader that have some rows of a config.

    Raises:
        ConfigurationError: The config has no such rows.
    """
    return [Page(numbers[path], lower, upper) for path, lower, upper in config.locate(start, end)]


def _read_object(store: Store | LocatedFiles, key: str) -> Any:
    if isinstance(store, Store):
        body = read(store, key, max_size=_MAX_BYTES)
    else:
        file = store.find(key)
        if file is None:
            raise errors.NotFoundError(f"There is no {store.make_url(key)}.")
        if file.size > _MAX_BYTES:
            raise _make_error(store, key, ValueError(f"it has {file.size:,} bytes"))
        body = store.read(file)
    try:
        return orjson.loads(body) if key.endswith(".json") else yaml.safe_load(body)
    except (orjson.JSONDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise _make_error(store, key, error) from error


def _make_error(store: Store | SourceFiles, key: str, error: Exception) -> errors.CorruptError:
    return errors.CorruptError(
        f"{store.make_url(key)} is no index of a dataset ({type(error).__name__}: "
        f"{str(error)[:200]}). Make the index again."
    )
