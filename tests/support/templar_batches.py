"""Batches as Templar's loader makes them, written down plainly from its description.

Documents are truncated to a sequence and end with the end token. Their tokens are one long list.
It is cut at end tokens; each document then gets one end token, or as many as fill its sequence.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def draw(
    rows: dict[str, int], seed: int, offset: int, count: int, page_rows: int = 100
) -> list[tuple[str, int]]:
    """Return the config and the first row of each page."""
    numbers = np.random.default_rng(hash(seed) & 0xFFFFFFFF)
    numbers.bit_generator.advance(offset)  # type: ignore[attr-defined]
    drawn: list[tuple[str, int]] = []
    for _ in range(count):
        name = str(numbers.choice(sorted(rows)))
        drawn.append((name, int(numbers.integers(0, rows[name] - 1 - page_rows))))
    return drawn


def make_batches(
    documents: Sequence[Sequence[int]],
    end: int,
    batch_size: int,
    length: int,
    *,
    pack: bool,
    truncate: bool = True,
) -> list[npt.NDArray[np.int64]]:
    """Return the batches of documents, given without their end tokens.

    Args:
        documents: Tokens of each document.
        end: End token.
        batch_size: Sequences of a batch.
        length: Tokens of a sequence.
        pack: Whether a document gets one end token, and is not filled up.
        truncate: Whether documents are truncated to a sequence, as in Templar's loader.
    """
    padded: list[int] = []
    for document in documents:
        kept = list(document[:length] if truncate else document)
        if not kept:
            continue
        padded += kept
        padded += [end] * (1 if pack else -len(kept) % length)
    size = batch_size * length
    return [
        np.array(padded[start : start + size]).reshape(batch_size, length)
        for start in range(0, len(padded) - size + 1, size)
    ]
