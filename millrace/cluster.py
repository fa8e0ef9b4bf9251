"""Connect to a Ray cluster, and list its nodes. Only functions that need Ray import Ray."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from millrace.errors import ConfigurationError, format_error

logger = logging.getLogger(__name__)

NAMESPACE = "millrace"

_CONNECT_TIMEOUT = 5.0  # seconds
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS_FRAME = 4


@contextmanager
def connect(address: str | None) -> Generator[Any]:
    """Connect to a Ray cluster, and yield the module ``ray``.

    A connection that existed before stays open at the end.

    Args:
        address: Address of the cluster. By default the address in ``RAY_ADDRESS``, or the cluster
            that this process belongs to.

    Raises:
        ConfigurationError: Ray is not installed, or there is no such cluster.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    _check_address(_resolve_address(ray, address))
    try:
        with _keep_sigterm_handler():
            ray.init(
                address=address or "auto",
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:
        raise ConfigurationError(
            f"The Ray cluster cannot be reached ({format_error(error)}): start one with "
            "`ray start --head`, give its address, and set RAY_AUTH_MODE=token if it needs a token."
        ) from error
    try:
        with _log_ray_errors(ray):
            yield ray
    finally:
        ray.shutdown()


@contextmanager
def _keep_sigterm_handler() -> Generator[None]:
    """Restore the handler of SIGTERM, which `ray.init` replaces in the main thread."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Python cannot restore a handler that it has not set, which is None.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _log_ray_errors(ray: Any) -> Generator[None]:
    """Log Ray's messages about lost workers, which Ray prints to stdout, where commands write JSON.

    Ray has no setting for that.
    """
    worker = ray._private.worker  # noqa: SLF001
    original = worker.print_to_stdstream

    def log(data: dict[str, Any], *_: object, **__: object) -> None:
        logger.info("Ray: %s", "\n".join(data["lines"]))

    worker.print_to_stdstream = log
    try:
        yield
    finally:
        worker.print_to_stdstream = original


def check_reachable(address: str | None) -> None:
    """Check within seconds that a Ray cluster can be reached. Authentication is not checked.

    Args:
        address: Address of the cluster, as for `connect`.

    Raises:
        ConfigurationError: Ray is not installed, or there is no such cluster.
    """
    ray = _import_ray()
    if not ray.is_initialized():
        _check_address(_resolve_address(ray, address))


def _resolve_address(ray: Any, address: str | None) -> str:
    """Return the address that `ray.init` would connect to.

    Raises:
        ConfigurationError: No address is set, and there is no cluster on this machine.
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
    """Check that a Ray server listens at an address, since `ray.init` retries for minutes.

    The first frame of any gRPC server is an HTTP/2 SETTINGS frame (RFC 9113, section 3.4). With
    TLS only the connection is checked.

    Raises:
        ConfigurationError: The address is invalid, or no Ray server answers there.
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
    """Return Ray's descriptions of the nodes that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def list_answering_nodes(
    ray: Any, nodes: Iterable[dict[str, Any]], question: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the nodes that answer. Ray may still list a dead node as alive.

    Nodes that cannot run the function are left out, with a warning.

    Args:
        ray: Module ``ray``.
        nodes: Nodes to ask.
        question: Function that each node runs. Its module imports what the nodes must have.

    Raises:
        ConfigurationError: No node can import and run the function.
    """
    ask = ray.remote(question)
    asked = [
        (node, ask.options(max_retries=0, **make_node_options(node)).remote()) for node in nodes
    ]
    found: list[dict[str, Any]] = []
    faults: list[str] = []
    for node, answer in asked:
        try:
            ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            reason = str(error).strip().splitlines()[-1]
            faults.append(
                f"The node {make_node_name(node)} of the Ray cluster cannot run Millrace "
                f"({reason}): install the driver's version of Millrace there, with its extras."
            )
        except ray.exceptions.RayError:
            continue  # the node is lost
        else:
            found.append(node)
    if faults and not found:
        raise ConfigurationError(faults[0])
    for fault in faults:
        logger.warning("%s Until then, the other nodes do its part.", fault)
    return found


def make_node_name(node: dict[str, Any]) -> str:
    """Return a node's name for reports: its address and the first 6 digits of its identifier."""
    return f"{node['NodeManagerAddress']}-{node['NodeID'][:6]}"


def get_own_node_name() -> str:
    """Return the name of the node that this task of Ray runs on."""
    ray: Any = _import_ray()
    return make_node_name(
        {
            "NodeManagerAddress": ray.util.get_node_ip_address(),
            "NodeID": ray.get_runtime_context().get_node_id(),
        }
    )


def make_node_options(node: dict[str, Any]) -> dict[str, Any]:
    """Return Ray's options for a task or an actor that runs on a node and reserves no CPU."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy}


def _import_ray() -> Any:
    try:
        import ray  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "Ray is not installed on this machine: run pip install 'millrace[ray]', or name the "
            "machines instead."
        ) from error
    return ray
