"""Types of settings and parameters in words, with their limits."""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from prefect.blocks.core import Block
from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo

from docs.generator.markdown import format_code, join_words
from docs.generator.values import format_value
from millrace.formatting import format_count
from millrace.settings import Size
from millrace.settings_values import write_duration, write_size

Link = Callable[[type[BaseModel]], str]
"""Function that returns a link to the table of a model."""

_NAMES: dict[Any, str] = {
    ByteSize: "size",
    timedelta: "duration",
    datetime: "date and time",
    bool: "`true` or `false`",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    SecretStr: "secret text",
    NoneType: "`null`",
    Any: "any value",
}
_LIMITS = {
    "gt": "more than",
    "ge": "at least",
    "lt": "less than",
    "le": "at most",
    "pattern": "matches",
}


def describe_field(field: FieldInfo, link: Link) -> str:
    """Return the type of a field, and its limits."""
    return _add_limits(describe_type(field.annotation, link), field.annotation, field.metadata)


def describe_type(annotation: Any, link: Link) -> str:
    """Return a type in words."""
    return join_words(list(dict.fromkeys(_list_choices(annotation, link))))


def _list_choices(annotation: Any, link: Link) -> list[str]:
    """Return the types or values that a type allows, each in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        choices = _list_choices(arguments[0], link)
        return [*choices[:-1], _add_limits(choices[-1], arguments[0], arguments[1:])]
    if origin in {Union, UnionType}:
        return [choice for each in arguments for choice in _list_choices(each, link)]
    if origin is Literal:
        return [f"`{format_value(each)}`" for each in arguments]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [f"`{each.value}`" for each in annotation]
    return [_describe_container(origin, arguments, link) or _describe_class(annotation, link)]


def _describe_container(origin: Any, arguments: tuple[Any, ...], link: Link) -> str:
    """Return a container with its items in words; empty for other types."""
    if origin is dict:
        return f"map of names to {describe_type(arguments[1], link)}"
    if origin in {list, tuple}:
        items = [each for each in arguments if each is not Ellipsis]
        is_pair = origin is tuple and len(items) == len(arguments)
        return f"{'pair' if is_pair else 'list'} of {describe_type(items[0], link)}"
    return ""


def _describe_class(annotation: Any, link: Link) -> str:
    if annotation in _NAMES:
        return _NAMES[annotation]
    if issubclass(annotation, Block):
        return f"{annotation._block_type_name or annotation.__name__} block"  # noqa: SLF001
    if issubclass(annotation, BaseModel):
        return link(annotation)
    raise TypeError(f"The reference has no words for the type {annotation!r}: add them here.")


def _add_limits(text: str, annotation: Any, metadata: Iterable[Any]) -> str:
    limits = list(_describe_limits(annotation, metadata))
    return f"{text}; {', '.join(limits)}" if limits else text


def _describe_limits(annotation: Any, metadata: Iterable[Any]) -> Iterable[str]:
    """Yield the limits of a type in words."""
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _describe_limits(annotation, item.metadata)
            continue
        for name, words in _LIMITS.items():
            limit = getattr(item, name, None)
            if limit is not None:
                yield f"{words} {_format_limit(limit, annotation)}"
        if least := getattr(item, "min_length", None):
            yield f"at least {format_count(least, _find_noun(annotation))}"


def _find_noun(annotation: Any) -> str:
    return "item" if get_origin(annotation) in {list, tuple, dict} else "character"


def _format_limit(limit: Any, annotation: Any) -> str:
    if isinstance(limit, timedelta):
        return write_duration(limit)
    if annotation is ByteSize or Size in get_args(annotation):
        return write_size(limit)
    return format_code(limit) if isinstance(limit, str) else f"{limit:g}"
