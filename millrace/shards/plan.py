"""The plan: how a dataset is cut, pinned once for everybody who works on it."""

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from millrace import errors
from millrace.formats import webdataset
from millrace.keys import DatasetKeys
from millrace.models.dataset import Layout, Plan
from millrace.records import commit_once, differences, fetch
from millrace.shards.settings import CutSettings
from millrace.sources import Cut, SourceSettings, cut
from millrace.storage import Store, create

_AT_ONCE = 16  # listings on their way to the store
# Versions of what turns a row into the bytes of a sample: a change of the bytes is a change here.
_ROWS = {"rows": "2", "json": "orjson-3"}


def make_plan(
    keys: DatasetKeys, source: SourceSettings, source_store: Store, settings: CutSettings
) -> tuple[Plan, Mapping[str, bytes]]:
    """Cut the source and describe the result. Reads the source's listing, writes nothing.

    Returns:
        The plan, and the objects it refers to: key → body.
    """
    pieces: Cut = cut(
        source,
        source_store,
        keys,
        split_bytes=settings.split_bytes,
        split_files=settings.split_files,
        seed=settings.seed,
        holdout=settings.holdout,
    )
    plan = Plan(
        dataset=keys.dataset,
        source=pieces.record,
        layout=Layout(
            format="webdataset",
            writer={**webdataset.WRITER, **_ROWS},
            shard_bytes=settings.shard_bytes,
            shard_samples=settings.shard_samples,
        ),
        seed=settings.seed,
        holdout=settings.holdout,
        split_bytes=settings.split_bytes,
        splits=pieces.splits,
        split_files=settings.split_files,
    )
    return plan, pieces.listings


def pin_plan(store: Store, keys: DatasetKeys, plan: Plan, listings: Mapping[str, bytes]) -> Plan:
    """Commit the plan, or find that it is the one that was committed before.

    Returns:
        The plan that everybody works by.

    Raises:
        ConflictError: The dataset was planned otherwise: the fields that differ are named, or
            that the source has changed since.
    """
    try:
        there = fetch(store, keys.plan, Plan)
    except errors.NotFoundError:
        pass
    else:
        _same(there, plan)
        return there

    def keep(listing: tuple[str, bytes]) -> None:
        # Its name holds its digest, and whoever reads it checks.
        with contextlib.suppress(errors.ExistsError):
            create(store, *listing)

    bodies = iter(listings.items())
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="listings") as pool:
        while batch := list(islice(bodies, _AT_ONCE)):
            list(pool.map(keep, batch))
    commit = commit_once(store, keys.plan, plan)
    if not commit.mine:
        _same(commit.record, plan)
    return commit.record


def _same(there: Plan, ours: Plan) -> None:
    differing = [
        f"{name} ({_short(a)}, now {_short(b)})"
        for name, a, b in _fields(there, ours)
        if name not in {"source", "layout", "splits"}
    ]
    differing += [
        f"layout.{n} ({_short(a)}, now {_short(b)})"
        for n, a, b in _fields(there.layout, ours.layout)
    ]
    differing += [
        f"source.{n} ({_short(a)}, now {_short(b)})"
        for n, a, b in _fields(there.source, ours.source)
        if n in {"kind", "settings"}
    ]
    if differing:
        raise errors.ConflictError(
            f"The dataset {ours.dataset} was planned with other settings: {', '.join(differing)}. "
            "Run it with those, or give this one another name."
        )
    if there.source.sha256 != ours.source.sha256:
        raise errors.ChangedError(
            f"The source {ours.source.url} has changed since {ours.dataset} was planned: "
            f"{there.source.files} files of {there.source.size} bytes then, {ours.source.files} of "
            f"{ours.source.size} now. Put it back, or shard it under another dataset name."
        )
    if there.splits != ours.splits:
        raise errors.ConflictError(
            f"The dataset {ours.dataset} was cut by a Millrace that cuts otherwise: finish it with "
            "that version, or give this one another name."
        )


def _fields(there: Any, ours: Any) -> list[tuple[str, Any, Any]]:
    return [(n, getattr(there, n), getattr(ours, n)) for n in differences(there, ours)]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
