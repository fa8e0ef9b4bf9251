"""Agents of a run: the run starts them on the nodes of a Ray cluster, or uses those of hosts."""

import logging
import secrets
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace import cluster
from millrace.digest import compute_digest, get_hex
from millrace.errors import ConfigurationError, format_error
from millrace.swarm.actor import Actor
from millrace.swarm.protocol import Endpoint
from millrace.swarm.settings import Hosts, RayNodes

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = logging.getLogger(__name__)

TOO_LATE = "its agent had not started when the other nodes were ready"
_WATCH_INTERVAL = 1.0  # seconds between two listings of the nodes of the cluster
_IDLE_TIMEOUT = 3.0  # seconds for the answer of a kept agent whether it is idle


@dataclass(frozen=True, slots=True)
class Node:
    """A node with an agent.

    Attributes:
        id: Unique id: the id of the node in Ray, or the URL of the host.
        name: Name of the node in the report.
        endpoint: Endpoint of the agent.
        key: Key that the driver signs its requests to the agent with.
        zone: Zone or rack of the node; may be empty.
    """

    id: str
    name: str
    endpoint: Endpoint
    key: bytes
    zone: str = ""


@dataclass(frozen=True, slots=True)
class AbsentNode:
    """A node without an agent.

    Attributes:
        id: Unique id, as `Node.id`.
        name: Name of the node in the report.
        reason: Reason for the missing agent.
    """

    id: str
    name: str
    reason: str


NodeCallback = Callable[[Node | AbsentNode], None]


@contextmanager
def connect_agents(
    settings: RayNodes | Hosts, root: Path | None, on_node: NodeCallback
) -> Generator[int]:
    """Start the agents on a Ray cluster, or use those of hosts, until the block ends.

    Args:
        settings: Nodes.
        root: Folder on every node of a Ray cluster that all destinations are below. Agents of hosts
            have their own roots.
        on_node: Called with each node, in any thread. Nodes that join the cluster later follow.

    Yields:
        Number of expected nodes.

    Raises:
        ConfigurationError: The cluster cannot be reached, or there is no root for its nodes.
    """
    if isinstance(settings, Hosts):
        for node in _iterate_hosts(settings):
            on_node(node)
        yield len(settings.hosts)
        return
    if root is None:
        raise ConfigurationError("`root` is missing: name the folder on the nodes of the cluster.")
    with _RayAgents(settings, root, on_node) as node_count:
        yield node_count


def _iterate_hosts(settings: Hosts) -> Iterator[Node]:
    for host in settings.hosts:
        secret = host.key or settings.key
        assert secret is not None  # the settings have checked it
        endpoint, _ = Endpoint.parse_url(host.url)
        yield Node(host.url, host.name, endpoint, secret.get_secret_value().encode(), host.zone)


class _RayAgents:
    """Agents on the nodes of a Ray cluster, with those that join until the block ends."""

    def __init__(self, settings: RayNodes, root: Path, on_node: NodeCallback) -> None:
        self._settings, self._root, self._on_node = settings, root, on_node
        self._actors: dict[str, ActorHandle[Any]] = {}
        self._starting: dict[str, AbsentNode] = {}  # nodes whose agents have not answered
        self._ended = threading.Event()
        self._watching: list[threading.Thread] = []
        self._stack = ExitStack()
        self._version, self._kept = "", list[str]()  # code of Millrace, and names of kept agents

    def __enter__(self) -> int:
        self._ray = self._stack.enter_context(cluster.connect(self._settings.address))
        if self._settings.keep:
            self._version = _digest_code()
            self._kept = [
                one["name"]
                for one in self._ray.util.list_named_actors(all_namespaces=True)
                if one["namespace"] == cluster.NAMESPACE
            ]
        expected = self._start_missing()
        watcher = threading.Thread(target=self._watch, name="cluster", daemon=True)
        watcher.start()
        self._watching.append(watcher)
        return expected

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for absent in list(self._starting.values()):
            self._note(absent)
        with self._stack:
            for thread in self._watching:
                thread.join()
            if not self._settings.keep:
                for actor in self._actors.values():
                    self._ray.kill(actor)

    def _start_missing(self) -> int:
        """Start an agent on every living node without one; return the number of living nodes."""
        living = cluster.list_living_nodes(self._ray)
        for node in living:
            if node["NodeID"] not in self._actors:
                self._start(node)
        return len(living)

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_INTERVAL):
            try:
                self._start_missing()
            except Exception as error:  # noqa: BLE001 - the next look may succeed
                log.warning("The nodes of the cluster cannot be listed: %s", format_error(error))

    def _start(self, node: dict[str, Any]) -> None:
        node_id, name = node["NodeID"], cluster.make_node_name(node)
        zone = node.get("Labels", {}).get(self._settings.zone_label, "")
        key = secrets.token_bytes(32)
        options: dict[str, Any] = {
            **cluster.make_node_options(node),
            "max_restarts": 0,
            "max_concurrency": 2,
        }
        others: list[str] = []
        if self._settings.keep:
            folder = get_hex(compute_digest(str(self._root).encode()))
            prefix = f"millrace-agent-{node_id}-{folder[:8]}"
            agent = f"{prefix}-{self._version}"
            others = [one for one in self._kept if one.startswith(prefix) and one != agent]
            options |= {
                "name": agent,
                "namespace": cluster.NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
            }
        actor: Any = self._ray.remote(Actor).options(**options).remote()
        self._actors[node_id] = actor
        self._starting[node_id] = AbsentNode(node_id, name, TOO_LATE)
        answer = actor.start.remote(str(self._root), node["NodeManagerAddress"], key)

        def report_start() -> None:
            for other in others:
                self._end_idle(other)
            try:
                port, agent_key = self._ray.get(answer)
            except Exception as error:  # noqa: BLE001 - the run continues without the node
                reason = f"its agent did not start: {format_error(error)}"
                self._note(AbsentNode(node_id, name, reason))
                return
            endpoint = Endpoint("http", node["NodeManagerAddress"], port)
            self._note(Node(node_id, name, endpoint, agent_key, zone))

        threading.Thread(target=report_start, name=f"start-{node_id[:6]}", daemon=True).start()

    def _end_idle(self, name: str) -> None:
        """End an agent that another version of Millrace has kept, unless a run uses it."""
        try:
            actor = self._ray.get_actor(name, cluster.NAMESPACE)
            if self._ray.get(actor.is_idle.remote(), timeout=_IDLE_TIMEOUT):
                self._ray.kill(actor)
        except Exception as error:  # noqa: BLE001 - the run does not need its end
            log.info("The agent %s is left: %s", name, format_error(error))

    def _note(self, node: Node | AbsentNode) -> None:
        """Pass a node on, once: the end of the run may come before the answer of its agent."""
        if self._starting.pop(node.id, None) is not None:
            self._on_node(node)


def _digest_code() -> str:
    """Return a digest of the code of Millrace, which also tells versions in development apart."""
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    lines = (f"{file.relative_to(package)} {compute_digest(file.read_bytes())}" for file in files)
    return get_hex(compute_digest("\n".join(lines).encode()))[:8]
