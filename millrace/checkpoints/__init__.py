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
from millrace.checkpoints.retain import (
    Removal,
    Retained,
    RetentionPlan,
    pin,
    plan_retention,
    retain,
    unpin,
)
from millrace.checkpoints.save import Saver, Saving
from millrace.checkpoints.settings import Retention, SaveSettings

__all__ = [
    "Check",
    "Loaded",
    "Removal",
    "Retained",
    "Retention",
    "RetentionPlan",
    "SaveSettings",
    "Saver",
    "Saving",
    "checkpoint_of",
    "checkpoints",
    "latest",
    "load",
    "newest",
    "pin",
    "plan_retention",
    "quarantine",
    "retain",
    "steps",
    "unpin",
    "verify",
]
