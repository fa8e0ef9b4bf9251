"""Slow nodes in a simulated network: the run waits for each of them until it is ready."""

import pytest

from millrace.swarm.driving.run_state import RunState
from millrace.swarm.driving.stragglers import StragglerFinder
from millrace.swarm.tracker import STORE, Tracker
from tests.unit.swarm.driving.runs import SIZE, make_member
from tests.unit.swarm.network import Network

MBIT = 1e6 / 8
PIECES = 128


def make_network(mbits: list[float], *, link_mbit: float = 0.0) -> Network:
    """Return nodes of set rates; with a link, the last two are in a far zone behind it."""
    near, far = "near", "far" if link_mbit else "near"
    zones = {f"id-{i}": near if i < len(mbits) - 2 else far for i in range(len(mbits))}
    rates = {STORE: max(mbits) * MBIT, "near>far": link_mbit * MBIT, "far>near": link_mbit * MBIT}
    for name, mbit in zip(zones, mbits, strict=True):
        rates |= {f"{name} down": mbit * MBIT, f"{name} up": mbit * MBIT}
    return Network(Tracker([SIZE] * PIECES), PIECES, SIZE, rates, zones, near)


@pytest.mark.parametrize(
    ("mbits", "link_mbit"),
    [
        ([200, 200, 50, 4], 0.0),
        ([200, 50, 20, 20], 0.0),
        ([200, 200, 200, 2.2], 0.0),
        ([20, 20, 20, 1], 0.0),
        ([200, 4], 0.0),
        ([200, 200, 200, 200], 4.0),
    ],
)
def test_a_slow_node_whose_pieces_arrive_is_followed_until_it_is_ready(mbits, link_mbit):
    network = make_network(mbits, link_mbit=link_mbit)
    state = RunState(network.tracker, lambda _: None)
    for name in network.zones:
        member = make_member(name.removeprefix("id-"))
        member.joined = True
        state.members.add(member)
    finder = StragglerFinder(state, 1, SIZE * PIECES, 60.0, 0.0)
    given_up: list[tuple[str, float, str]] = []

    def watch() -> None:
        for member in state.members:
            ready_at = network.ready.get(member.node.id)
            member.last_progress = network.now
            if ready_at is not None and not member.ready:
                member.ready, member.seconds, member.files = True, ready_at, {0}
                member.counts.from_peers = SIZE * PIECES
        given_up.extend((m.node.id, network.now, why) for m, why in finder.find(network.now))

    network.watch = watch
    network.run(5000)
    assert given_up == []
    assert len(network.ready) == len(mbits)
