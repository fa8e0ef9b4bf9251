"""Checkpoints with proof: saved by digest, verified before they are used, found by listing."""

from typing import TYPE_CHECKING, Any

from millrace.extras import import_module_of

if TYPE_CHECKING:
    from millrace.checkpoints.choosing import Choice
    from millrace.checkpoints.contents import Content, saved_content
    from millrace.checkpoints.cooldown import Cooled, cool_down, epochs_without
    from millrace.checkpoints.destinations import (
        Destination,
        HubSpec,
        StoreDestination,
        bring,
        open_destination,
    )
    from millrace.checkpoints.epochs import EpochSaver
    from millrace.checkpoints.find import (
        VerifyDepth,
        checkpoint_of,
        checkpoints,
        find_jobs,
        latest,
        newest,
        quarantine,
        steps,
        survey,
        verify,
    )
    from millrace.checkpoints.loading import Loaded, load, load_into
    from millrace.checkpoints.member import MemberSettings, SavedSource, end_epoch
    from millrace.checkpoints.members import Membership
    from millrace.checkpoints.probing import Probe, ProbeVerdict, probe
    from millrace.checkpoints.ranks import Ranks
    from millrace.checkpoints.retention import (
        Removal,
        Retained,
        RetentionPlan,
        pin,
        plan_retention,
        retain,
        unpin,
    )
    from millrace.checkpoints.saving import Saver, Saving
    from millrace.checkpoints.settings import CooldownSettings, OnTimeout, Retention, SaveSettings
    from millrace.checkpoints.watching import Seen, watch
    from millrace.models.checkpoint import CooldownOutcome

__all__ = [
    "Choice",
    "Content",
    "CooldownOutcome",
    "CooldownSettings",
    "Cooled",
    "Destination",
    "EpochSaver",
    "HubSpec",
    "Loaded",
    "MemberSettings",
    "Membership",
    "OnTimeout",
    "Probe",
    "ProbeVerdict",
    "Ranks",
    "Removal",
    "Retained",
    "Retention",
    "RetentionPlan",
    "SaveSettings",
    "SavedSource",
    "Saver",
    "Saving",
    "Seen",
    "StoreDestination",
    "VerifyDepth",
    "bring",
    "checkpoint_of",
    "checkpoints",
    "cool_down",
    "end_epoch",
    "epochs_without",
    "find_jobs",
    "latest",
    "load",
    "load_into",
    "newest",
    "open_destination",
    "pin",
    "plan_retention",
    "probe",
    "quarantine",
    "retain",
    "saved_content",
    "steps",
    "survey",
    "unpin",
    "verify",
    "watch",
]

_ROOMS = {
    "Choice": "choosing",
    "Content": "contents",
    "CooldownSettings": "settings",
    "Cooled": "cooldown",
    "Destination": "destinations",
    "HubSpec": "destinations",
    "EpochSaver": "epochs",
    "Loaded": "loading",
    "MemberSettings": "member",
    "Membership": "members",
    "OnTimeout": "settings",
    "CooldownOutcome": "cooldown",
    "Probe": "probing",
    "Ranks": "ranks",
    "Removal": "retention",
    "Retained": "retention",
    "Retention": "settings",
    "RetentionPlan": "retention",
    "SaveSettings": "settings",
    "SavedSource": "member",
    "Saver": "saving",
    "Saving": "saving",
    "Seen": "watching",
    "StoreDestination": "destinations",
    "ProbeVerdict": "probing",
    "bring": "destinations",
    "cool_down": "cooldown",
    "end_epoch": "member",
    "epochs_without": "cooldown",
    "load": "loading",
    "load_into": "loading",
    "open_destination": "destinations",
    "pin": "retention",
    "plan_retention": "retention",
    "probe": "probing",
    "retain": "retention",
    "saved_content": "contents",
    "unpin": "retention",
    "watch": "watching",
}


def __getattr__(name: str) -> Any:
    # Imported when asked for: whoever lists, verifies or retains does not need torch.
    if name in __all__:
        module = f"millrace.checkpoints.{_ROOMS.get(name, 'find')}"
        return getattr(import_module_of(module, "torch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
