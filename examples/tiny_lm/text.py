"""Text out of WebDataset shards, as rows of bytes."""

from collections.abc import Sequence
from pathlib import Path

import torch
import webdataset


def text_of(shards: Sequence[Path]) -> torch.Tensor:
    """All that the samples of shards say, one after the other: (bytes,), uint8."""
    said = bytearray()
    for sample in webdataset.WebDataset([str(path) for path in shards], shardshuffle=False):
        for name, field in sample.items():
            if not name.startswith("__"):
                said += field
                said += b"\n"
    return torch.frombuffer(said, dtype=torch.uint8)


def rows_of(
    text: torch.Tensor, rows: int, length: int, dice: torch.Generator | None = None
) -> torch.Tensor:
    """Draw rows of the text: (rows, length), int64.

    Args:
        text: As of `text_of`.
        rows: How many.
        length: Of each.
        dice: Where from; left out, they are spread evenly over the text.
    """
    last = len(text) - length
    if dice is None:
        starts = torch.linspace(0, last, rows).long()
    else:
        starts = torch.randint(0, last + 1, (rows,), generator=dice)
    return text[starts[:, None] + torch.arange(length)].long()
