"""Marker in the store: the machines of a campaign wait for their files."""

from typing import ClassVar

from millrace.campaigns.campaign import Training
from millrace.campaigns.workers import has_unreleased_machines
from millrace.records import Record, commit_once
from millrace.storage import delete, exists, open_store


class PrewarmMarker(Record):
    """Record that the machines of a campaign wait for their files."""

    record_kind: ClassVar[str] = "campaign-warming"

    campaign: str


def begin_prewarm(training: Training) -> None:
    """Have machines wait for their files when they come up, unless machines train already."""
    store = open_store(training.write_store)
    if training.prewarm_timeout is None or has_unreleased_machines(training):
        return
    commit_once(store, training.keys.prewarm_marker, PrewarmMarker(campaign=training.campaign))


def awaits_prewarm(training: Training) -> bool:
    """Decide whether machines wait for their files."""
    return exists(open_store(training.write_store), training.keys.prewarm_marker)


def end_prewarm(training: Training) -> None:
    """Have machines wait for their files no longer."""
    delete(open_store(training.write_store), [training.keys.prewarm_marker])
