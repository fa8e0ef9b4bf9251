"""NVIDIA's cosmos-xenna: its ``download_distributed``. Run by a Python of its own (`python`)."""

import re
from datetime import timedelta

import ray
from cosmos_xenna.file_distribution import (  # pyright: ignore[reportMissingImports]
    DownloadRequest,
    ObjectDownloadRequest,
    ObjectStoreConfig,
    download_distributed,
)
from loguru import logger  # pyright: ignore[reportMissingImports]

from benchmarks.swarm_peers.order import Clock, Order, Times, answer, read_order

RUNTIME = re.compile(r"Total runtime: ([\d.]+)s")
NEVER = timedelta(days=1).total_seconds()


def config(order: Order) -> ObjectStoreConfig:
    """Return the store's settings in Xenna's words."""
    store = order.store
    made = ObjectStoreConfig.make_for_s3(
        bucket=store["bucket"],
        endpoint=store["endpoint"],
        access_key_id=store["access_key_id"],
        secret_access_key=store["secret_access_key"],
        region=store["region"],
    )
    made.config_args["allow_http"] = "true"
    return made


def main() -> None:
    """Download, and take the runtime that it logs: from its workers' start to their last file."""
    order = read_order()
    ray.init(address=order.ray, log_to_driver=False)
    runtimes: list[float] = []
    logger.add(lambda line: runtimes.extend(float(t) for t in RUNTIME.findall(line)), level="INFO")
    requests = [
        DownloadRequest(value=ObjectDownloadRequest(uri=key, destination=order.path(key)))
        for key in order.keys
    ]
    clock = Clock()
    download_distributed(requests, config(order), display_rate_s=NEVER, **order.options)
    answer(Times(clock.now() - runtimes[-1], runtimes[-1]))


if __name__ == "__main__":
    main()
