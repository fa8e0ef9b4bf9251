"""Defaults as a settings file has them: `20m`, `64MiB`, `{kind: ray}`."""

from typing import Any, get_origin

import yaml
from pydantic.fields import FieldInfo

from millrace.settings_values import make_plain


def format_value(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(make_plain(value), default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").replace("''", '""')


def find_default(field: FieldInfo) -> tuple[bool, Any]:
    """Return whether a field has a constant default, and the default."""
    if field.is_required():
        return False, None
    if field.default_factory is None:
        return True, field.default
    container: Any = get_origin(field.default_factory) or field.default_factory
    return (True, container()) if container in {dict, list, tuple} else (False, None)


def format_default(field: FieldInfo) -> str:
    """Return the default of a field as a cell of a table."""
    if field.is_required():
        return "required"
    is_constant, value = find_default(field)
    return f"`{format_value(value)}`" if is_constant else "computed"
