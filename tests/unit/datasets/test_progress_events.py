"""Events of partitions on the pipe from a worker to its driver."""

import os
from typing import Any

import orjson
import pytest

from millrace.datasets.progress_events import (
    LocationFailed,
    PartitionEnded,
    PartitionEnding,
    PartitionEvent,
    PartitionOpened,
    PartitionStalled,
    ShardCommitted,
    ShardEncoded,
    ShardHalfEncoded,
    ShardUploaded,
    SourceRead,
    decode_partition_event,
    encode_partition_event,
)
from millrace.errors import WorkerError

COMMITTED = ShardCommitted(
    partition="train-00000",
    number=3,
    keys=(),
    samples=0,
    size=0,
    quarantined=7,
    rows=9,
    bad_rows=6.5,
    fraction=0.5,
)
EVENTS = [
    PartitionOpened(partition="train-00000", cursor=0, commits=0, fraction=0.0),
    ShardHalfEncoded(partition="train-00000", number=3, samples=5),
    ShardEncoded(partition="train-00000", number=3, key="words/shards/x", samples=9, size=10),
    ShardUploaded(partition="train-00000", number=3, samples=9, size=10),
    COMMITTED,
    LocationFailed(
        partition="train-00000", location="s3://mirror", reason="no answer", differs=False
    ),
    PartitionStalled(partition="train-00000", last_row="00000-7", seconds=300.0),
    SourceRead(partition="train-00000", served={"s3://mirror": 9}),
    PartitionEnding(partition="train-00000", samples=9, size=10),
    PartitionEnded(partition="train-00000", samples=9, size=10, quarantined=7),
]


def test_every_class_of_partition_events_is_sent() -> None:
    kinds = {event_class.kind for event_class in PartitionEvent.__subclasses__()}
    assert {event.kind for event in EVENTS} == kinds


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_is_the_same_on_the_other_side(event: PartitionEvent) -> None:
    received = decode_partition_event(orjson.loads(orjson.dumps(encode_partition_event(event))))
    assert received == event
    assert type(received) is type(event)
    assert received.pid == os.getpid()


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "worker.lost"},
        {"kind": None},
        {"partition": None},
        {"samples": "1"},
        {"samples": 1.5},
        {"fraction": None},
        {"another": 1},
    ],
    ids=str,
)
def test_an_event_of_another_form_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match="A worker sent an"):
        decode_partition_event({**encode_partition_event(COMMITTED), **changed})


@pytest.mark.parametrize("data", [None, [], "shard.committed", {}])
def test_anything_else_than_an_event_is_refused(data: object) -> None:
    with pytest.raises(WorkerError, match="unknown kind"):
        decode_partition_event(data)


def test_an_event_without_a_field_is_refused() -> None:
    data = encode_partition_event(COMMITTED)
    del data["samples"]
    with pytest.raises(WorkerError, match=r"(?s)'shard\.committed'.*samples"):
        decode_partition_event(data)
