"""Loader of pages, as that of Templar."""

import json
from typing import Any

import numpy as np
from fsspec import AbstractFileSystem
from pyarrow import parquet


class TemplarPages:
    """Pages of 100 rows, found and read as Templar's loader of an R2 bucket does it.

    Args:
        system: File system of the bucket.
        bucket: Name of the bucket, or a folder.
        folder: Prefix of the index objects.
    """

    ROWS = 100

    def __init__(self, system: AbstractFileSystem, bucket: str, folder: str) -> None:
        self._system = system
        index = system.cat_file(f"{bucket}/{folder}/_shard_sizes.json").decode()
        # Its guide replaces the name of the bucket in this file with `sed`.
        self._sizes = json.loads(index.replace('"path": "', f'"path": "{bucket}/'))
        self._files: dict[str, parquet.ParquetFile] = {}

    def count(self, config: str) -> int:
        return self._sizes[config]["total_rows"]

    def read(self, config: str, row: int) -> list[str]:
        shard, offset = self._find(config, row)
        if shard["path"] not in self._files:
            handle = self._system.open(shard["path"], "rb")
            self._files[shard["path"]] = parquet.ParquetFile(handle)
        file = self._files[shard["path"]]
        groups = file.num_row_groups
        rows_per_group = shard["num_rows"] // groups
        group = min(offset // rows_per_group, groups - 1)
        texts = file.read_row_group(group, columns=["text"])["text"].to_pylist()
        start = offset % rows_per_group
        return texts[start : start + self.ROWS]

    def _find(self, config: str, row: int) -> tuple[dict[str, Any], int]:
        shards = self._sizes[config]["shards"]
        ends = np.cumsum([shard["num_rows"] for shard in shards])
        number = int(np.searchsorted(ends, row, side="right"))
        return shards[number], row - int(ends[number] - shards[number]["num_rows"])
