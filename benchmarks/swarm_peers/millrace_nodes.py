"""Millrace: `prewarm` with agents that Ray starts."""

from pathlib import Path

from benchmarks.swarm_peers.order import Times, print_times, read_order
from benchmarks.swarm_peers.spec import make_spec
from millrace.swarm import PrewarmSettings, RayNodes, Request, prewarm


def main() -> None:
    """Copy the objects to all nodes, and print the times."""
    order = read_order()
    requests = [Request(key=key) for key in order.keys] if order.keys else [Request(prefix="")]
    report = prewarm(
        PrewarmSettings(
            requests=tuple(requests),
            stores={"store": make_spec(order.store)},
            root=Path(order.destination),
            nodes=RayNodes(address=order.ray),
        )
    )
    faults = [node.reason for node in report.nodes if not node.ready]
    if faults:
        raise RuntimeError("; ".join(faults))
    print_times(Times(report.startup, report.seconds - report.startup))


if __name__ == "__main__":
    main()
