"""Writer of gradient payloads as Templar's workers send them, for tests of the reader.

It is written from the published algorithm with torch alone, and imports no `millrace`. Each payload
is returned with the dense changes that Templar's own workers would decode from it.
"""

import io
import math
from dataclasses import dataclass, field
from typing import Any

import torch


def save(content: object) -> bytes:
    """Return a file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def split_length(length: int, most: int = 64) -> int:
    """Return the largest divisor of a length that is at most 64."""
    return max(size for size in range(1, min(length, most) + 1) if length % size == 0)


def compute_cosines(size: int) -> torch.Tensor:
    """Return the orthonormal DCT-II: row n has the n-th coefficient's weights."""
    rows = []
    for n in range(size):
        factor = math.sqrt((1 if n == 0 else 2) / size)
        rows.append(
            [factor * math.cos(math.pi * n * (2 * j + 1) / (2 * size)) for j in range(size)]
        )
    return torch.tensor(rows, dtype=torch.float64)


def cut(change: torch.Tensor) -> torch.Tensor:
    """Return the tiles of a parameter: ``(y, x, h, w)``, or ``(x, w)`` of a vector."""
    if change.ndim == 1:
        return change.reshape(-1, split_length(change.shape[0]))
    h, w = (split_length(length) for length in change.shape)
    rows = [torch.stack(list(row.split(w, dim=1))) for row in change.split(h, dim=0)]
    return torch.stack(rows)


def join(tiles: torch.Tensor) -> torch.Tensor:
    """Return the parameter of some tiles."""
    if tiles.ndim == 2:
        return tiles.reshape(-1)
    return torch.cat([torch.cat(list(row), dim=1) for row in tiles], dim=0)


def transform(tiles: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Return the DCT of each tile, or its inverse."""
    across = compute_cosines(tiles.shape[-1])
    if tiles.ndim == 2:
        done = tiles.double() @ (across if inverse else across.T)
        return done.to(tiles.dtype)
    down = compute_cosines(tiles.shape[-2])
    if inverse:
        return (down.T @ tiles.double() @ across).to(tiles.dtype)
    return (down @ tiles.double() @ across.T).to(tiles.dtype)


def pack_twelve_bits(indices: torch.Tensor) -> torch.Tensor:
    """Return two indices in three bytes each: a number of 24 bits, the first index lowest."""
    out = bytearray()
    flat = indices.flatten().tolist()
    for first, second in zip(flat[::2], flat[1::2], strict=True):
        out += (first | second << 12).to_bytes(3, "little")
    return torch.tensor(list(out), dtype=torch.uint8)


def quantise(sent: torch.Tensor, bins: int) -> tuple[torch.Tensor, tuple[Any, ...], torch.Tensor]:
    """Return the codes, the parameters, and the values that a receiver decodes."""
    shift = sent.mean()
    centred = sent - shift
    scale = float(6 * centred.norm() / math.sqrt(max(1, centred.numel() - 1)) / bins)
    scale = scale if scale > 0 else 1.0
    codes = (centred.float() / scale + bins // 2).round().clamp(0, bins - 1).to(torch.uint8)
    lookup = torch.zeros(bins)
    for code in codes.unique().tolist():
        lookup[code] = centred.float()[codes == code].mean()
    decoded = (lookup[codes.long()] + shift).to(sent.dtype)
    return codes, (shift, scale, bins // 2, lookup, sent.dtype), decoded


@dataclass
class Written:
    """State of a payload, and the changes that a receiver decodes."""

    state: dict[str, Any]
    decoded: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, global_step: int = 5) -> bytes:
        """Return the bytes of the payload."""
        return save({"state_dict": self.state, "global_step": global_step})


def write_payload(
    changes: dict[str, torch.Tensor],
    *,
    k: int,
    window: int = 7,
    dct: bool = False,
    packed: bool = True,
    bins: int | None = 4,
    **metadata: Any,
) -> Written:
    """Compress changes. The defaults are those of v2.1.28.

    Args:
        changes: Changes of all parameters.
        k: Number of values per tile.
        window: Number of the window.
        dct: Whether coefficients are sent: v0.2.80 does.
        packed: Whether indices have 12 bits; otherwise int16.
        bins: Number of bins of the quantiser; None for floats.
        metadata: Other metadata.
    """
    written = Written({"metadata": {"window": window, **metadata}})
    for name, change in changes.items():
        tiles = transform(cut(change)) if dct else cut(change)
        rows = tiles.flatten(2) if tiles.ndim == 4 else tiles
        count = min(k, rows.shape[-1])
        count = max(count, 2) // 2 * 2 if packed else max(count, 1)
        indices = rows.abs().topk(count, dim=-1, sorted=False).indices
        sent = rows.gather(-1, indices)
        values, params, decoded = quantise(sent, bins) if bins else (sent, None, sent)
        written.state[f"{name}idxs"] = (
            pack_twelve_bits(indices) if packed else indices.to(torch.int16)
        )
        written.state[f"{name}vals"] = values
        written.state[f"{name}quant_params"] = params
        dense = torch.zeros_like(rows).scatter(-1, indices, decoded).reshape(tiles.shape)
        written.decoded[name] = join(transform(dense, inverse=True) if dct else dense)
    return written
