"""Load blocks from the Prefect server, and find the fields that keep a block from loading.

Prefect's UI saves a block without running the validators of its type.
"""

from typing import TypeVar, cast

from prefect.blocks.core import Block
from pydantic import ValidationError

from millrace.errors import ConfigurationError

B = TypeVar("B", bound=Block)


def find_block(kind: type[B], name: str) -> B | None:
    """Find a block by its name.

    Args:
        kind: Type of the block; `Block` for any type.
        name: Name of the block; with `Block`, in the form ``TYPE/NAME``.

    Returns:
        The block; None if there is no block of this name.

    Raises:
        ConfigurationError: Fields of the block are invalid. The message names them, and shows no
            value.
    """
    block, faults = load_with_faults(kind, name)
    if faults:
        raise ConfigurationError(
            f"{describe_faults(kind, name, faults)} Correct the block in Prefect's UI. `millrace "
            "setup` replaces those that it makes."
        )
    return block


def load_with_faults(kind: type[B], name: str) -> tuple[B | None, dict[str, str]]:
    """Load a block by its name, or find its invalid fields.

    Returns:
        The block, or None if there is none or it cannot be loaded; and the fault of each invalid
        field by the field's path, without values.
    """
    try:
        return cast("B", kind.load(name)), {}
    except RuntimeError as error:
        if not isinstance(error.__cause__, ValidationError):
            raise
        found = error.__cause__.errors(include_input=False, include_url=False)
    except ValidationError:
        raise  # an answer of the server, and not the block
    except ValueError:
        return None, {}
    # Here, and not above, so that no traceback has pydantic's error, which quotes secrets.
    return None, {
        ".".join(str(part) for part in fault["loc"]): fault["msg"].removeprefix("Value error, ")
        for fault in found
    }


def describe_faults(kind: type[Block], name: str, faults: dict[str, str]) -> str:
    """Return a sentence that names a block and its invalid fields."""
    fields = "; ".join(f"{field or 'fields'}: {fault}" for field, fault in faults.items())
    label = "block" if kind is Block else f"{kind.get_block_type_name()} block"
    return f"The {label} {name!r} is not valid. {fields}."
