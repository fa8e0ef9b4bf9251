"""Reports whose every text is hostile, made of the types that the functions are given."""

import ast
import dataclasses
import importlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, SecretStr

import tasks
from millrace.gradients import ChainLink, WindowScores
from tasks import merging, reports, scoring

TEXTS = (
    "[click](http://evil.example/) ![x](https://evil.example/x.png) <img src=x onerror=alert(1)>",
    "<script>alert(1)</script> <http://evil.example> <a@evil.example> &lt;b&gt; &#60;i&#62;",
    "http://evil.example HTTPS://EVIL.EXAMPLE www.evil.example WWW.1x.example evil.example/x",
    "a@evil.example mailto:a@evil.example ftp://evil.example //evil.example xmpp:a@evil.example",
    "a | b | c \\| d \\\\| e `f | g` ``h`` \\",
    "a\n\n# heading\n- item\n1. item\n> quote\n```\ncode\n```\n---\n|a|b|\n|-|-|\n<div>\n",
    "# heading", "- item", "+ item", "1. item", "2) item", "> quote", "```", "~~~", "---", "===",
    "    code", "| a | b |", "<div>", "[x]: http://evil.example", "***", "\\", "*a* _b_ ~~c~~ [^1]",
    "\x1b[31mred\x1b]8;;http://evil.example\x07link\x1b]8;;\x07 \u202egpj.exe \u2066x\x00",
    "z" * 100_000, "[" * 5000, "`" * 501, "![" * 999 + "](http://evil.example)",
)  # fmt: skip


def made(kind: Any, text: str, last: bool = False) -> Any:  # noqa: PLR0911 - one for each type
    """A value of a type, with this text wherever it holds one.

    Args:
        kind: The type, as it is annotated.
        text: The text.
        last: Whether to take the last member of each enum, and true; else the first, and false.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:  # first, since not all annotations can be hashed
        return made(inner[0], text, last)
    simple: dict[Any, Any] = {
        str: text, object: text, Any: text, int: 3, float: 1.5, bool: last, bytes: text.encode(),
        datetime: datetime(2026, 1, 2, tzinfo=UTC), timedelta: timedelta(hours=1),
        AwareDatetime: datetime(2026, 1, 2, tzinfo=UTC),
        UUID: UUID(int=1), Path: Path("x"), SecretStr: SecretStr("x"), types.NoneType: None,
    }  # fmt: skip
    if kind in simple:
        return simple[kind]
    if origin is typing.Literal:
        return inner[-1 if last else 0]
    if origin in {typing.Union, types.UnionType}:
        return made(next(one for one in inner if one is not types.NoneType), text, last)
    if origin in {dict, Mapping}:
        return {made(inner[0], text, last): made(inner[1], text, last)}
    if origin in {list, Sequence, Iterable}:
        return [made(inner[0], text, last)] * 2
    if origin in {set, frozenset}:
        return origin(made(one, text, last) for one in inner)
    if origin is tuple:
        return tuple(made(one, text, last) for one in inner if one is not ...)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1 if last else 0]
    hints = typing.get_type_hints(kind, include_extras=True)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        values = {name: made(hints[name], text, last) for name in kind.model_fields}
        return kind.model_construct(**values)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        values = {name: made(hints[name], text, last) for name in names}
        return _construct(kind, values)
    raise TypeError(f"no value of {kind} is known")


def _construct(kind: Any, values: dict[str, Any]) -> Any:
    """Make a dataclass; one of pydantic is not validated, as by `model_construct`."""
    if not hasattr(kind, "__pydantic_validator__"):
        return kind(**values)
    part = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(part, name, value)
    return part


def publishing() -> Iterator[str]:
    """The functions of `tasks` that publish a report, by their names: ``tasks.x.report_y``."""
    for path in sorted(Path(str(tasks.__file__)).parent.glob("*.py")):
        if path.stem == "reports":
            continue
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
            if any(isinstance(one, ast.Name) and one.id == "publish_report" for one in calls):
                yield f"tasks.{path.stem}.{node.name}"


def _windows(text: str, last: bool) -> None:
    """Publish as `tasks.merging.report_windows` does, but of windows that are in no chain."""
    windows = made(list[ChainLink], text, last)
    reports.publish_report(
        merging.describe_windows(text, windows, skipped_windows=3), key="windows", description=text
    )


def _scores(text: str, last: bool) -> None:
    """Publish as `tasks.scoring.report_scores` does, but of scores that are in no bucket."""
    found = made(list[WindowScores], text, last)
    reports.publish_report(scoring.describe_scores(text, found), key="scores", description=text)


SPECIAL: dict[str, Callable[[str, bool], None]] = {
    "tasks.merging.report_windows": _windows,
    "tasks.scoring.report_scores": _scores,
}


def publish(name: str, text: str, last: bool) -> None:
    """Have a function publish its report, with this text wherever it is given one."""
    if name in SPECIAL:
        SPECIAL[name](text, last)
        return
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(module), function)
    found = getattr(found, "fn", found)  # of a task
    hints = typing.get_type_hints(found, include_extras=True)
    found(**{name: made(hint, text, last) for name, hint in hints.items() if name != "return"})
