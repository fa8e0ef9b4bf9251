"""Put source data on a web server and on the Hub, both of which fail."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, HfApi

from millrace.testing.faults import Fault, Faults
from millrace.testing.hub import READER, WRITER, HubServer
from tests.soak.source_data import SourceData
from tests.support.web import Site

PROBABILITY = 0.05  # share of requests with a fault
READ_FAULTS = frozenset(Fault) - {Fault.DAMAGE}
"""Faults that a read can have."""


def make_read_faults(seed: int) -> Faults:
    """Return faults of reads with equal probabilities, in one of twenty requests."""
    chances: dict[str, Any] = {kind.value: PROBABILITY / len(READ_FAULTS) for kind in READ_FAULTS}
    return Faults(**chances, seed=seed, stall_seconds=0.2)


def put_on_web(site: Site, source: SourceData) -> SourceData:
    """Put source data on a web server."""
    paths: list[str] = []
    folder = quote(source.folder.name)
    for path, body in _iterate_files(source):
        site.files[f"/{folder}/{quote(path)}"] = body
        paths.append(path)
    location = {"url": f"{site.url}/{folder}", "paths": paths, "allow_private": True}
    return replace(source, location={**location, "retry_timeout": "120s"})


def put_on_hub(hub: HubServer, source: SourceData) -> SourceData:
    """Put source data into a dataset of the Hub."""
    repo = hub.make_repo(dataset=True)
    HfApi(endpoint=hub.endpoint, token=WRITER).create_commit(
        repo,
        [CommitOperationAdd(path, body) for path, body in _iterate_files(source)],
        commit_message="source data",
        repo_type="dataset",
    )
    location: dict[str, Any] = {
        "url": f"hf://datasets/{repo}",
        "endpoint": hub.endpoint,
        "options": {"token": READER},
        "retry_timeout": "120s",
    }
    return replace(source, location=location)


def read_by_library(hub: HubServer, source: SourceData) -> SourceData:
    """Put source data into a dataset of the Hub whose files the library `datasets` finds."""
    return replace(
        put_on_hub(hub, source),
        name=f"{source.name} by huggingface",
        source={"kind": "huggingface", "split": "train"},
    )


def _iterate_files(source: SourceData) -> Iterator[tuple[str, bytes]]:
    for path in sorted(source.folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(source.folder).as_posix(), path.read_bytes()
