"""Conversion of a training state to tensors and a JSON skeleton, without pickle.

Each node of the skeleton is a plain JSON value, or a list that begins with a letter:
``["d", [key, value], ...]`` a dict, ``l`` a list, ``u`` a tuple, ``t`` the name of a tensor, ``n``
the name of a numpy array, ``b`` bytes in base64, ``f`` a float that JSON cannot represent, ``i`` an
integer of more than 64 bits in hexadecimal, ``y`` a dtype. Numbers and text of other classes
(numpy's scalars, enumerations) become plain values, also as keys.
"""

import base64
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import orjson
import torch

from millrace import errors
from millrace.checkpoints.tensor_shards import is_distributed
from millrace.errors import ConfigurationError, CorruptError

SKELETON = "#state"
"""Name of the tensor of bytes that stores the skeleton."""

_OWN_PREFIX = "#own-"
_INT64 = 1 << 63
_MAX_DEPTH = 100  # levels: the JSON library writes 254, and a dict needs two
_MAX_PATH_LENGTH = 200  # characters of a path in an error message
_SEQUENCE_TYPES = {list, tuple, torch.Size}
_PLAIN_TENSOR_TYPES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


def flatten_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by their paths (``model.layers.0.weight``), and its skeleton.

    A tensor with two paths is returned once, unless it is distributed. Tensors are not copied. The
    state is restored from the skeleton and compared before the function returns.

    Args:
        state: Nested dicts, lists and tuples of tensors, numpy arrays and plain values, such as
            the state dicts of a model, an optimizer, a scheduler and a loader.

    Raises:
        ConfigurationError: A value has another type, contains itself, or could not be restored.
            The message has its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    skeleton = orjson.dumps(_StateFlattener(tensors).make_node(state, ""))
    tensors[SKELETON] = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
    different = _find_difference(state, unflatten_state(tensors), "")
    if different:
        raise ConfigurationError(
            f"{different} could not be restored as it is: give plain tensors, numbers and text."
        )
    return tensors


def unflatten_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state of which `flatten_state` returned the tensors. Missing tensors are left out.

    Raises:
        CorruptError: The skeleton is missing or invalid.
    """
    try:
        skeleton = orjson.loads(tensors[SKELETON].numpy().tobytes())
        return _restore_node(skeleton, tensors)
    except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise CorruptError(
            f"The skeleton of a checkpoint's state is not readable: {error}"
        ) from error


def find_array_names(skeleton: torch.Tensor) -> set[str]:
    """Return the names of the tensors that store numpy arrays.

    Raises:
        CorruptError: The skeleton is invalid.
    """

    def iterate_names(node: Any) -> Iterator[str]:
        if isinstance(node, list):
            tag, *rest = cast("list[Any]", node)
            if tag == "n":
                yield rest[0]
            elif tag in {"d", "l", "u"}:
                for item in rest:
                    yield from iterate_names(["l", *item] if tag == "d" else item)

    try:
        return set(iterate_names(orjson.loads(skeleton.numpy().tobytes())))
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise CorruptError(
            f"The skeleton of a checkpoint's state is not readable: {error}"
        ) from error


def make_own_name(rank: int, name: str) -> str:
    """Return the name in a checkpoint for a tensor that only one rank has."""
    return f"{_OWN_PREFIX}{rank:06d}.{name}"


def parse_own_name(name: str) -> tuple[int, str] | None:
    """Return the rank and the tensor's name from the result of `make_own_name`; None for others."""
    if not name.startswith(_OWN_PREFIX):
        return None
    rank, _, inner = name.removeprefix(_OWN_PREFIX).partition(".")
    return int(rank), inner


def is_skeleton(name: str) -> bool:
    """Decide whether a name is that of a skeleton, of the whole state or of one rank's own."""
    own = parse_own_name(name)
    return (own[1] if own else name) == SKELETON


class _StateFlattener:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._names: dict[tuple[Any, ...], str] = {}
        self._around: list[int] = []  # the ids of the enclosing containers, outermost first

    def make_node(self, value: Any, path: str) -> Any:
        match value:
            case torch.Tensor():
                return ["t", self._register_tensor(value, path)]
            case np.ndarray():
                return ["n", self._register_tensor(_from_numpy(cast("Any", value), path), path)]
            case _ if isinstance(value, Mapping) or type(value) in _SEQUENCE_TYPES:
                return self._make_container_node(value, path)
            case _:
                return _make_leaf_node(value, path)

    def _make_container_node(self, value: Any, path: str) -> Any:
        if id(value) in self._around:
            raise ConfigurationError(
                f"{_format_path(path)} is a {type(value).__name__} that contains itself, which a "
                "checkpoint does not hold: leave it out."
            )
        if len(self._around) == _MAX_DEPTH:
            raise ConfigurationError(
                f"{_format_path(path)} is nested more than {_MAX_DEPTH} levels deep, which a "
                "checkpoint does not hold: flatten the state."
            )
        self._around.append(id(value))
        try:
            if isinstance(value, Mapping):
                return self._make_dict_node(cast("Mapping[Any, Any]", value), path)
            items = cast("list[Any]", value)
            inner = (
                self.make_node(item, _join_path(path, number)) for number, item in enumerate(items)
            )
            return ["l" if isinstance(value, list) else "u", *inner]
        finally:
            self._around.pop()

    def _make_dict_node(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        pairs = [
            (_make_key_node(key, path), self.make_node(item, _join_path(path, key)))
            for key, item in value.items()
        ]
        seen = [orjson.dumps(key) for key, _ in pairs]
        if len(set(seen)) < len(seen):
            key = next(key for key, said in zip(value, seen, strict=True) if seen.count(said) > 1)
            raise ConfigurationError(
                f"{_format_path(path)} has the key {key!r} twice once keys are plain numbers and "
                "text: rename one of them."
            )
        return ["d", *pairs]

    def _register_tensor(self, tensor: torch.Tensor, path: str) -> str:
        spread = is_distributed(tensor)
        plain = (spread or type(tensor) in _PLAIN_TENSOR_TYPES) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized:
            raise ConfigurationError(
                f"{_format_path(path)} is a {type(tensor).__name__} that is sharded by other "
                "means than DTensor, sparse or quantized, which a checkpoint does not hold: give "
                "the plain tensors that it is made of, or DTensors."
            )
        tensor = tensor.detach()
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        place = (*memory, tensor.is_conj(), tensor.is_neg())
        # Addresses identify only plain tensors with content.
        here = not spread and not tensor.is_meta and tensor.numel()
        if here and place in self._names:
            return self._names[place]
        name = f"#{path}" if path.startswith(_OWN_PREFIX) else path
        while name in self._tensors or name == SKELETON:
            name += "#"
        self._tensors[name] = tensor
        self._names[place] = name
        return name


def _join_path(path: str, name: object) -> str:
    name = _to_plain(name)
    if isinstance(name, int) and not -_INT64 <= name < _INT64:
        name = hex(name)  # Python refuses to write very long integers in decimal
    return f"{path}.{name}" if path else str(name)


def _format_path(path: str) -> str:
    """Return the form of a path in error messages."""
    whole = path.encode("utf-8", "backslashreplace").decode() or "The state"
    return whole if len(whole) <= _MAX_PATH_LENGTH else f"{whole[:_MAX_PATH_LENGTH]}..."


def _to_plain(value: Any) -> Any:
    """Return a number or text of any class as a plain value; return other values unchanged."""
    if isinstance(value, np.bool_ | np.integer | np.floating):
        value = cast("Any", value).item()
    # The methods of the base classes are called, since a subclass may override them.
    match value:
        case bool():
            return value
        case int():
            return int.__index__(value)
        case float():
            return float.__float__(value)
        case str():
            return str.__str__(value)
        case _:
            return value


def _make_leaf_node(value: Any, path: str) -> Any:
    """Return the node of a value without children."""
    value = _to_plain(value)
    match value:
        case None | bool():
            return value
        case str():
            return _check_text(value, path)
        case int():
            return value if -_INT64 <= value < _INT64 else ["i", hex(value)]
        case float() if type(value) is float:  # longdouble has more digits
            return value if math.isfinite(value) else ["f", str(value)]
        case bytes():
            return ["b", base64.b64encode(value).decode()]
        case torch.dtype():
            return ["y", str(value).removeprefix("torch.")]
        case _:
            raise ConfigurationError(
                f"{_format_path(path)} is a {type(value).__name__}, which a checkpoint does not "
                f"hold: "
                "give tensors, numpy arrays, numbers, text, bytes, and dicts, lists and tuples of "
                "them."
            )


def _make_key_node(key: Any, path: str) -> Any:
    """Return the node of a dict's key, which is restored as a key."""
    if type(key) in {tuple, torch.Size}:
        return ["u", *(_make_key_node(item, path) for item in key)]
    if isinstance(key, torch.Tensor | np.ndarray):
        raise ConfigurationError(
            f"{_format_path(path)} has a {type(cast('Any', key)).__name__} as a key, which a "
            "checkpoint does not hold: use numbers, text, bytes, or tuples of them."
        )
    return _make_leaf_node(key, _join_path(path, key))


def _check_text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{_format_path(path)} is text with a lone surrogate ({value[error.start]!a}), which "
            "UTF-8 cannot hold: decode it without `surrogateescape`, or give bytes."
        ) from None
    return value


def _from_numpy(value: "np.ndarray[Any, Any]", path: str) -> torch.Tensor:
    if isinstance(value, np.ma.MaskedArray):
        raise ConfigurationError(
            f"{_format_path(path)} is a masked array, which a checkpoint does not hold: give its "
            "data and its mask."
        )
    try:
        return torch.from_numpy(np.array(value))  # pyright: ignore[reportUnknownMemberType]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{_format_path(path)} is a numpy array of {value.dtype} "
            f"({errors.format_error(error)}), which a checkpoint does not hold: convert it."
        ) from error


def _find_difference(given: Any, back: Any, path: str) -> str:
    """Return the path of the first value that differs after it was restored; empty if none does."""
    kind = cast("type[Any]", type(back))
    if isinstance(given, Mapping):
        items = list(cast("Mapping[Any, Any]", given).items())
        found = list(cast("dict[Any, Any]", back).items()) if kind is dict else []
        pairs = [
            (one, other, _join_path(path, key))
            for (key, item), its in zip(items, found, strict=False)
            for one, other in ((key, its[0]), (item, its[1]))
        ]
        same = kind is dict and len(found) == len(items)
    elif type(given) in _SEQUENCE_TYPES:
        wanted = list if isinstance(given, list) else tuple
        inner: list[Any] = [*given]
        there: list[Any] = [*back] if kind is wanted else []
        both = zip(inner, there, strict=False)
        pairs = [(one, other, _join_path(path, at)) for at, (one, other) in enumerate(both)]
        same = kind is wanted and len(there) == len(inner)
    else:
        pairs, same = [], _is_same(given, back)
    if not same:
        return _format_path(path)
    different = (_find_difference(*pair) for pair in pairs)
    return next(filter(None, different), "")


def _is_same(given: Any, back: Any) -> bool:
    """Decide whether a value without children was restored. Of arrays only the form is compared."""
    if isinstance(given, torch.Tensor | np.ndarray):
        one, other = cast("Any", given), back
        kind = torch.Tensor if isinstance(given, torch.Tensor) else np.ndarray
        return isinstance(back, kind) and (other.dtype, other.shape) == (one.dtype, one.shape)
    plain = _to_plain(given)
    if isinstance(plain, float) and math.isnan(plain):
        return isinstance(back, float) and math.isnan(back)
    return type(back) is type(plain) and back == plain


_ABSENT = object()


def _restore_node(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: PLR0911 - one a tag
    if not isinstance(node, list):
        return node
    tag, *rest = cast("list[Any]", node)
    match tag:
        case "d":
            items = (
                (_restore_node(key, tensors), _restore_node(item, tensors)) for key, item in rest
            )
            return {key: item for key, item in items if item is not _ABSENT}
        case "l" | "u":
            found = (_restore_node(item, tensors) for item in rest)
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
            return int(rest[0], 16)
        case "y":
            kind = getattr(torch, rest[0], None)
            if isinstance(kind, torch.dtype):
                return kind
            raise ValueError(f"{rest[0]!r} is no type of tensors")
        case _:
            raise ValueError(f"{tag!r} is no kind of value")
