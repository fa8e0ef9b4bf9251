"""Names of the fields of samples, which readers of the shards must be able to read back."""

import re
from collections.abc import Iterable

KEY = "__key__"
"""Field of a read sample that has its key, as in webdataset."""
TOKENS = "tokens"
"""Field of the tokens of a text."""
RESERVED = re.compile(r"__[^/]*__")
"""Part of an extension that readers reserve."""


class BadFieldError(ValueError):
    """A field has a name or a value that it cannot have. The message is the reason."""


def check_field_name(name: str) -> str:
    """Return the name of a field, checked to be an extension that webdataset reads back.

    Raises:
        BadFieldError: The name cannot be an extension.
    """
    if not name or "/" in name or RESERVED.search(name) or not name.isprintable():
        raise BadFieldError(
            f"webdataset could not read the field {name!r} back: write an extension such as txt, "
            "without '/' and not like __this__"
        )
    return name


def check_distinct(names: Iterable[str]) -> None:
    """Check that different names do not differ in upper and lower case only.

    Raises:
        BadFieldError: Two names do, so readers would see one field.
    """
    different = set(names)
    if len({name.lower() for name in different}) < len(different):
        raise BadFieldError("two fields differ in upper and lower case only: readers see one")
