"""Layout of tensors in parts: the files of a checkpoint.

A part is a safetensors file (https://github.com/huggingface/safetensors, "Format"): the
length of the header in eight bytes, the header in JSON, then the tensors. Its bytes depend only on
the tensors, so equal tensors make equal files on any machine.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import orjson
import torch

from millrace.checkpoints.tensor_shards import TensorShard
from millrace.errors import ConfigurationError, CorruptError

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_SIZE = 100_000_000  # bytes: the limit of safetensors
_RESERVED_NAME = "__metadata__"  # reserved by safetensors for text
_DTYPES_BY_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES_BY_DTYPE = {dtype: name for name, dtype in _DTYPES_BY_NAME.items()}


@dataclass(frozen=True, slots=True)
class Box:
    """Box of a tensor in a part: some rows of the tensor, or all of it.

    Attributes:
        tensor: Name of the tensor.
        name: Name of the box in the part.
        dtype: Type of the elements.
        start: First index of the box in each dimension of the tensor.
        shape: Shape of the box.
        offset: Offset of the first byte in the part.
        size: Size in bytes.
    """

    tensor: str
    name: str
    dtype: torch.dtype
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Layout of one part.

    Attributes:
        head: Bytes before the tensors: the header and its length.
        boxes: Boxes in the order of their bytes.
        size: Size of the file in bytes.
    """

    head: bytes
    boxes: tuple[Box, ...]
    size: int


def iterate_layouts(shards: Mapping[str, TensorShard], part_bytes: int) -> Iterator[PartLayout]:
    """Lay tensors out in parts, in their order. A large tensor is cut by rows.

    Args:
        shards: Part of each tensor that this process holds, by the tensor's name.
        part_bytes: Largest size of a part in bytes. Only a single larger row exceeds it.

    Raises:
        ConfigurationError: safetensors has no name for the type of a tensor.
    """
    waiting: list[Box] = []
    room = part_bytes
    for box in _iterate_boxes(shards, part_bytes):
        if waiting and box.size > room:
            yield _make_layout(waiting)
            waiting, room = [], part_bytes
        waiting.append(box)
        room -= box.size
    if waiting:
        yield _make_layout(waiting)


def parse_dtype(name: str) -> torch.dtype:
    """Return the type with a name of safetensors.

    Raises:
        CorruptError: No type has this name.
    """
    try:
        return _DTYPES_BY_NAME[name]
    except KeyError:
        raise CorruptError(f"A checkpoint's tensor is of the unknown type {name!r}.") from None


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in safetensors.

    Raises:
        ConfigurationError: safetensors has no name for the type.
    """
    try:
        return _NAMES_BY_DTYPE[dtype]
    except KeyError:
        raise ConfigurationError(f"safetensors has no name for {dtype}: convert it.") from None


def read_boxes(body: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors of a part's file, as views of its bytes.

    Raises:
        CorruptError: The bytes are not a safetensors file, or do not match its header.
    """
    try:
        return dict(_iterate_views(body))
    except (struct.error, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CorruptError(f"A part of a checkpoint is no safetensors file: {error}") from error


def _iterate_boxes(shards: Mapping[str, TensorShard], part_bytes: int) -> Iterator[Box]:
    for tensor, shard in shards.items():
        local, (first, *inner) = shard.local, shard.start or (0,)
        if local.dtype not in _NAMES_BY_DTYPE:
            raise ConfigurationError(
                f"{tensor} is of type {local.dtype}, which safetensors has no name for: convert it."
            )
        shape, width = tuple(local.shape), local.dtype.itemsize
        rows = shape[0] if shape else 1
        fits = local.numel() * width <= part_bytes
        step = rows if fits else max(1, part_bytes * rows // (local.numel() * width))
        for at in range(0, max(rows, 1), max(step, 1)):
            start = (first + at, *inner) if shape else ()
            box = (min(step, rows - at), *shape[1:]) if shape else ()
            name = _format_box_name(tensor, start, box, shard.shape)
            yield Box(tensor, name, local.dtype, start, box, 0, prod(box) * width)


def _format_box_name(
    tensor: str, start: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]
) -> str:
    """Return the name of a box: ``w``, or with Python's slices ``w[0:8,16:32]``."""
    cut = max((axis for axis, size in enumerate(shape) if size != whole[axis]), default=-1)
    edges = list(zip(start, shape, strict=True))[: cut + 1]
    slices = ",".join(f"{at}:{at + size}" for at, size in edges)
    return f"{tensor}[{slices}]" if slices else tensor


def _make_layout(boxes: list[Box]) -> PartLayout:
    # The widest types come first, as in safetensors, so that each is aligned to its width.
    ordered = sorted(boxes, key=lambda box: -box.dtype.itemsize)
    header: dict[str, Any] = {}
    at = 0
    for box in ordered:
        name = box.name
        while name in header or name == _RESERVED_NAME:  # a tensor may have the name ``w[0:8]``
            name += "#"
        header[name] = {
            "dtype": get_dtype_name(box.dtype),
            "shape": box.shape,
            "data_offsets": (at, at + box.size),
        }
        at += box.size
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    head = _LENGTH.pack(len(text)) + text
    placed: list[Box] = []
    offset = len(head)
    for box, name in zip(ordered, header, strict=True):
        placed.append(replace(box, name=name, offset=offset))
        offset += box.size
    return PartLayout(head, tuple(placed), offset)


def _iterate_views(body: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    (length,) = _LENGTH.unpack_from(body)
    if length > _MAX_HEADER_SIZE:
        raise ValueError("its header is too long")
    header: dict[str, Any] = orjson.loads(body[_LENGTH.size : _LENGTH.size + length])
    data = body[_LENGTH.size + length :]
    header.pop(_RESERVED_NAME, None)
    end = 0
    for name, said in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = said["data_offsets"]
        dtype, shape = parse_dtype(said["dtype"]), tuple(said["shape"])
        if begin != end or stop - begin != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} is not where it should be")
        end = stop
        flat = (
            torch.frombuffer(data[begin:stop], dtype=dtype)
            if stop > begin
            else torch.empty(0, dtype=dtype)
        )
        yield name, flat.view(shape)
    if end != len(data):
        raise ValueError("it does not end where its tensors do")
