"""Convert the values of settings to the text of a settings file: `20m`, `64MiB`, `{kind: ray}`."""

from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

_UNITS = (("w", 604800), ("d", 86400), ("h", 3600), ("m", 60))
_SIZES = (
    ("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("GB", 10**9), ("MB", 10**6),
    ("KiB", 1 << 10),
)  # fmt: skip


def write_duration(value: timedelta) -> str:
    """Return a duration with the largest unit that divides it, such as `20m`.

    A negative duration is written as ISO 8601, such as `-P0DT90S`.
    """
    if value < timedelta(0):
        days, rest = divmod(-value, timedelta(days=1))  # pydantic bounds the number of seconds
        return f"-P{days}DT{_write_seconds(rest)}S"
    for unit, size in _UNITS:
        if value and not value % timedelta(seconds=size):
            return f"{value // timedelta(seconds=size)}{unit}"
    return f"{_write_seconds(value)}s"


def _write_seconds(value: timedelta) -> str:
    """Return the seconds of a duration with all digits. A `timedelta` counts microseconds."""
    whole, rest = divmod(value, timedelta(seconds=1))
    return f"{whole}.{rest.microseconds:06d}".rstrip("0").rstrip(".")


def write_size(value: int) -> str:
    """Return a number of bytes with a unit that divides it, such as `64MiB`, `40GB` or `0B`."""
    for unit, size in _SIZES:
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value}B"


def make_plain(value: Any) -> Any:
    """Return a value in the form of a settings file, without settings that equal their defaults."""
    match value:
        case BaseModel():
            return _dump_model(value)
        case dict():
            items = cast("dict[str, Any]", value).items()
            return {name: make_plain(each) for name, each in items}
        case list() | tuple():
            return [make_plain(each) for each in cast("list[Any]", value)]
        case _:
            return _make_scalar(value)


def _dump_model(value: BaseModel) -> dict[str, Any]:
    return {
        name: make_plain(getattr(value, name))
        for name, field in type(value).model_fields.items()
        if _is_kind(field) or field.is_required() or getattr(value, name) != _find_value(field)
    }


def _make_scalar(value: Any) -> Any:
    match value:
        case timedelta():
            return write_duration(value)
        case ByteSize():
            return write_size(value)
        case Enum():
            return value.value
        case PurePath():
            return str(value)
        case _:
            return value


def _is_kind(field: FieldInfo) -> bool:
    """Return whether a field has one possible value, which distinguishes classes of a union."""
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def _find_value(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})
