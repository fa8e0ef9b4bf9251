"""The function that computes losses, from the settings of a scorer."""

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import cast

from millrace.errors import ConfigurationError, format_error
from millrace.gradients.scoring.evaluation import ComputeLoss

_NAME = re.compile(r"(?P<where>[^:]+):(?P<function>[A-Za-z_]\w*)")


def load_compute_loss(name: str, folder: Path) -> ComputeLoss:
    """Call a function that makes the function which computes losses.

    Args:
        name: ``module:function`` of an installed module, or ``./loss.py:function`` of a file. The
            function is called once, without arguments.
        folder: Folder that the path of a file is relative to.

    Raises:
        ConfigurationError: There is no such function, or it fails, or it returns no function.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigurationError(
            f"{name!r} names no function: write module:function or ./loss.py:function."
        )
    where = match["where"]
    try:
        module = (
            _load_file(folder / where) if where.endswith(".py") else importlib.import_module(where)
        )
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be loaded: {format_error(error)}.") from error
    make = getattr(module, match["function"], None)
    if not callable(make):
        raise ConfigurationError(f"{where} has no function {match['function']}: correct `loss`.")
    try:
        compute_loss = make()
    except Exception as error:
        raise ConfigurationError(f"{name} failed: {format_error(error)}.") from error
    if not callable(compute_loss):
        raise ConfigurationError(
            f"{name} returned {type(compute_loss).__name__}: let it return a function of weights, "
            "window and worker."
        )
    return cast("ComputeLoss", compute_loss)


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
