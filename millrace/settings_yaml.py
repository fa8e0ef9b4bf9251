"""Parse settings files of YAML, refuse repeated keys, and name the lines of faults."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from millrace.errors import ConfigurationError

_MAX_VALUES = 1_000_000
"""Largest number of values of a file, where an anchor counts as often as it is used."""
_MERGE = "tag:yaml.org,2002:merge"  # a mapping may have several keys `<<`


class _Loader(yaml.SafeLoader):
    """Loader of plain values that refuses a mapping in which a key is repeated."""

    def get_single_node(self) -> yaml.Node | None:
        """Compose the file, and refuse anchors that multiply or contain themselves."""
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and check its own keys. Merged keys are not there yet."""
        node = super().compose_mapping_node(anchor)
        lines: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name = self.construct_object(key)
            if not isinstance(name, Hashable):
                continue  # refused when the mapping is constructed
            if name in lines:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"{name!r} is already set in line {lines[name]}: remove one of the two",
                    key.start_mark,
                )
            lines[name] = key.start_mark.line + 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Construct a value, and name its line if it is no value of its type."""
        try:
            return super().construct_object(node, deep)  # pyright: ignore[reportUnknownMemberType]
        except (ValueError, OverflowError, KeyError, AttributeError):
            # PyYAML does not check a date such as 2024-13-45, or a text behind the tag `!!int`.
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"this is no {node.tag.rpartition(':')[2]}: correct the value, or put the value in "
                "quotes if it is a text",
                node.start_mark,
            ) from None


def _count_values(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Return the number of values of a node, with those of the anchors that it names.

    Args:
        node: Node to count.
        counts: Numbers of the nodes that were counted, by their ids; None during the count.

    Raises:
        ConstructorError: There are too many, or an anchor contains itself.
    """
    found = counts.get(id(node), 0)
    if found == 0:
        counts[id(node)] = None
        match node:
            case yaml.MappingNode():
                inner = [each for pair in node.value for each in pair]
            case yaml.SequenceNode():
                inner = node.value
            case _:
                inner = []
        found = counts[id(node)] = 1 + sum(_count_values(each, counts) for each in inner)
    if found is None or found > _MAX_VALUES:
        fault = "contains itself" if found is None else "has too many values: write fewer anchors"
        raise yaml.constructor.ConstructorError(None, None, f"this {fault}", node.start_mark)
    return found


def parse_yaml(path: Path, text: str) -> object:
    """Parse the text of a settings file.

    Args:
        path: Path of the file, for error messages.
        text: Text of the file.

    Raises:
        ConfigurationError: The text is not valid YAML. The message has the line, and no values.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigurationError(
            f"{path}, line {line}: not valid YAML: the character "
            f"U+{ord(text[error.position]):04X} is not allowed: remove the character."
        ) from None
    except RecursionError:
        raise ConfigurationError(f"{path}: its values are nested too deeply.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        is_syntax = not isinstance(error, yaml.constructor.ConstructorError)
        hint = " (inside [] and {} a ${NAME} must be quoted)" if is_syntax and "${" in text else ""
        raise ConfigurationError(f"{path}{line}: not valid YAML: {error.problem}{hint}.") from None
