"""Millrace: `prewarm`, with agents that Ray starts."""

from pathlib import Path

from benchmarks.swarm_peers.order import Times, answer, read_order
from benchmarks.swarm_peers.spec import spec_of
from millrace.swarm import PrewarmSettings, RayNodes, Request, prewarm


def main() -> None:
    """Warm every node, and say how long it took without the start of the agents."""
    order = read_order()
    requests = [Request(key=key) for key in order.keys] if order.keys else [Request(prefix="")]
    report = prewarm(
        PrewarmSettings(
            requests=tuple(requests),
            stores={"store": spec_of(order.store)},
            root=Path(order.destination),
            nodes=RayNodes(address=order.ray),
        )
    )
    faults = [node.why for node in report.nodes if not node.ready]
    if faults:
        raise RuntimeError("; ".join(faults))
    answer(Times(report.startup, report.seconds - report.startup))


if __name__ == "__main__":
    main()
