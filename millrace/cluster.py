"""A Ray cluster: reached, and looked at. Ray is imported where there is a cluster only."""

import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from millrace.errors import ConfigurationError, format_error

NAMESPACE = "millrace"

_CONNECT_TIMEOUT = 5.0  # seconds
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS_FRAME = 4


@contextmanager
def connect(address: str | None) -> Generator[Any]:
    """Ray's module, connected to a cluster; one that was connected before stays so.

    Args:
        address: Of the cluster; by default the one we are in, or ``RAY_ADDRESS``.

    Raises:
        ConfigurationError: Ray is not installed, or there is no such cluster.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    _check_address(_resolve_address(ray, address))
    try:
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        raise ConfigurationError(
            f"There is no Ray cluster to be reached ({format_error(error)}): start one with "
            "`ray start --head`, give its address, and RAY_AUTH_MODE=token if it asks."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def check_reachable(address: str | None) -> None:
    """Check within seconds that a Ray cluster can be reached; whether it lets us in is not checked.

    Args:
        address: As of `connect`.

    Raises:
        ConfigurationError: As of `connect`.
    """
    ray = _import_ray()
    if not ray.is_initialized():
        _check_address(_resolve_address(ray, address))


def _resolve_address(ray: Any, address: str | None) -> str:
    """Return the address that `ray.init` would connect to.

    Raises:
        ConfigurationError: It would look for a cluster on this machine, and there is none.
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    if wanted != "auto":
        return wanted
    try:
        return ray._private.services.get_ray_address_from_environment("auto", None)  # noqa: SLF001
    except ConnectionError:
        raise ConfigurationError(
            "There is no Ray cluster on this machine: start one with `ray start --head`, join one "
            "with `ray start --address HOST:PORT`, or give the address of one."
        ) from None


def _check_address(address: str) -> None:
    """Check that a Ray server listens at an address: `ray.init` retries a wrong one for minutes.

    The first frame of any gRPC server is an HTTP/2 SETTINGS frame (RFC 9113, section 3.4). With
    TLS only the connection is checked.

    Raises:
        ConfigurationError: The address is no address, or no Ray server answers there.
    """
    if address == "local":
        return
    try:
        parts = urlsplit(address if "://" in address else f"ray://{address}")
        target = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(
            f"{address!r} is not the address of a Ray cluster ({error}): write HOST:PORT."
        ) from None
    host, port = target
    if not host or port is None:
        raise ConfigurationError(
            f"{address!r} is not the address of a Ray cluster: write HOST:PORT, as `ray start "
            "--head` prints it."
        )
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT) as raw:
            if os.environ.get("RAY_USE_TLS", "0") in {"0", ""}:
                raw.sendall(_HTTP2_PREFACE)
                answer = raw.recv(9, socket.MSG_WAITALL)
                if len(answer) < 9 or answer[3] != _SETTINGS_FRAME:
                    raise ConnectionError("the server there is not Ray's")
    except OSError as error:
        raise ConfigurationError(
            f"There is no Ray cluster at {address} ({format_error(error)}): give the address that "
            "`ray start --head` printed, and check that this machine reaches its port."
        ) from error


def list_living_nodes(ray: Any) -> list[dict[str, Any]]:
    """Return the nodes that are alive, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def list_answering_nodes(ray: Any) -> list[dict[str, Any]]:
    """Return the living nodes that answer: one that has died may still be listed."""
    ask = ray.remote(_do_nothing)
    asked = [
        (node, ask.options(max_retries=0, **make_node_options(node)).remote())
        for node in list_living_nodes(ray)
    ]
    found: list[dict[str, Any]] = []
    for node, answer in asked:
        with suppress(ray.exceptions.RayError):
            ray.get(answer)
            found.append(node)
    return found


def _do_nothing() -> None:
    """Do nothing: a node that runs this has answered."""


def make_node_name(node: dict[str, Any]) -> str:
    """Return a node's name for reports: its address, and the beginning of its identity."""
    return f"{node['NodeManagerAddress']}-{node['NodeID'][:6]}"


def make_node_options(node: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a task or an actor that runs on this node and takes no CPU."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy}


def _import_ray() -> Any:
    try:
        import ray  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "Ray is not installed here: pip install 'millrace[ray]', or name the machines instead."
        ) from error
    return ray
