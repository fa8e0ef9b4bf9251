"""Millrace: `prewarm`, with agents that Ray starts."""

from pathlib import Path

from pydantic import SecretStr

from benchmarks.swarm_peers.order import Times, answer, read_order
from millrace.storage import Credentials, StoreSpec
from millrace.swarm import PrewarmSettings, RayNodes, Request, prewarm


def main() -> None:
    """Warm every node, and say how long it took without the start of the agents."""
    order = read_order()
    store = StoreSpec(
        url=f"s3://{order.store['bucket']}",
        endpoint=order.store["endpoint"],
        region=order.store["region"],
        credentials=Credentials(
            access_key_id=order.store["access_key_id"],
            secret_access_key=SecretStr(order.store["secret_access_key"]),
        ),
    )
    requests = [Request(key=key) for key in order.keys] if order.keys else [Request(prefix="")]
    report = prewarm(
        PrewarmSettings(
            requests=tuple(requests),
            stores={"store": store},
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
