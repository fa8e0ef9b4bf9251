"""One pass of the demo: a parquet file becomes WebDataset and tokens, and both are read back."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from webdataset import WebDataset  # pyright: ignore[reportAttributeAccessIssue]

from examples import byte_tokens

DATASET = "python-tokens"


def write_parquet(path: Path, texts: Path) -> None:
    """Write the modules of a folder as the rows of a parquet file, unless the file exists."""
    if path.exists():
        return
    modules = sorted(texts.glob("*.py"))
    table = pa.table(
        {
            "name": [module.name for module in modules],
            "text": [module.read_text(encoding="utf-8", errors="replace") for module in modules],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    pq.write_table(table, unfinished, row_group_size=64)
    unfinished.rename(path)


def shard(store: Path, source: Path) -> None:
    """Make both formats by the flow ``shard-dataset``, in one pass over the parquet file."""
    from flows.shard_dataset import shard_dataset
    from millrace.datasets import ShardingSettings
    from tasks.locations import SourceInput

    shard_dataset(
        dataset=DATASET,
        source=SourceInput.model_validate(
            {"url": source.as_uri(), "kind": "parquet", "columns": {"txt": "text"}}
        ),
        destination=store.as_uri(),
        sharding=ShardingSettings.model_validate(
            {
                "formats": ["webdataset", "tokens"],
                "transforms": [{"kind": "function", "function": f"{byte_tokens.__file__}:encode"}],
                "types": {"tokens": "uint16[]", "txt": "str"},
                "shard_bytes": "4MiB",
                "partition_bytes": "2MiB",
            }
        ),
    )


def compare(store: Path, source: Path) -> str:
    """Read all rows and both formats, and return a sentence about them.

    Raises:
        ValueError: A row is missing in a format, or is in it twice, or differs.
    """
    rows = Counter(
        str(text)
        for path in source.glob("*.parquet")
        for text in pq.read_table(path)["text"].to_pylist()
    )
    shards = store / DATASET / "shards"
    samples = Counter(_read_webdataset(shards / "webdataset/train"))
    documents = Counter(_read_tokens(shards / "tokens/train"))
    if not rows == samples == documents:
        raise ValueError(
            f"{rows.total()} rows became {samples.total()} samples of WebDataset and "
            f"{documents.total()} of tokens, or have other texts."
        )
    size = sum(len(text.encode()) * count for text, count in rows.items())
    return (
        f"{DATASET}: {rows.total()} rows of parquet, read back as {samples.total()} samples of "
        f"WebDataset and {documents.total()} of tokens, {size / 1e6:.1f} MB of equal text"
    )


def _read_webdataset(folder: Path) -> Iterator[str]:
    shards = sorted(map(str, folder.glob("*.tar")))
    for sample in WebDataset(shards, shardshuffle=False):
        yield sample["txt"].decode()


def _read_tokens(folder: Path) -> Iterator[str]:
    """Yield the texts of token shards, which are not read as a whole but mapped."""
    for path in sorted(folder.glob("*.npy")):
        tokens = np.load(path, mmap_mode="r")
        start = 0
        for end in np.flatnonzero(tokens == byte_tokens.END):
            yield tokens[start:end].astype(np.uint8).tobytes().decode()
            start = end + 1
