"""Checkpoints: files under their digests, verified before use, and found by listing."""

from typing import TYPE_CHECKING, Any

from millrace.extras import import_extra_module

if TYPE_CHECKING:
    from millrace.checkpoints.contents import Content, open_content
    from millrace.checkpoints.cooldown.checkpointers import SelectionRule
    from millrace.checkpoints.cooldown.clearing import clear_votes
    from millrace.checkpoints.cooldown.cooldown import cool_down
    from millrace.checkpoints.cooldown.epoch_records import count_epochs_without_checkpoint
    from millrace.checkpoints.cooldown.epochs import EpochSaver
    from millrace.checkpoints.cooldown.member import MemberSettings, SavedSource, end_epoch
    from millrace.checkpoints.cooldown.membership import ExpectedUpload, Membership
    from millrace.checkpoints.cooldown.result import EpochResult
    from millrace.checkpoints.cooldown.watch import EpochStatus, watch_epoch_end
    from millrace.checkpoints.destinations import (
        Destination,
        HubSpec,
        StoreDestination,
        copy_checkpoint,
        open_destination,
    )
    from millrace.checkpoints.find import (
        VerifyDepth,
        find_jobs,
        find_newest,
        find_newest_verified,
        iterate_checkpoints,
        list_steps,
        quarantine,
        read_checkpoint,
        survey,
        verify,
    )
    from millrace.checkpoints.foreign_files import ImportedCheckpoint
    from millrace.checkpoints.importing import import_checkpoint
    from millrace.checkpoints.loading import LoadedCheckpoint, load, load_into
    from millrace.checkpoints.ranks import Ranks
    from millrace.checkpoints.retention import (
        Removal,
        RetentionPlan,
        apply_retention,
        pin,
        plan_retention,
        read_pins,
        unpin,
    )
    from millrace.checkpoints.saving import PendingSave, Saver
    from millrace.checkpoints.settings import (
        CooldownSettings,
        OnTimeout,
        RetentionSettings,
        SaveSettings,
    )
    from millrace.schemas.checkpoint import CooldownOutcome

__all__ = [
    "Content",
    "CooldownOutcome",
    "CooldownSettings",
    "Destination",
    "EpochResult",
    "EpochSaver",
    "EpochStatus",
    "ExpectedUpload",
    "HubSpec",
    "ImportedCheckpoint",
    "LoadedCheckpoint",
    "MemberSettings",
    "Membership",
    "OnTimeout",
    "PendingSave",
    "Ranks",
    "Removal",
    "RetentionPlan",
    "RetentionSettings",
    "SaveSettings",
    "SavedSource",
    "Saver",
    "SelectionRule",
    "StoreDestination",
    "VerifyDepth",
    "apply_retention",
    "clear_votes",
    "cool_down",
    "copy_checkpoint",
    "count_epochs_without_checkpoint",
    "end_epoch",
    "find_jobs",
    "find_newest",
    "find_newest_verified",
    "import_checkpoint",
    "iterate_checkpoints",
    "list_steps",
    "load",
    "load_into",
    "open_content",
    "open_destination",
    "pin",
    "plan_retention",
    "quarantine",
    "read_checkpoint",
    "read_pins",
    "survey",
    "unpin",
    "verify",
    "watch_epoch_end",
]

_MODULES = {
    "SelectionRule": "cooldown.checkpointers",
    "Content": "contents",
    "CooldownSettings": "settings",
    "EpochResult": "cooldown.result",
    "Destination": "destinations",
    "HubSpec": "destinations",
    "EpochSaver": "cooldown.epochs",
    "LoadedCheckpoint": "loading",
    "MemberSettings": "cooldown.member",
    "ExpectedUpload": "cooldown.membership",
    "Membership": "cooldown.membership",
    "OnTimeout": "settings",
    "CooldownOutcome": "cooldown.result",
    "Ranks": "ranks",
    "Removal": "retention",
    "RetentionSettings": "settings",
    "RetentionPlan": "retention",
    "SaveSettings": "settings",
    "SavedSource": "cooldown.member",
    "Saver": "saving",
    "PendingSave": "saving",
    "EpochStatus": "cooldown.watch",
    "StoreDestination": "destinations",
    "copy_checkpoint": "destinations",
    "clear_votes": "cooldown.clearing",
    "cool_down": "cooldown.cooldown",
    "end_epoch": "cooldown.member",
    "count_epochs_without_checkpoint": "cooldown.epoch_records",
    "ImportedCheckpoint": "foreign_files",
    "import_checkpoint": "importing",
    "load": "loading",
    "load_into": "loading",
    "open_destination": "destinations",
    "pin": "retention",
    "read_pins": "retention",
    "plan_retention": "retention",
    "apply_retention": "retention",
    "open_content": "contents",
    "unpin": "retention",
    "watch_epoch_end": "cooldown.watch",
}


def __getattr__(name: str) -> Any:
    # Names are imported on first use: listing, verification and retention do not need torch.
    if name in __all__:
        module = f"millrace.checkpoints.{_MODULES.get(name, 'find')}"
        return getattr(import_extra_module(module, "torch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
