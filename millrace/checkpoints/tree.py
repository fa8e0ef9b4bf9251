"""A training state as tensors, and a skeleton of all else as JSON. Nothing is pickled.

Each node of the skeleton is a plain JSON value, or a list that begins with a letter:
``["d", [key, value], ...]`` a dict, ``l`` a list, ``u`` a tuple, ``t`` a tensor by its name, ``n``
a numpy array, ``b`` bytes in base64, ``f`` a float that JSON has no words for, ``i`` an integer of
more than 64 bits, ``y`` a dtype.
"""

import base64
import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import orjson
import torch

from millrace.checkpoints.pieces import is_distributed
from millrace.errors import ConfigurationError, CorruptError

SKELETON = "#state"
"""The name of the tensor of bytes that the skeleton is stored as."""

_OWN = "#own-"
_INT64 = 1 << 63
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


def taken_apart(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state by their paths (``model.layers.0.weight``), and its skeleton.

    A tensor that stands in two places is there once, unless it is distributed. Tensors are not
    copied.

    Args:
        state: Nested dicts, lists and tuples of tensors, numpy arrays and plain values, such as
            the state dicts of a model, an optimizer, a scheduler and a loader.

    Raises:
        ConfigurationError: Something in it is none of these; its path is named.
    """
    tensors: dict[str, torch.Tensor] = {}
    skeleton = orjson.dumps(_Apart(tensors).node(state, ""))
    tensors[SKELETON] = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
    return tensors


def put_together(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state that `taken_apart` took apart; what is missing in it is left out.

    Raises:
        CorruptError: The skeleton is none.
    """
    try:
        skeleton = orjson.loads(tensors[SKELETON].numpy().tobytes())
        return _together(skeleton, tensors)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise CorruptError(
            f"The skeleton of a checkpoint's state is not readable: {error}"
        ) from error


def own_name(rank: int, name: str) -> str:
    """What a tensor of what a rank alone has is called in the checkpoint of all."""
    return f"{_OWN}{rank:06d}.{name}"


def own_rank(name: str) -> tuple[int, str] | None:
    """The rank and the name that `own_name` made this name of; None if it did not."""
    if not name.startswith(_OWN):
        return None
    rank, _, inner = name.removeprefix(_OWN).partition(".")
    return int(rank), inner


def is_skeleton(name: str) -> bool:
    """Whether a tensor is a skeleton: of the state, or of what a rank alone has."""
    own = own_rank(name)
    return (own[1] if own else name) == SKELETON


class _Apart:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._names: dict[tuple[Any, ...], str] = {}

    def node(self, value: Any, path: str) -> Any:  # noqa: PLR0911 - one a kind
        match value:
            case None | bool() | str():
                return value
            case int():
                return value if -_INT64 <= value < _INT64 else ["i", str(value)]
            case float():
                return value if math.isfinite(value) else ["f", str(value)]
            case torch.Tensor():
                return ["t", self._named(value, path)]
            case np.ndarray() | np.generic():
                return ["n", self._named(self._from_numpy(cast("Any", value), path), path)]
            case bytes():
                return ["b", base64.b64encode(value).decode()]
            case torch.dtype():
                return ["y", str(value).removeprefix("torch.")]
            case _:
                return self._inner(value, path)

    def _inner(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            pairs = ((self.node(k, path), self.node(v, _below(path, k))) for k, v in items)
            return ["d", *pairs]
        if type(value) in {list, tuple, torch.Size}:
            items = cast("list[Any]", value)
            inner = (self.node(item, _below(path, number)) for number, item in enumerate(items))
            return ["l" if isinstance(value, list) else "u", *inner]
        raise ConfigurationError(
            f"{path or 'The state'} is a {type(value).__name__}, which a checkpoint does not hold: "
            "give tensors, numpy arrays, numbers, text, bytes, and dicts, lists and tuples of them."
        )

    def _from_numpy(self, value: "np.ndarray[Any, Any] | np.generic", path: str) -> torch.Tensor:
        try:
            return torch.from_numpy(np.array(value))  # pyright: ignore[reportUnknownMemberType]
        except TypeError as error:
            raise ConfigurationError(
                f"{path} is a numpy array of {value.dtype}, which a checkpoint does not hold."
            ) from error

    def _named(self, tensor: torch.Tensor, path: str) -> str:
        spread = is_distributed(tensor)
        plain = (spread or type(tensor) in _PLAIN) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized:
            raise ConfigurationError(
                f"{path} is a {type(tensor).__name__} that is sharded by other means than DTensor, "
                "sparse or quantized, which a checkpoint does not hold: give the plain tensors "
                "that it is made of, or DTensors."
            )
        tensor = tensor.detach()
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        # A DTensor has no address, and of what is empty or elsewhere it says nothing.
        here = not spread and not tensor.is_meta and tensor.numel()
        if here and place in self._names:
            return self._names[place]
        name = f"#{path}" if path.startswith(_OWN) else path
        while name in self._tensors or name == SKELETON:
            name += "#"
        self._tensors[name] = tensor
        self._names[place] = name
        return name


def _below(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


_ABSENT = object()


def _together(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: PLR0911 - one a tag
    if not isinstance(node, list):
        return node
    tag, *rest = cast("list[Any]", node)
    match tag:
        case "d":
            items = ((_together(key, tensors), _together(item, tensors)) for key, item in rest)
            return {key: item for key, item in items if item is not _ABSENT}
        case "l" | "u":
            found = (_together(item, tensors) for item in rest)
            inner = [None if item is _ABSENT else item for item in found]
            return inner if tag == "l" else tuple(inner)
        case "t":
            return tensors.get(rest[0], _ABSENT)
        case "n":
            array = tensors.get(rest[0])
            return _ABSENT if array is None else array.cpu().numpy()
        case "b":
            return base64.b64decode(rest[0])
        case "f":
            return float(rest[0])
        case "i":
            return int(rest[0])
        case "y":
            return getattr(torch, rest[0])
        case _:
            raise ValueError(f"{tag!r} is no kind of value")
