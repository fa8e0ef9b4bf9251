"""A tracker that skips pieces with busy holders decides as one that examines every holder."""

import random
from collections import Counter

import pytest

from millrace.swarm.tracker import PieceOrder, Tracker
from millrace.swarm.tracking.nodes import NodeState
from millrace.swarm.tracking.selection import UploaderSelector
from tests.integration.swarm.test_plan import Swarm

NODES, PIECES = 24, 24
select = UploaderSelector.select


def run(zones: int = 1, *, failures: float = 0.0, deaths: int = 0) -> Swarm:
    """Bring all pieces to all nodes, with the same durations and failures in each run."""
    rng = random.Random(0)
    seconds = [rng.uniform(0.5, 1.5) for _ in range(1000)]
    fates = [rng.random() for _ in range(997)]

    def fails(order: PieceOrder) -> bool:
        return fates[(int(order.node[1:]) * 131 + order.piece * 17 + len(swarm.orders)) % 997] < (
            failures
        )

    swarm = Swarm(Tracker([1] * PIECES), lambda _: seconds[len(swarm.orders) % 1000], fails)
    for i in range(NODES):
        swarm.join(f"n{i}", zone=f"z{i % zones}" if zones > 1 else "")
    swarm.begin()
    for i in range(deaths):
        for _ in range(60):
            swarm.step()
        swarm.lose(f"n{i}")
    swarm.finish()
    assert all(have == set(range(PIECES)) for have in swarm.has.values())
    return swarm


@pytest.fixture
def examine_all(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let the tracker examine the holders of each piece."""
    monkeypatch.setattr(UploaderSelector, "skip_blocked", lambda *_: 0)
    monkeypatch.setattr(UploaderSelector, "is_blocked", lambda *_: False)
    return monkeypatch


@pytest.mark.parametrize("zones", [1, 3])
@pytest.mark.parametrize(("failures", "deaths"), [(0.0, 0), (0.1, 5)])
def test_the_orders_are_those_of_a_tracker_that_examines_every_holder(
    zones, failures, deaths, examine_all
):
    reference = run(zones, failures=failures, deaths=deaths)
    examine_all.undo()
    assert run(zones, failures=failures, deaths=deaths).orders == reference.orders


def test_holders_are_examined_about_once_for_each_transfer(monkeypatch):
    examined: Counter[str] = Counter()

    def count(self: UploaderSelector, node: NodeState, number: int) -> NodeState | None:
        examined[node.id] += 1
        return select(self, node, number)

    monkeypatch.setattr(UploaderSelector, "select", count)
    swarm = run()
    assert examined.total() <= 1.1 * len(swarm.orders)
