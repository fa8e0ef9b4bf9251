"""A Ray cluster: reached, and looked at. Ray is imported where there is a cluster only."""

import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from millrace.errors import ConfigurationError, one_line

NAMESPACE = "millrace"


@contextmanager
def connected(address: str | None) -> Generator[Any]:
    """Ray's module, connected to a cluster; one that was connected before stays so.

    Args:
        address: Of the cluster; by default the one we are in, or ``RAY_ADDRESS``.

    Raises:
        ConfigurationError: Ray is not installed, or there is no such cluster.
    """
    ray = _ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        raise ConfigurationError(
            f"There is no Ray cluster to be reached ({one_line(error)}): start one with "
            "`ray start --head`, give its address, and RAY_AUTH_MODE=token if it asks."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def living(ray: Any) -> list[dict[str, Any]]:
    """The nodes that are alive, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def answering(ray: Any) -> list[dict[str, Any]]:
    """The living nodes that do what they are asked: one that has died may still be listed."""
    ask = ray.remote(_nothing)
    asked = [(node, ask.options(max_retries=0, **only_on(node)).remote()) for node in living(ray)]
    found: list[dict[str, Any]] = []
    for node, answer in asked:
        with suppress(ray.exceptions.RayError):
            ray.get(answer)
            found.append(node)
    return found


def _nothing() -> None:
    """What a node is asked that is only to answer."""


def name_of(node: dict[str, Any]) -> str:
    """What a report calls a node: its address, and the beginning of its identity."""
    return f"{node['NodeManagerAddress']}-{node['NodeID'][:6]}"


def only_on(node: dict[str, Any]) -> dict[str, Any]:
    """The options of a task or an actor that runs on this node and takes none of its CPUs."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy}


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "Ray is not installed here: pip install 'millrace[ray]', or name the machines instead."
        ) from error
    return ray
