"""Marker in the store: the machines of a campaign wait for their files."""

import secrets
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import ClassVar

from millrace.campaigns.campaign import Training
from millrace.campaigns.workers import has_unreleased_machines
from millrace.records import Record, commit_once, encode_record
from millrace.storage import delete, exists, open_store, put

_RENEWAL_INTERVAL = 300.0  # seconds; workers wait for an hour after the last renewal
_RETRY_TIMEOUT = timedelta(seconds=10)  # of a renewal, for whose end the campaign waits


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


@contextmanager
def renew_prewarm_marker(training: Training) -> Generator[None]:
    """Renew the marker while the block lasts, if there is one, so that the machines wait longer."""
    stop = threading.Event()

    def renew() -> None:
        while True:
            with suppress(Exception):  # the next renewal comes early enough
                _renew(training)
            if stop.wait(_RENEWAL_INTERVAL):
                return

    thread = threading.Thread(target=renew, name="prewarm-marker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
    thread.join()  # a late renewal would make a deleted marker again


def _renew(training: Training) -> None:
    store = open_store(training.write_store).with_retry_timeout(_RETRY_TIMEOUT)
    key, marker = training.keys.prewarm_marker, PrewarmMarker(campaign=training.campaign)
    if exists(store, key):
        put(store, key, encode_record(marker, secrets.token_hex(16)))


def delete_prewarm_marker(training: Training) -> None:
    """Delete the marker, so that the machines wait no longer."""
    delete(open_store(training.write_store), [training.keys.prewarm_marker])
