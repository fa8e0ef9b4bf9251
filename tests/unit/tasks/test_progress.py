"""The engine's events, as one progress artifact."""

import logging
import threading
from dataclasses import replace

import pytest
from prefect.logging import disable_run_logger

from millrace.datasets.progress_events import (
    PartitionEnded,
    PartitionOpened,
    PartitionsPending,
    PlanCommitted,
    ShardCommitted,
)
from millrace.gradients.progress_events import (
    GradientAccepted,
    GradientRefused,
    LinkApplied,
    QuotaExceeded,
    RosterChanged,
    WindowMerged,
)
from millrace.rentals.progress_events import MachineReady, MachineReleased, RentalCostUpdated
from millrace.schemas.gradient import ExclusionReason
from millrace.schemas.rental import ReleaseReason
from millrace.swarm.progress_events import NodeLost, PrewarmProgressed
from tasks import progress as module
from tasks.progress import RentalProgress, ShardProgress, SwarmProgress, WindowProgress

PLAN = PlanCommitted(key="words/plan.json", partitions=4, files=2, size=4000)


def commit(size: int, *, fraction: float = 0.0) -> ShardCommitted:
    return ShardCommitted(
        partition="train-00000",
        number=0,
        keys=("words/shards/x",),
        samples=1,
        size=size,
        quarantined=0,
        rows=1,
        bad_rows=0,
        fraction=fraction,
    )


def end(partition: str) -> PartitionEnded:
    return PartitionEnded(partition=partition, samples=1, size=1, quarantined=0)


@pytest.fixture
def counting() -> ShardProgress:
    """One that only counts: nothing is shown before its block is entered."""
    with disable_run_logger():
        return ShardProgress("progress-words")


def test_it_counts_partitions_and_parts_of_open_ones(counting: ShardProgress) -> None:
    assert counting.percent == 0
    assert counting.sentence == "Reading the source's listing."
    for event in (
        PLAN,
        PartitionOpened(partition="train-00000", cursor=0, commits=0, fraction=0.0),
        PartitionOpened(partition="train-00001", cursor=9, commits=1, fraction=0.5),
        commit(1_000, fraction=0.25),
    ):
        counting(event)
    assert counting.percent == pytest.approx(100 * 0.75 / 4)
    counting(end("train-00001"))
    assert counting.percent == pytest.approx(100 * 1.25 / 4)
    assert counting.sentence.startswith(
        "1 of 4 partitions ended; this run has made 1 shard, 1.0 kB"
    )
    assert sum(counting.bytes_by_second.values()) == 1_000


def test_a_resumed_run_begins_where_the_last_one_was(counting: ShardProgress) -> None:
    counting(PLAN)
    counting(PartitionsPending(partitions=1))
    assert counting.percent == 75


def test_a_run_that_fails_ends_its_progress_with_the_reason(counting: ShardProgress) -> None:
    counting(PLAN)
    counting._thread = threading.Thread(target=str)  # shows nothing: what it would show counts
    with pytest.raises(KeyError), counting:
        raise KeyError("boom")
    assert counting.sentence.endswith("Failed: 'boom'")


def test_a_swarm_is_as_far_as_its_bytes() -> None:
    with disable_run_logger():
        counting = SwarmProgress("progress-prewarm")
    assert counting.percent == 0
    assert counting.sentence == "Looking for the files and the nodes."
    began = PrewarmProgressed(
        present=1_000_000, total=4_000_000, moved=0, nodes=2, ready=0, seconds=1.0
    )
    counting(began)
    counting(replace(began, present=3_000_000, moved=2_000_000, ready=1))
    counting(NodeLost(node="n1", reason="it no longer answers"))
    assert counting.percent == 75
    assert counting.sentence.startswith("1 of 2 nodes ready; 3.0 MB of 4.0 MB there, at ")
    assert counting.sentence.endswith(" to go.")
    assert sum(counting.bytes_by_second.values()) == 2_000_000  # what was there before took no time


def test_a_rental_is_as_far_as_the_machines_that_it_needs() -> None:
    with disable_run_logger():
        counting = RentalProgress("progress-machines", 8)
    counting(RentalCostUpdated(rental="fleet", machines=3, dollars=0.5))
    for slot in range(3):
        counting(MachineReady(machine=f"fleet/{slot}", instance=slot))
    assert (counting.percent, counting.sentence) == (100, "3 of 3 machines run, $0.50.")
    done = MachineReleased(
        machine="fleet/1", reason=ReleaseReason.DONE, message="it ended", dollars=0.1
    )
    counting(done)
    assert (counting.percent, counting.sentence) == (100, "2 of 3 machines run, 1 done, $0.50.")
    counting(replace(done, machine="fleet/2", reason=ReleaseReason.DEAD))
    assert counting.percent == pytest.approx(100 * 2 / 3)
    assert counting.sentence == "1 of 3 machines run, 1 done, $0.50."


def test_windows_and_who_came_to_the_open_one_are_counted() -> None:
    with disable_run_logger():
        counting = WindowProgress("progress-aggregate", workers=3, windows=4)
    for event in (
        LinkApplied(run="runs/one", window=6, step=60),
        GradientAccepted(uid="a", size=1000, norm=1.0),
        GradientRefused(uid="b", reason=ExclusionReason.LATE),
    ):
        counting(event)
    assert counting.percent == 0
    assert counting.sentence == (
        "0 windows merged by this run, the last is 6; to the next 1 of 3 workers came, 1 refused."
    )
    counting(WindowMerged(run="runs/one", window=7, taken=1, excluded=2))
    assert counting.percent == 25
    assert counting.sentence == (
        "1 window merged by this run, the last is 7; to the next 0 of 3 workers came."
    )
    assert sum(counting.bytes_by_second.values()) == 1000


@pytest.mark.parametrize(
    ("named", "registered", "came"),
    [
        (0, 4, "3 of 4 workers"),
        (2, 4, "3 of 6 workers"),
        (0, 0, "3 gradients"),
        (2, 0, "3 gradients"),
    ],
)
def test_the_workers_that_came_are_counted_among_named_and_registered_ones(
    named: int, registered: int, came: str
) -> None:
    with disable_run_logger():
        counting = WindowProgress("progress-aggregate", workers=named)
        if registered:
            counting(
                RosterChanged(
                    run="runs/one", window=1, active=registered, joined=tuple("abcd"),
                    counting=(), left=(), removed=(),
                )
            )  # fmt: skip
        for uid in "abc":
            counting(GradientAccepted(uid=uid, size=1000, norm=1.0))
    assert counting.sentence == (
        f"0 windows merged by this run, the last is 0; to the next {came} came."
    )


def test_a_worker_that_stores_too_much_is_warned_of_once_until_it_is_twice_as_much(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("quota"))
    counting = WindowProgress("progress-aggregate", workers=2)
    for objects, stored in ((3, 1000), (4, 1500), (5, 2000), (6, 2500), (10, 2600)):
        counting(QuotaExceeded(uid="a", objects=objects, size=stored))
    counting(QuotaExceeded(uid="b", objects=3, size=1000))
    assert [text.partition(", below")[0] for text in caplog.messages] == [
        "a stores 3 objects, 1.0 kB", "a stores 5 objects, 2.0 kB", "a stores 10 objects, 2.6 kB",
        "b stores 3 objects, 1.0 kB",
    ]  # fmt: skip


def test_of_a_run_without_end_the_open_window_is_shown() -> None:
    with disable_run_logger():
        counting = WindowProgress("progress-aggregate", workers=4)
    counting(GradientAccepted(uid="a", size=1000, norm=1.0))
    assert counting.percent == 25


def test_a_run_with_many_partitions_logs_each_tenth_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("tenths"))
    caplog.set_level(logging.INFO, "tenths")
    counting = ShardProgress("progress-words")
    counting(PlanCommitted(key="p", partitions=1000, files=2, size=4000))
    for number in range(1000):
        counting(end(f"train-{number}"))
    assert len(caplog.messages) == 11  # the plan, and ten
    assert caplog.messages[-1] == "1000 of 1,000 partitions ended"
