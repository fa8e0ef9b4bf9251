"""Text of samples and of WebDataset shards, as rows of bytes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from webdataset import WebDataset  # pyright: ignore[reportAttributeAccessIssue]


def read_text(shards: Sequence[Path]) -> torch.Tensor:
    """Return the fields of all samples of shards, as `join_samples` does."""
    return join_samples(WebDataset([str(path) for path in shards], shardshuffle=False))


def join_samples(samples: Iterable[Mapping[str, Any]]) -> torch.Tensor:
    """Return the bytes of all fields of samples, joined by newlines: (bytes,), uint8."""
    text = bytearray()
    for sample in samples:
        for name, field in sample.items():
            if not name.startswith("__"):
                text += field
                text += b"\n"
    return torch.frombuffer(text, dtype=torch.uint8)


def sample_rows(
    text: torch.Tensor, rows: int, length: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return rows of a text: (rows, length), int64.

    Args:
        text: Text, as `read_text` returns it.
        rows: Number of rows.
        length: Bytes of each row.
        generator: Random generator of the positions; None for evenly spaced rows.
    """
    last = len(text) - length
    if generator is None:
        starts = torch.linspace(0, last, rows).long()
    else:
        starts = torch.randint(0, last + 1, (rows,), generator=generator)
    return text[starts[:, None] + torch.arange(length)].long()
