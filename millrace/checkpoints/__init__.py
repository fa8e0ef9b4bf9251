"""Checkpoints with proof: saved by digest, verified before they are used, found by listing."""

from millrace.checkpoints.find import (
    Check,
    checkpoint_of,
    checkpoints,
    latest,
    newest,
    quarantine,
    steps,
    verify,
)
from millrace.checkpoints.load import Loaded, load
from millrace.checkpoints.save import Saver, Saving
from millrace.checkpoints.settings import SaveSettings

__all__ = [
    "Check",
    "Loaded",
    "SaveSettings",
    "Saver",
    "Saving",
    "checkpoint_of",
    "checkpoints",
    "latest",
    "load",
    "newest",
    "quarantine",
    "steps",
    "verify",
]
