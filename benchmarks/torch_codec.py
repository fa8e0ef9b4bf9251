"""The codec and the merge of Templar in torch, from their published formulas: the peer.

DeMo (arXiv 2411.19870, §3): tiles of 64 by 64, DCT-II, the ``k`` largest of each. SparseLoCo
(arXiv 2508.15706, §3): the ``k`` largest of each chunk of 4096, without a transform. The quantiser
is Templar's (github.com/one-covenant/templar, `compress.py`): of all sent values of a tensor the
mean and six standard deviations, cut into four bins, each decoded to the mean of what fell into it;
a place takes twelve bits, a value a byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE, CHUNK, K, BINS = 64, 4096, 64, 4


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor on its way: (chunks, k) places in twelve bits each, (chunks, k) codes, a table."""

    places: torch.Tensor
    codes: torch.Tensor
    table: torch.Tensor
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.places.numel() + self.codes.numel() + 4 * self.table.numel()


def basis() -> torch.Tensor:
    """Return the DCT-II of 64 values, orthonormal."""
    n = torch.arange(TILE, dtype=torch.float64)
    rows = torch.cos(torch.pi / TILE * (n[None] + 0.5) * n[:, None]) * (2 / TILE) ** 0.5
    rows[0] /= 2**0.5
    return rows.float()


def encode(tensor: torch.Tensor, dct: torch.Tensor | None) -> Sent:
    """Compress a matrix whose sides are multiples of 64."""
    rows, columns = tensor.shape
    tiles = tensor.view(rows // TILE, TILE, columns // TILE, TILE).permute(0, 2, 1, 3)
    if dct is None:
        chunks = tensor.reshape(-1, CHUNK)
    else:
        chunks = torch.einsum("xyhw,ih,jw->xyij", tiles, dct, dct).reshape(-1, CHUNK)
    places = torch.topk(chunks.abs(), K, dim=1, largest=True, sorted=False).indices
    values = torch.gather(chunks, 1, places)
    codes, table = _quantised(values)
    return Sent(_packed(places), codes, table, (rows, columns))


def decode(sent: Sent, dct: torch.Tensor | None) -> torch.Tensor:
    """Return the matrix that was sent."""
    rows, columns = sent.shape
    places = places_of(sent)
    values = sent.table[sent.codes.long()]
    chunks = torch.zeros(rows * columns // CHUNK, CHUNK, device=values.device)
    chunks.scatter_(1, places, values)
    if dct is None:
        return chunks.view(rows, columns)
    tiles = chunks.view(rows // TILE, columns // TILE, TILE, TILE)
    return torch.einsum("xyij,ih,jw->xhyw", tiles, dct, dct).reshape(rows, columns)


def merge(senders: Sequence[Sent]) -> torch.Tensor:
    """Return the mean over those that sent each value, norms clipped to their median; dense."""
    values = [sent.table[sent.codes.long()] for sent in senders]
    norms = torch.stack([value.norm() for value in values])
    scales = (norms.median() / norms).clamp(max=1.0)
    places = torch.cat([places_of(sent) for sent in senders], 1)
    scaled = torch.cat([value * scale for value, scale in zip(values, scales, strict=True)], 1)
    rows, columns = senders[0].shape
    chunks = torch.zeros(rows * columns // CHUNK, CHUNK)
    chunks.scatter_reduce_(1, places, scaled, reduce="mean", include_self=False)
    return chunks.view(rows, columns)


def places_of(sent: Sent) -> torch.Tensor:
    """(chunks, k), in no order."""
    a, b, c = sent.places.to(torch.int64).unbind(1)
    return torch.stack((a | ((b & 0xF) << 8), (b >> 4) | (c << 4)), 1).view(sent.codes.shape)


def _quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shift = values.mean()
    centred = values - shift
    scale = 6 * centred.norm() / (centred.numel() - 1) ** 0.5 / BINS
    codes = (centred / scale + BINS // 2).round().clamp(0, BINS - 1).to(torch.uint8)
    flat = codes.flatten().long()
    empty = torch.zeros(BINS, device=values.device)
    sums = empty.scatter_add(0, flat, centred.flatten())
    counts = empty.scatter_add(0, flat, torch.ones(flat.numel(), device=values.device))
    return codes, sums / counts.clamp(min=1) + shift


def _packed(places: torch.Tensor) -> torch.Tensor:
    """Two places of twelve bits in three bytes."""
    first, second = places.view(-1, 2).to(torch.int32).unbind(1)
    three = (first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4)
    return torch.stack(three, 1).to(torch.uint8)
