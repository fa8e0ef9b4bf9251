"""Destinations of checkpoints: a store, or a repository of the Hugging Face Hub."""

from millrace.checkpoints.destinations.base import (
    CopiedCheckpoint,
    Destination,
    copy_and_measure,
    copy_checkpoint,
)
from millrace.checkpoints.destinations.bucket import StoreDestination
from millrace.environment import drop_empty_variables
from millrace.errors import ConfigurationError
from millrace.hub.spec import HubSpec
from millrace.storage import StoreSpec, open_store

__all__ = [
    "CopiedCheckpoint",
    "Destination",
    "HubSpec",
    "StoreDestination",
    "copy_and_measure",
    "copy_checkpoint",
    "open_destination",
]


def open_destination(
    location: str | StoreSpec | HubSpec, *, make_folder: bool = True
) -> Destination:
    """Open the destination at a URL. Nothing is sent.

    Args:
        location: URL of a store, ``hf://owner/name``, ``hf://owner/name@branch``, or the settings
            of a store or a repository.
        make_folder: Make the folder of a ``file://`` URL if it is missing.

    Raises:
        ConfigurationError: The URL is invalid, or the Hub's library is not installed.
    """
    if isinstance(location, StoreSpec):
        return StoreDestination(open_store(location, make_folder=make_folder))
    if isinstance(location, str) and not location.startswith("hf://"):
        return StoreDestination(open_store(location, make_folder=make_folder))
    drop_empty_variables()
    try:
        from millrace.checkpoints.destinations.hub import HubDestination  # noqa: PLC0415
    except ImportError:
        raise ConfigurationError(
            "The library of the Hugging Face Hub is not installed: run pip install 'millrace[hub]'."
        ) from None
    return HubDestination(HubSpec.parse(location) if isinstance(location, str) else location)
