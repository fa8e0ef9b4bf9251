"""Read settings files of YAML or TOML, and fill in ``${VAR}`` from the environment.

``${VAR:-default}`` has a default. ``$${VAR}`` is the text ``${VAR}`` itself. An empty variable
counts as unset. Texts for another machine stay as they are written: see `AsWritten`.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ByteSize, ValidationError

from millrace.environment import read_variable
from millrace.errors import ConfigurationError
from millrace.formatting import format_count
from millrace.settings_values import write_duration

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_VARIABLE = re.compile(r"\$(\$?)\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|w)\s*")
_MAX_DURATION_LENGTH = 100  # characters: the search takes quadratic time in a run of digits
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}  # seconds

_SIZE = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)")
_MAX_SIZE_LENGTH = 100  # characters

_UNKNOWN = (
    "there is no such setting in this version of Millrace: correct its name, or install the "
    "version that has it"
)
_LIST, _MAPPING = "write a list: [FIRST, SECOND]", "write settings by name: {NAME: VALUE}"
_FAULTS = {
    "extra_forbidden": _UNKNOWN,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
}
"""Descriptions of faults that pydantic describes in words of Python."""
_TIMEDELTA = re.compile(r"datetime\.timedelta\(([^)]*)\)")
_PREFIX = "Value error, "  # pydantic puts this before the message of a validator

M = TypeVar("M", bound=BaseModel)


class AsWritten:
    """Mark in the annotation of a field: `load_settings` fills in no variables below the field."""


def parse_duration(value: Any) -> Any:
    """Parse a duration such as `90s`, `20m`, `1h30m`, `1h 30m`, `7d` or `1w`.

    Returns:
        The duration. A `timedelta` and text of ISO 8601 (`PT20M`) are returned unchanged, for
        pydantic.

    Raises:
        ValueError: The value is a number without a unit, or not a duration.
    """
    if isinstance(value, timedelta) or (isinstance(value, str) and _is_iso(value)):
        return value
    text = f"{value:g}" if isinstance(value, float) else str(value).strip()
    if len(text) > _MAX_DURATION_LENGTH:
        raise ValueError(f"a text of {len(text):,} characters is no duration: write 90s or 20m")
    parts = list(_PART.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        bare = re.fullmatch(r"[-+]?[\d.]+", text)
        why = "has no unit" if bare else "is no duration"
        example = text.lstrip("+-") if bare else "90"
        raise ValueError(
            f"{text!r} {why}: write {example}s, {example}m, {example}h or {example}d (seconds, "
            "minutes, hours, days; 1w is a week, PT20M is ISO 8601), or several such parts: 1h30m. "
            "Small letters only"
        )
    try:
        seconds = sum(Fraction(part[1]) * _UNITS[part[2]] for part in parts)
        return timedelta(microseconds=round(seconds * 1_000_000))
    except OverflowError:
        raise ValueError(f"{text!r} is too long a duration: write at most 5000w") from None


def _is_iso(text: str) -> bool:
    return text.strip().upper().startswith(("P", "-P", "+P"))


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
"""A duration with its unit: `90s`, `20m`, `24h`, `7d`, `1w`, or ISO 8601, such as `PT20M`."""


def parse_size(value: Any) -> int:
    """Parse a size such as `64MiB`, `80GB`, `1.5 GiB`, or a whole number of bytes.

    Returns:
        Number of bytes. A fraction of a byte is cut off a size with a larger unit.

    Raises:
        ValueError: The whole text is not a number with a unit of pydantic's `ByteSize`, or the
            size is not a whole number of bytes.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if len(text) > _MAX_SIZE_LENGTH:
        raise ValueError(f"a text of {len(text):,} characters is no size: write 80GB or 512MiB")
    found = _SIZE.fullmatch(text)
    factor = ByteSize.byte_sizes.get((found[2] or "b").lower()) if found else None
    size = Fraction(found[1]) * Fraction(factor) if found and factor else None
    if size is None or (size.denominator > 1 and (factor == 1 or size < 1)):
        raise ValueError(
            f"{str(value)!r} is no size: write 80GB or 512MiB, or a whole number of bytes"
        )
    return int(size)


Size = Annotated[ByteSize, BeforeValidator(parse_size)]
"""A number of bytes, with or without a unit: `64MiB`, `80GB`, `1000`."""


def load_settings(
    path: Path,
    model: type[M],
    environ: Mapping[str, str] | None = None,
    *,
    template: str = "",
) -> M:
    """Read a settings file into a model.

    Variables are filled in where the model reads them: not in settings that it ignores, nor below
    fields whose annotation has the mark `AsWritten`.

    Args:
        path: Path of a ``.yaml``, ``.yml`` or ``.toml`` file.
        model: Class of the settings.
        environ: Values of variables; by default the environment of the process.
        template: As for `read_settings_file`.

    Raises:
        ConfigurationError: The file cannot be read, the file is not YAML or TOML, variables are
            not set, or the model refuses values. The message names all unset variables with their
            lines. The message contains no value, since a value could be a secret.
    """
    data, text = parse_settings_file(path, template=template)
    if model.model_config.get("extra") == "ignore":
        data = {name: value for name, value in data.items() if name in model.model_fields}
    missing: list[str] = []
    filled = _expand_fields(model, data, os.environ if environ is None else environ, missing)
    _refuse_missing(missing, path, text)
    return validate_settings(model, filled, source=str(path))


def read_settings_file(
    path: Path, environ: Mapping[str, str] | None = None, *, template: str = ""
) -> dict[str, Any]:
    """Return the settings of a file by their names, with ``${VAR}`` filled in.

    Args:
        path: Path of the file, as for `load_settings`.
        environ: Values of variables, as for `load_settings`.
        template: Command that writes such a file to start from, for error messages; empty if
            there is none.

    Raises:
        ConfigurationError: The file cannot be read, as for `load_settings`. Values are not checked.
    """
    data, text = parse_settings_file(path, template=template)
    filled, missing = fill_variables(data, os.environ if environ is None else environ)
    _refuse_missing(missing, path, text)
    return filled


def parse_settings_file(path: Path, *, template: str) -> tuple[dict[str, Any], str]:
    """Return the settings of a file by their names, with ``${VAR}`` as written, and its text.

    Args:
        path: Path of the file, as for `load_settings`.
        template: Command that writes such a file to start from, for error messages; empty if
            there is none.

    Raises:
        ConfigurationError: The file cannot be read, as for `load_settings`. Values are not checked.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin it with a mark
    except FileNotFoundError:
        raise ConfigurationError(
            f"There is no settings file at {path}. "
            + (f"`{template}` writes one to start from." if template else "Correct the path.")
        ) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}, line {line}: the text is not UTF-8: save the file with the encoding UTF-8."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
    data = _parse_text(path, text)
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{path} has no settings by name. "
            + (f"Write them as in a file of `{template}`." if template else "Write NAME: VALUE.")
        )
    return cast("dict[str, Any]", data), text


def validate_settings(model: type[M], data: object, *, source: str) -> M:
    """Check data against a model, and return the model.

    Args:
        model: Class of the settings.
        data: Settings by their names.
        source: Origin of the data, for error messages.

    Raises:
        ConfigurationError: The model refuses values. The message does not contain the values.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults: dict[str, None] = {}
        found = error.errors(include_input=False, include_url=False)
        for fault in found:
            loc = fault["loc"]
            if fault["type"] == "too_short" and any(
                len(loc) < len(one["loc"]) and loc == one["loc"][: len(loc)] for one in found
            ):
                continue  # the items are there, and are invalid themselves
            path = _format_path(loc, data, missing=fault["type"] == "missing")
            faults[f"{path or 'settings'}: {_describe_fault(fault)}"] = None
        raise ConfigurationError(f"{source}: {'; '.join(faults)}.") from None


def _describe_fault(fault: "ErrorDetails") -> str:
    """Return a fault that pydantic found, in the words of a settings file."""
    if fault["type"] == "too_short":
        return f"write at least {format_count(fault.get('ctx', {})['min_length'], 'item')}"
    message = fault["msg"].removeprefix(_PREFIX)
    return _FAULTS.get(fault["type"]) or _TIMEDELTA.sub(_write_timedelta, message)


def _write_timedelta(match: re.Match[str]) -> str:
    """Return a limit that pydantic writes as ``datetime.timedelta(days=7)`` as a duration."""
    parts = {name: int(number) for name, number in re.findall(r"(\w+)=(-?\d+)", match[1])}
    return write_duration(timedelta(**parts))


def _format_path(parts: tuple[int | str, ...], data: Any, *, missing: bool) -> str:
    """Return the path of a setting in the file, without the names of the classes of a union."""
    named: list[str] = []
    for number, part in enumerate(parts):
        if isinstance(data, dict) and part in data:
            data = cast("dict[Any, Any]", data)[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):  # pyright: ignore[reportUnknownArgumentType]
            data = cast("list[Any]", data)[part]
        elif number + 1 < len(parts) or not missing:
            continue  # the name of the class of a union that pydantic tried
        named.append(str(part))
    return ".".join(named)


def _parse_text(path: Path, text: str) -> object:
    match path.suffix.lower():
        case ".yaml" | ".yml":
            from millrace.settings_yaml import parse_yaml  # noqa: PLC0415 - slow to import

            return parse_yaml(path, text)
        case ".toml":
            return _parse_toml(path, text)
        case other:
            raise ConfigurationError(
                f"{path}: a settings file ends in .yaml, .yml or .toml, not {other!r}."
            )


def _parse_toml(path: Path, text: str) -> object:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also an integer of too many digits
        raise ConfigurationError(f"{path}: not valid TOML: {error}.") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: its values are nested too deeply.") from None


def fill_variables(
    data: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return settings with ``${VAR}`` filled in, and the names of the variables that are not set.

    Args:
        data: Settings by their names.
        environ: Values of variables.
    """
    missing: list[str] = []
    return _expand_variables(dict(data), environ, missing), missing


def escape_variables(value: Any) -> Any:
    """Return settings in which each ``${VAR}`` of the text is ``$${VAR}``.

    So a settings file that is written from them has the same text when it is read.
    """
    match value:
        case str():
            return _VARIABLE.sub(lambda match: f"${match[0]}", value)
        case dict():
            return {k: escape_variables(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [escape_variables(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def _expand_fields(
    model: type[BaseModel],
    data: Mapping[str, Any],
    environ: Mapping[str, str],
    missing: list[str],
) -> dict[str, Any]:
    """Return settings with ``${VAR}`` filled in, except below fields with the mark `AsWritten`."""
    filled: dict[str, Any] = {}
    for name, value in data.items():
        field = model.model_fields.get(name)
        kind = field.annotation if field else None
        if field and AsWritten in field.metadata:
            filled[name] = value
        elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
            filled[name] = _expand_fields(kind, cast("dict[str, Any]", value), environ, missing)
        else:
            filled[name] = _expand_variables(value, environ, missing)
    return filled


def _expand_variables(value: Any, environ: Mapping[str, str], missing: list[str]) -> Any:
    match value:
        case str():
            return _VARIABLE.sub(lambda match: _look_up_variable(match, environ, missing), value)
        case dict():
            return {k: _expand_variables(v, environ, missing) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [_expand_variables(item, environ, missing) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def _look_up_variable(match: re.Match[str], environ: Mapping[str, str], missing: list[str]) -> str:
    escaped, name, default = match.groups()
    if escaped:
        return match.group(0)[1:]
    if value := read_variable(name, environ):
        return value
    if default is not None:
        return default
    if name not in missing:
        missing.append(name)
    return ""


def _refuse_missing(missing: list[str], path: Path, text: str) -> None:
    """Raise the error for the variables of a settings file that are not set, if there are any."""
    if missing:
        unset = "; ".join(f"{name} ({path}, line {_find_line(text, name)})" for name in missing)
        raise ConfigurationError(
            f"Unset or empty in the environment: {unset}. Export it, or write ${{NAME:-default}}."
        )


def _find_line(text: str, name: str) -> int:
    use = re.compile(r"\$\{" + name + r"[:}]")
    for number, line in enumerate(text.splitlines(), start=1):
        if use.search(line) and not line.lstrip().startswith("#"):
            return number
    return 1
