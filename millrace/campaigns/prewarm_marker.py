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


def commit_prewarm_marker(training: Training) -> bool:
    """Commit the marker, unless nothing is prewarmed or machines of the campaign run already.

    Returns:
        True if there is a marker, also one of an earlier start of the campaign.
    """
    store, key = open_store(training.write_store), training.keys.prewarm_marker
    if training.prewarm_timeout is not None and not has_unreleased_machines(training):
        commit_once(store, key, PrewarmMarker(campaign=training.campaign))
    return exists(store, key)


def delete_prewarm_marker(training: Training) -> None:
    """Delete the marker, so that the machines wait no longer."""
    delete(open_store(training.write_store), [training.keys.prewarm_marker])
