"""A dataset that another machine makes is followed by its ledger."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace import errors
from millrace.datasets import PipelineSettings, ledger_follower, shard_dataset
from millrace.datasets.ledger_follower import LedgerFollower
from millrace.datasets.progress_events import (
    PartitionEnded,
    PartitionsPending,
    PlanCommitted,
    ShardCommitted,
)
from millrace.progress import Event
from millrace.records import Record, iterate_records
from millrace.schemas.dataset import PartitionEnd, ShardCommit
from millrace.storage import Store, open_store
from tests.support.flows.fixtures import make_jsonl, make_texts


class Events(list[Event]):
    """Events in the order in which they came."""

    def note(self, event: Event) -> None:
        self.append(event)


def make_config(folder: Path) -> PipelineSettings:
    (folder / "raw").mkdir()
    (folder / "raw/rows.jsonl").write_bytes(make_jsonl(make_texts(1000)))
    return PipelineSettings.model_validate(
        {
            "dataset": "words",
            "source": {"url": (folder / "raw").as_uri(), "columns": {"txt": "text"}},
            "store": {"url": (folder / "store").as_uri()},
            "sharding": {"shard_bytes": 65536, "partition_bytes": 50_000,
                         "formats": ["webdataset", "mds"]},
            "execution": {"workers": 0},
        }
    )  # fmt: skip


def describe_commits(events: list[Event]) -> list[tuple[object, ...]]:
    """Return the commits among events, without the processes that made them."""
    return sorted(
        (one.partition, one.number, one.keys, one.samples, one.size, one.fraction)
        for one in events
        if isinstance(one, ShardCommitted)
    )


def count(events: list[Event], kind: type[Event]) -> int:
    return sum(isinstance(one, kind) for one in events)


def test_a_follower_reports_what_the_run_itself_reports(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    store = open_store(config.store)
    followed = Events()
    own = Events()
    follower = LedgerFollower(store, "words", followed.note)
    follower.poll()
    assert (followed, follower.is_complete) == ([], False)

    report = shard_dataset(config, progress=own.note)
    follower.poll()
    follower.poll()  # reports nothing twice
    assert describe_commits(followed) == describe_commits(own)
    assert count(followed, PartitionEnded) == count(own, PartitionEnded) == report.partitions
    assert [one for one in followed if isinstance(one, PlanCommitted | PartitionsPending)] == [
        one for one in own if isinstance(one, PlanCommitted | PartitionsPending)
    ]
    found = follower.make_report(config, report.seconds, 1.5)
    assert (found.new_shards, found.new_samples, found.new_bytes) == (
        report.new_shards, report.new_samples, report.new_bytes,
    )  # fmt: skip
    assert (found.manifest, found.source, found.dollars) == (report.manifest, report.source, 1.5)


def test_a_follower_counts_nothing_that_was_there_before(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    shard_dataset(config)
    ends = sorted((tmp_path / "store/words/commits").glob("*/end.json"))
    later = ends[-1].read_bytes()
    ends[-1].unlink()
    followed = Events()
    follower = LedgerFollower(open_store(config.store), "words", followed.note)
    follower.poll()
    assert [one.partitions for one in followed if isinstance(one, PartitionsPending)] == [1]
    ends[-1].write_bytes(later)
    (tmp_path / "store/words/commits/train-00000/000099.json").write_bytes(b"damaged")
    follower.poll()
    assert count(followed, ShardCommitted) == 0
    assert [one.partition for one in followed if isinstance(one, PartitionEnded)] == [
        ends[-1].parent.name
    ]
    assert follower.make_report(config, 1.0, 0.0).new_shards == 0


@pytest.mark.parametrize("kind", [PartitionEnd, ShardCommit])
@pytest.mark.parametrize("is_first", [False, True])
def test_what_a_failed_poll_has_not_reported_comes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Record], is_first: bool
) -> None:
    """The store does not answer after the first record of a kind."""
    config = make_config(tmp_path)
    own, followed = Events(), Events()
    follower = LedgerFollower(open_store(config.store), "words", followed.note)
    if not is_first:
        follower.poll()
    report = shard_dataset(config, progress=own.note)

    def fail(store: Store, prefix: str, wanted_kind: type[Record], **options: Any) -> Iterator[Any]:
        records = iterate_records(store, prefix, wanted_kind, **options)
        if wanted_kind is kind:
            yield next(records)
            raise errors.UnavailableError("503")
        yield from records

    with monkeypatch.context() as patch:
        patch.setattr(ledger_follower, "iterate_records", fail)
        for _ in range(2):
            with pytest.raises(errors.UnavailableError):
                follower.poll()
    follower.poll()
    follower.poll()
    plans = [one for one in followed if isinstance(one, PlanCommitted)]
    assert plans == [one for one in own if isinstance(one, PlanCommitted)]
    pending = [one.partitions for one in followed if isinstance(one, PartitionsPending)]
    assert pending == [0 if is_first else report.partitions]
    assert describe_commits(followed) == ([] if is_first else describe_commits(own))
    assert count(followed, PartitionEnded) == (0 if is_first else report.partitions)
    found = follower.make_report(config, report.seconds, 1.5)
    assert found.new_shards == (0 if is_first else report.new_shards)


def test_a_card_that_no_machine_has_written_is_written_for_the_report(tmp_path: Path) -> None:
    """The dataset is complete before its card, and the last machine may be lost in between."""
    config = make_config(tmp_path)
    shard_dataset(config)
    settings = PipelineSettings.model_validate(config.model_dump() | {"card": {"license": "mit"}})
    readme = tmp_path / "store/words/README.md"
    assert not readme.exists()
    follower = LedgerFollower(open_store(config.store), "words", Events().note)
    assert follower.make_report(settings, 1.0, 0.0).warnings == ()
    assert "license: mit" in readme.read_text()
    edited = readme.read_text() + "Edited by a person.\n"
    readme.write_text(edited)
    (warning,) = follower.make_report(settings, 1.0, 0.0).warnings
    assert "README.md" in warning
    assert readme.read_text() == edited
