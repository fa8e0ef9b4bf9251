"""Reads that take long: when another node also reads the piece, in simulated time."""

import pytest

from millrace.swarm.settings import LimitSettings
from millrace.swarm.tracker import STORE, PieceOrder, Tracker

MIB = 1 << 20


def begin(sizes: list[int], limits: LimitSettings | None = None) -> Tracker:
    """Return a tracker of as many nodes as pieces, each of which reads one from time 0 on."""
    tracker = Tracker(sizes, limits)
    for number in range(len(sizes)):
        tracker.add_node(f"n{number}", [], 0.0)
    reads = [PieceOrder(f"n{number}", number, STORE) for number in range(len(sizes))]
    assert tracker.begin(0.0) == reads[: limits.store_reads if limits else None]
    return tracker


def pass_time(tracker: Tracker, since: float, until: float) -> list[PieceOrder]:
    """Tick four times a second, as the driver does, and return the reads that are ordered."""
    orders: list[PieceOrder] = []
    for number in range(round(4 * since) + 1, round(4 * until) + 1):
        orders += tracker.tick(number / 4)
    return [order for order in orders if order.source == STORE]


@pytest.mark.parametrize("taken", [0.25, 0.5, 2.0])
def test_a_short_piece_is_late_only_after_three_times_the_read_of_a_long_one(taken):
    tracker = begin([64 * MIB, 6 * MIB])
    tracker.complete_transfer("n0", 0, STORE, "d0", taken)
    assert pass_time(tracker, taken, 3 * taken) == []
    assert pass_time(tracker, 3 * taken, 3 * taken + 0.25) == [PieceOrder("n0", 1, STORE)]


def test_reads_that_take_equally_long_for_another_reason_than_their_bytes_are_made_once():
    tracker = begin([MIB] * 8)
    for number in range(7):
        tracker.complete_transfer(f"n{number}", number, STORE, f"d{number}", 0.5)
    assert pass_time(tracker, 0.5, 1.5) == []
    orders = tracker.complete_transfer("n7", 7, STORE, "d7", 1.5)
    assert STORE not in {order.source for order in orders}


def test_a_read_that_is_late_is_made_once_if_the_store_serves_one_read_at_a_time():
    tracker = begin([64 * MIB, 6 * MIB], LimitSettings(store_reads=1))
    orders = tracker.complete_transfer("n0", 0, STORE, "d0", 0.25)
    assert PieceOrder("n0", 1, STORE) in orders
    assert pass_time(tracker, 0.25, 60.0) == []
    orders = tracker.complete_transfer("n0", 1, STORE, "d1", 60.0)
    assert STORE not in {order.source for order in orders}
