"""Peer with ``download_distributed`` of NVIDIA's cosmos-xenna, in the Python of `xenna_python`."""

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

from benchmarks.swarm_peers.order import Order, Timer, Times, print_times, read_order

RUNTIME = re.compile(r"Total runtime: ([\d.]+)s")
DISPLAY_INTERVAL = timedelta(days=1).total_seconds()


def make_config(order: Order) -> ObjectStoreConfig:
    """Return Xenna's settings of the store."""
    store = order.store
    config = ObjectStoreConfig.make_for_s3(
        bucket=store["bucket"],
        endpoint=store["endpoint"],
        access_key_id=store["access_key_id"],
        secret_access_key=store["secret_access_key"],
        region=store["region"],
    )
    config.config_args["allow_http"] = "true"
    return config


def main() -> None:
    """Download the objects, and print the times.

    The transfer time is the runtime in Xenna's log, from the start of its workers to the last file.
    """
    order = read_order()
    ray.init(address=order.ray, log_to_driver=False)
    runtimes: list[float] = []
    logger.add(lambda line: runtimes.extend(float(t) for t in RUNTIME.findall(line)), level="INFO")
    requests = [
        DownloadRequest(value=ObjectDownloadRequest(uri=key, destination=order.make_path(key)))
        for key in order.keys
    ]
    timer = Timer()
    download_distributed(
        requests, make_config(order), display_rate_s=DISPLAY_INTERVAL, **order.options
    )
    print_times(Times(timer.read() - runtimes[-1], runtimes[-1]))


if __name__ == "__main__":
    main()
