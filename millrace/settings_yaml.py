"""Parse settings files of YAML, and refuse repeated keys."""

from collections.abc import Hashable
from pathlib import Path

import yaml

from millrace.errors import ConfigurationError

_MERGE = "tag:yaml.org,2002:merge"  # a mapping may have several keys `<<`


class _Loader(yaml.SafeLoader):
    """Loader of plain values that refuses a mapping in which a key is repeated."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
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
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        is_syntax = not isinstance(error, yaml.constructor.ConstructorError)
        hint = " (inside [] and {} a ${NAME} must be quoted)" if is_syntax and "${" in text else ""
        raise ConfigurationError(f"{path}{line}: not valid YAML: {error.problem}{hint}.") from None
