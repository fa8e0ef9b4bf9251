"""Payload of a Templar worker, read as data and checked completely.

A payload is a file of ``torch.save`` with the dict ``{"state_dict": ..., "global_step": ...}``. For
each parameter, the state has three entries, whose names are the parameter's name with one of these
endings, without a separator:

- ``idxs``: the index of each sent value within its tile. v0.2.80 sends int16 values in the shape of
  ``vals``. v2.1.28 sends a vector of bytes, with two indices of 12 bits in three bytes.
- ``vals``: the values as floats, or as the codes of bins in uint8. Their shape is that of the tiles
  (rows and columns, or one number of tiles for a vector), with the number of values per tile last.
- ``quant_params``: None for floats; for codes the tuple ``(shift, scale, offset, lookup, dtype)``.
  A code's value is ``lookup[code] + shift``, rounded to ``dtype``.

The state's ``metadata`` has the window. Nothing binds a payload to its worker.

Sources: ``src/tplr/compress.py`` and ``src/tplr/neurons.py`` of Templar.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch

from millrace.gradients.codec.chunks import Tiles
from millrace.gradients.codec.gradient_object import NORM_MOST, GradientError, Shapes
from millrace.gradients.templar.tiling import make_templar_tiles, restore_from_tiles
from millrace.schemas.gradient import ExclusionReason, Transform
from millrace.torchfile import FormatError, TensorInFile, TorchFile, TorchName

MetadataValue = None | bool | int | float | str | tuple["MetadataValue", ...] | dict[str, Any]
"""Value of a payload's metadata."""

_ENDINGS = ("idxs", "vals", "quant_params")
_TENSORS_EACH = 4  # indices, values, shift, lookup
_PICKLE_FOR_ALL, _PICKLE_FOR_EACH = 1 << 17, 4096  # bytes, without the names of parameters
_FILE_FOR_TENSOR = 1024  # bytes of the archive for a tensor, besides its values
_BINS_MOST = 256
_SCALE_LEAST, _SCALE_MOST = 1e-12, 1e4  # Templar's own limits
_METADATA_DEPTH, _METADATA_VALUES, _TEXT_MOST = 8, 10_000, 4096
_INTEGER_MOST = 1 << 63
_SORTED_AT_ONCE = 4096  # tiles, since the order of each takes four times its indices
_FLOATS = {
    "torch float16": torch.float16,
    "torch bfloat16": torch.bfloat16,
    "torch float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class ExpectedPayload:
    """Conditions that a payload must meet.

    Attributes:
        shapes: Shapes of the model's parameters by their names: vectors and matrices.
        k: Number of values that are sent of each tile (``topk_compression``). Smaller tiles are
            sent whole.
        transform: Transform of the tiles: that of v0.2.80 is the DCT, and v2.1.28 has none.
        window: Number of the window; None for any.
        max_norm: Largest L2 norm of all values.
    """

    shapes: Shapes = field(repr=False)
    k: int
    transform: Transform
    window: int | None = None
    max_norm: float = NORM_MOST

    @property
    def pickle_size(self) -> int:
        """Largest size of the pickle in bytes."""
        names = sum(len(name.encode()) * len(_ENDINGS) for name in self.shapes)
        return _PICKLE_FOR_ALL + names + _PICKLE_FOR_EACH * len(self.shapes)

    @property
    def tensors(self) -> int:
        """Largest number of tensors in a payload."""
        return _TENSORS_EACH * len(self.shapes)

    @property
    def size(self) -> int:
        """Largest size of a payload in bytes: that of indices in int64 and values in float32."""
        sent = 0
        for shape in self.shapes.values():
            tiles = make_templar_tiles(shape)
            sent += tiles.rows * tiles.columns * min(max(self.k, 2), tiles.height * tiles.width)
        fixed = self.pickle_size + _FILE_FOR_TENSOR * (self.tensors + 16)
        return fixed + sent * (8 + 4) + len(self.shapes) * 4 * (_BINS_MOST + 1)


@dataclass(frozen=True, slots=True)
class TileValues:
    """Values that a worker sent of each tile of a parameter.

    Attributes:
        tiles: Tiles, in rows.
        indices: Ascending indices within each tile, in rows of the tile: ``(tiles, k)``.
        values: Values at these indices: ``(tiles, k)``. With the DCT, they are coefficients.
    """

    tiles: Tiles
    indices: npt.NDArray[np.uint16] = field(repr=False)
    values: npt.NDArray[np.float32] = field(repr=False)

    def fill_tiles(self) -> npt.NDArray[np.float32]:
        """Return the values of all tiles, with zeros where none was sent."""
        size = self.tiles.height * self.tiles.width
        filled = np.zeros((len(self.values), size), np.float32)
        np.put_along_axis(filled, self.indices.astype(np.int64), self.values, axis=1)
        return filled


@dataclass(frozen=True, slots=True)
class TemplarPayload:
    """Payload that passed all checks.

    Attributes:
        window: Number of the window, from the metadata.
        global_step: Number of outer steps that the worker counted.
        metadata: Other metadata, as the worker sent it.
        transform: Transform of the tiles.
        parameters: Sent values by the names of the parameters.
        norm: L2 norm of all values.
    """

    window: int
    global_step: int
    metadata: Mapping[str, MetadataValue]
    transform: Transform
    parameters: Mapping[str, TileValues] = field(repr=False)
    norm: float

    def restore_change(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the dense change of a parameter, as Templar's workers decode it.

        Templar subtracts changes: a positive value lowers the weight.

        Args:
            name: Name of the parameter.
            shape: Shape of the parameter.
        """
        return restore_from_tiles(self.parameters[name].fill_tiles(), shape, self.transform)


def parse_payload(body: bytes, expected: ExpectedPayload) -> TemplarPayload:
    """Parse a payload, and check all of it. No code of the payload is executed.

    Memory: three times the size of the payload for the result, and while a parameter is read, at
    most eight times the size of its entries.

    Args:
        body: Bytes of the object, from any source.
        expected: Conditions that the payload must meet.

    Raises:
        GradientError: The payload does not meet the conditions.
        ConfigurationError: A shape of the model is one that Templar cannot send.
    """
    if len(body) > expected.size:
        raise GradientError(
            ExclusionReason.TOO_LARGE,
            f"{len(body):,} bytes, where {expected.size:,} are the most there are.",
        )
    try:
        file = TorchFile(body, most=expected.tensors, head=expected.pickle_size)
        return _parse(file, expected)
    except FormatError as error:
        sentence = f"It is not a payload of torch.save: {error}."
        raise GradientError(ExclusionReason.FORMAT, sentence) from error


def _parse(file: TorchFile, expected: ExpectedPayload) -> TemplarPayload:
    state = file.content.get("state_dict")
    step: Any = file.content.get("global_step")
    if set(file.content) != {"state_dict", "global_step"} or not isinstance(state, dict):
        raise GradientError(
            ExclusionReason.HEADER, "It is not a dict of a state_dict and a global_step."
        )
    if not _is_integer(step) or step < 0:
        raise GradientError(ExclusionReason.HEADER, "Its global_step is not a number of steps.")
    entries = cast("dict[str, Any]", state)
    metadata, window = _parse_metadata(entries.get("metadata"))
    if expected.window is not None and window != expected.window:
        raise GradientError(
            ExclusionReason.WINDOW, f"It is of window {window}, not of window {expected.window}."
        )
    _check_names(entries, expected.shapes)
    parameters: dict[str, TileValues] = {}
    squares = 0.0
    for name, shape in expected.shapes.items():
        sent = _parse_parameter(file, name, shape, entries, expected.k)
        parameters[name] = sent
        squares += float(np.square(sent.values, dtype=np.float64).sum())
    norm = math.sqrt(squares)
    most = min(expected.max_norm, NORM_MOST)
    if not norm <= most:
        raise GradientError(ExclusionReason.NORM, f"Its norm is {norm:.3g}, more than {most:.3g}.")
    return TemplarPayload(window, step, metadata, expected.transform, parameters, norm)


def _check_names(entries: Mapping[str, Any], shapes: Shapes) -> None:
    known = {"metadata"}
    for name in shapes:
        for ending in _ENDINGS[:2]:
            if name + ending not in entries:
                raise GradientError(ExclusionReason.TENSORS, f"{name} has no {ending}.")
        known.update(name + ending for ending in _ENDINGS)
    if entries.keys() - known:
        raise GradientError(
            ExclusionReason.TENSORS, "It has entries that belong to no parameter of the model."
        )


def _parse_metadata(found: Any) -> tuple[dict[str, MetadataValue], int]:
    if not isinstance(found, dict):
        raise GradientError(ExclusionReason.HEADER, "It has no metadata.")
    metadata = cast("dict[str, MetadataValue]", _copy_metadata(found, _METADATA_DEPTH, [0]))
    window: Any = metadata.pop("window", None)
    if not _is_integer(window) or window < 0:
        raise GradientError(ExclusionReason.HEADER, "Its metadata has no number of a window.")
    return metadata, window


def _copy_metadata(value: Any, depth: int, count: list[int]) -> MetadataValue:
    """Return a value without other types, and without more than some thousand values.

    Raises:
        GradientError: The value has other types, or too many values.
    """
    count[0] += 1
    if count[0] > _METADATA_VALUES or depth < 0:
        raise GradientError(ExclusionReason.HEADER, "Its metadata has too many values.")
    match value:
        case None | bool():
            return value
        case str() if len(value) <= _TEXT_MOST:
            return value
        case int() if abs(value) < _INTEGER_MOST:
            return value
        case float() if math.isfinite(value):
            return value
        case list() | tuple():
            parts = cast("list[Any]", value)
            return tuple(_copy_metadata(one, depth - 1, count) for one in parts)
        case dict():
            pairs = cast("dict[str, Any]", value).items()
            return {
                cast("str", _copy_metadata(name, depth - 1, count)): _copy_metadata(
                    one, depth - 1, count
                )
                for name, one in pairs
            }
        case _:
            raise GradientError(
                ExclusionReason.HEADER, "Its metadata has values other than texts and numbers."
            )


def _is_integer(value: Any) -> TypeGuard[int]:
    """Decide whether a value is an integer of at most 63 bits, and not a bool."""
    return type(value) is int and abs(value) < _INTEGER_MOST


def _parse_parameter(
    file: TorchFile, name: str, shape: tuple[int, ...], entries: Mapping[str, Any], k: int
) -> TileValues:
    try:
        return _ParameterReader(file, shape, k).read(
            *(entries.get(name + ending) for ending in _ENDINGS)
        )
    except (_ParameterError, FormatError) as error:
        raise GradientError(ExclusionReason.CODES, f"{name}: {error}.") from error


class _ParameterError(ValueError):
    """A parameter has a fault. The text has no words of the payload."""


class _ParameterReader:
    """Reader for the entries of one parameter."""

    def __init__(self, file: TorchFile, shape: tuple[int, ...], k: int) -> None:
        self._file = file
        self._tiles = make_templar_tiles(shape)
        self._grid = (self._tiles.rows, self._tiles.columns)[2 - len(shape) :]
        self._size = self._tiles.height * self._tiles.width
        self._k = min(k, self._size)

    def read(self, packed: Any, sent: Any, quant_params: Any) -> TileValues:
        if not isinstance(packed, TensorInFile) or not isinstance(sent, TensorInFile):
            raise _ParameterError("its idxs or vals are not a tensor")
        if packed.dtype == "uint8":  # Templar makes k even, to pack two indices in three bytes
            self._k = max(self._k - self._k % 2, 2)
            if self._k > self._size:
                raise _ParameterError("its tiles have one value, and packed indices need two")
        self._check_shapes(packed, sent)
        indices = self._read_indices(packed).reshape(-1, self._k)
        values = self._read_values(sent, quant_params).reshape(-1, self._k)
        _sort_tiles(indices, values)
        if (indices[:, 1:] == indices[:, :-1]).any():
            raise _ParameterError("an index is sent twice in a tile")
        return TileValues(self._tiles, indices, values)

    def _check_shapes(self, packed: TensorInFile, sent: TensorInFile) -> None:
        if not sent.shape or sent.shape[-1] != self._k:
            last = sent.shape[-1] if sent.shape else 0
            raise _ParameterError(f"it has {last} values per tile, where {self._k} are expected")
        if sent.shape[:-1] != self._grid:
            raise _ParameterError("the shape of its vals is not that of the tiles")
        if packed.dtype != "uint8" and packed.shape != sent.shape:
            raise _ParameterError("the shape of its idxs is not that of its vals")
        if packed.dtype == "uint8" and packed.shape != (sent.count // 2 * 3,):
            raise _ParameterError("its idxs have another length than three bytes for two vals")

    def _read_indices(self, packed: TensorInFile) -> npt.NDArray[np.uint16]:
        if packed.dtype not in {"uint8", "int16", "int32", "int64"}:
            raise _ParameterError("its idxs are not integers")
        found = self._file.read(packed)
        if packed.dtype == "uint8":
            found = _unpack_twelve_bits(found)
        if found.min() < 0 or found.max() >= self._size:
            raise _ParameterError(f"an index is beyond a tile of {self._size:,} values")
        return found.astype(np.uint16)

    def _read_values(self, sent: TensorInFile, quant_params: Any) -> npt.NDArray[np.float32]:
        with np.errstate(all="ignore"):  # values that are not finite are refused below
            if sent.dtype == "uint8":
                values = self._dequantise(self._file.read(sent), quant_params)
            elif quant_params is not None:
                raise _ParameterError("it has quant_params, but its vals are not codes")
            else:
                values = self._read_floats(sent)
        if not np.isfinite(values).all():
            raise _ParameterError("a value is not finite")
        return values

    def _read_floats(self, sent: TensorInFile) -> npt.NDArray[np.float32]:
        if sent.dtype not in {"float16", "bfloat16", "float32"}:
            raise _ParameterError("its vals are neither floats nor codes")
        found = self._file.read(sent)
        if sent.dtype == "bfloat16":
            return (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return found.astype(np.float32)

    def _dequantise(
        self, codes: npt.NDArray[np.uint8], quant_params: Any
    ) -> npt.NDArray[np.float32]:
        if not isinstance(quant_params, tuple | list):
            raise _ParameterError("its vals are codes, and it has no quant_params")
        if len(cast("tuple[Any, ...]", quant_params)) != 5:
            raise _ParameterError("its quant_params are not five values")
        shift, scale, offset, table, dtype = cast("tuple[Any, ...]", quant_params)
        if not isinstance(dtype, TorchName) or dtype.name not in _FLOATS:
            raise _ParameterError("its quant_params name no type of floats")
        if type(scale) is not float or not _SCALE_LEAST < scale < _SCALE_MOST:
            raise _ParameterError(
                f"its scale is not a number between {_SCALE_LEAST:g} and {_SCALE_MOST:g}"
            )
        if not isinstance(table, TensorInFile) or not 2 <= table.count <= _BINS_MOST:
            raise _ParameterError(f"its lookup is not a tensor of 2 to {_BINS_MOST} values")
        if len(table.shape) != 1:
            raise _ParameterError("its lookup is not a vector")
        if not _is_integer(offset) or offset != table.count // 2:
            raise _ParameterError("its offset is not half of its number of bins")
        if codes.max() >= table.count:
            raise _ParameterError("a code is beyond its lookup")
        lookup = self._read_floats(table)
        move = self._read_shift(shift)
        if not np.isfinite(lookup).all() or not np.isfinite(move):
            raise _ParameterError("its shift or lookup is not finite")
        moved = torch.from_numpy(lookup + move)  # pyright: ignore[reportUnknownMemberType]
        rounded = moved.to(_FLOATS[dtype.name]).to(torch.float32).numpy()
        return rounded[codes]

    def _read_shift(self, shift: Any) -> np.float32:
        if type(shift) is float:
            return np.float32(shift)
        if not isinstance(shift, TensorInFile) or shift.count != 1:
            raise _ParameterError("its shift is not one number")
        return self._read_floats(shift).reshape(-1)[0]


def _sort_tiles(indices: npt.NDArray[np.uint16], values: npt.NDArray[np.float32]) -> None:
    """Sort the indices of each tile, and their values with them, in place."""
    for first in range(0, len(indices), _SORTED_AT_ONCE):
        rows = slice(first, first + _SORTED_AT_ONCE)
        order = np.argsort(indices[rows], axis=1)
        indices[rows] = np.take_along_axis(indices[rows], order, axis=1)
        values[rows] = np.take_along_axis(values[rows], order, axis=1)


def _unpack_twelve_bits(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Return the indices of a vector with two of them in three bytes, the low bits first."""
    triples = packed.reshape(-1, 3).astype(np.uint16)
    low, middle, high = triples[:, 0], triples[:, 1], triples[:, 2]
    found = np.empty((len(triples), 2), np.uint16)
    found[:, 0] = low | ((middle & np.uint16(0x0F)) << np.uint16(8))
    found[:, 1] = (middle >> np.uint16(4)) | (high << np.uint16(4))
    return found.reshape(-1)
