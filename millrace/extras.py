"""Import modules whose libraries an extra of the package installs."""

from importlib import import_module
from types import ModuleType

from millrace.errors import ConfigurationError


def import_extra_module(module: str, extra: str) -> ModuleType:
    """Import a module of Millrace that needs the libraries of an extra.

    Args:
        module: Full name of the module, such as ``millrace.gradients.merging.links``.
        extra: Extra of pyproject.toml that installs the libraries of the module.

    Raises:
        ConfigurationError: A library is not installed. The message names the command to install it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library in {"", "millrace"}:
            raise
        raise ConfigurationError(
            f"{library} is not installed here: pip install 'millrace[{extra}]'."
        ) from error
