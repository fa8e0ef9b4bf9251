"""Peer in PyTorch: the codec and the merge of Templar, from their published formulas.

DeMo (arXiv 2411.19870, §3) selects the ``k`` largest values of the DCT-II of each tile of 64 by 64.
SparseLoCo (arXiv 2508.15706, §3) selects the ``k`` largest values of each chunk of 4096 without a
transform. The quantiser is that of Templar (github.com/one-covenant/templar, `compress.py`): it
divides six standard deviations around the mean of a tensor's sent values into four bins. A value
decodes to the mean of its bin. An index takes twelve bits, and a value one byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE, CHUNK, K, BINS = 64, 4096, 64, 4


@dataclass(frozen=True, slots=True)
class CompressedTensor:
    """Compressed matrix.

    Attributes:
        indices: Indices of the sent values in their chunks, in twelve bits each.
        codes: Codes of the sent values: (chunks, k), uint8.
        table: Decoded value of each code: (4,), float32.
        shape: Shape of the matrix.
    """

    indices: torch.Tensor
    codes: torch.Tensor
    table: torch.Tensor
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.indices.numel() + self.codes.numel() + 4 * self.table.numel()


def make_dct_basis() -> torch.Tensor:
    """Return the matrix of the orthonormal DCT-II of 64 values."""
    n = torch.arange(TILE, dtype=torch.float64)
    rows = torch.cos(torch.pi / TILE * (n[None] + 0.5) * n[:, None]) * (2 / TILE) ** 0.5
    rows[0] /= 2**0.5
    return rows.float()


def encode(tensor: torch.Tensor, dct: torch.Tensor | None) -> CompressedTensor:
    """Compress a matrix. Its sides must be multiples of 64."""
    rows, columns = tensor.shape
    tiles = tensor.view(rows // TILE, TILE, columns // TILE, TILE).permute(0, 2, 1, 3)
    if dct is None:
        chunks = tensor.reshape(-1, CHUNK)
    else:
        chunks = torch.einsum("xyhw,ih,jw->xyij", tiles, dct, dct).reshape(-1, CHUNK)
    indices = torch.topk(chunks.abs(), K, dim=1, largest=True, sorted=False).indices
    values = torch.gather(chunks, 1, indices)
    codes, table = _quantise(values)
    return CompressedTensor(_pack_indices(indices), codes, table, (rows, columns))


def decode(sent: CompressedTensor, dct: torch.Tensor | None) -> torch.Tensor:
    """Decompress a matrix."""
    rows, columns = sent.shape
    indices = unpack_indices(sent)
    values = sent.table[sent.codes.long()]
    chunks = torch.zeros(rows * columns // CHUNK, CHUNK, device=values.device)
    chunks.scatter_(1, indices, values)
    if dct is None:
        return chunks.view(rows, columns)
    tiles = chunks.view(rows // TILE, columns // TILE, TILE, TILE)
    return torch.einsum("xyij,ih,jw->xhyw", tiles, dct, dct).reshape(rows, columns)


def merge(senders: Sequence[CompressedTensor]) -> torch.Tensor:
    """Merge matrices into a dense one, with their norms clipped to the median norm.

    Each value is the mean over the senders of that value.
    """
    values = [sent.table[sent.codes.long()] for sent in senders]
    norms = torch.stack([value.norm() for value in values])
    scales = (norms.median() / norms).clamp(max=1.0)
    indices = torch.cat([unpack_indices(sent) for sent in senders], 1)
    scaled = torch.cat([value * scale for value, scale in zip(values, scales, strict=True)], 1)
    rows, columns = senders[0].shape
    chunks = torch.zeros(rows * columns // CHUNK, CHUNK)
    chunks.scatter_reduce_(1, indices, scaled, reduce="mean", include_self=False)
    return chunks.view(rows, columns)


def unpack_indices(sent: CompressedTensor) -> torch.Tensor:
    """Return the indices of the sent values in no order: (chunks, k), int64."""
    a, b, c = sent.indices.to(torch.int64).unbind(1)
    return torch.stack((a | ((b & 0xF) << 8), (b >> 4) | (c << 4)), 1).view(sent.codes.shape)


def _quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of values, and the table of the decoded values."""
    shift = values.mean()
    centred = values - shift
    scale = 6 * centred.norm() / (centred.numel() - 1) ** 0.5 / BINS
    codes = (centred / scale + BINS // 2).round().clamp(0, BINS - 1).to(torch.uint8)
    flat = codes.flatten().long()
    empty = torch.zeros(BINS, device=values.device)
    sums = empty.scatter_add(0, flat, centred.flatten())
    counts = empty.scatter_add(0, flat, torch.ones(flat.numel(), device=values.device))
    return codes, sums / counts.clamp(min=1) + shift


def _pack_indices(indices: torch.Tensor) -> torch.Tensor:
    """Pack each two indices of twelve bits into three bytes."""
    first, second = indices.view(-1, 2).to(torch.int32).unbind(1)
    packed = (first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4)
    return torch.stack(packed, 1).to(torch.uint8)
