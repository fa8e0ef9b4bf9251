"""The agents of a run: started on the nodes of a Ray cluster, or found where they already run."""

import secrets
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace import cluster
from millrace.digest import compute_sha256
from millrace.errors import format_error
from millrace.swarm.actor import Actor
from millrace.swarm.protocol import Endpoint
from millrace.swarm.settings import Hosts, RayNodes

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_WATCH_INTERVAL = 1.0  # seconds between two looks at who belongs to the cluster


@dataclass(frozen=True, slots=True)
class Node:
    """An agent.

    Attributes:
        id: What tells it from all other nodes: the node's id in Ray, or the address of the host.
        name: What the report calls it.
        place: Where it listens.
        key: What control requests to it are signed with.
        zone: Its zone or rack; may be empty.
    """

    id: str
    name: str
    place: Endpoint
    key: bytes
    zone: str = ""


@dataclass(frozen=True, slots=True)
class AbsentNode:
    """A node without an agent.

    Attributes:
        id: As `Node.id`.
        name: What the report calls it.
        why: A sentence.
    """

    id: str
    name: str
    why: str


NodeCallback = Callable[[Node | AbsentNode], None]


@contextmanager
def connect_agents(settings: RayNodes | Hosts, root: Path, came: NodeCallback) -> Generator[int]:
    """Start the agents, or find them, and tell of each that is there; also of late ones.

    Args:
        settings: Which.
        root: The folder that files go below, on every node.
        came: Told of each, in any thread, until the block ends.

    Yields:
        How many nodes are expected.

    Raises:
        ConfigurationError: There is no cluster, or nobody in it.
    """
    if isinstance(settings, Hosts):
        for node in _iterate_hosts(settings):
            came(node)
        yield len(settings.hosts)
        return
    with _RayAgents(settings, root, came) as expected:
        yield expected


def _iterate_hosts(settings: Hosts) -> Iterator[Node]:
    for host in settings.hosts:
        secret = host.key or settings.key
        assert secret is not None  # the settings see to it
        place, _ = Endpoint.parse_url(host.url)
        yield Node(host.url, host.name, place, secret.get_secret_value().encode(), host.zone)


class _RayAgents:
    """Agents on the living nodes of a Ray cluster, and on those that join while it is watched."""

    def __init__(self, settings: RayNodes, root: Path, came: NodeCallback) -> None:
        self._settings, self._root, self._came = settings, root, came
        self._actors: dict[str, ActorHandle[Any]] = {}
        self._ended = threading.Event()
        self._watching: list[threading.Thread] = []
        self._stack = ExitStack()

    def __enter__(self) -> int:
        self._ray = self._stack.enter_context(cluster.connect(self._settings.address))
        expected = self._start_missing()
        watcher = threading.Thread(target=self._watch, name="cluster", daemon=True)
        watcher.start()
        self._watching.append(watcher)
        return expected

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with self._stack:
            for thread in self._watching:
                thread.join()
            if not self._settings.keep:
                for actor in self._actors.values():
                    self._ray.kill(actor)

    def _start_missing(self) -> int:
        """Start an agent on every living node that has none."""
        living = cluster.list_living_nodes(self._ray)
        for node in living:
            if node["NodeID"] not in self._actors:
                self._start(node)
        return len(living)

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_INTERVAL):
            self._start_missing()

    def _start(self, node: dict[str, Any]) -> None:
        identity, name = node["NodeID"], cluster.make_node_name(node)
        zone = node.get("Labels", {}).get(self._settings.zone_label, "")
        key = secrets.token_bytes(32)
        options: dict[str, Any] = {
            **cluster.make_node_options(node),
            "max_restarts": 0,
            "max_concurrency": 2,
        }
        if self._settings.keep:
            options |= {
                "name": f"millrace-agent-{identity}-{compute_sha256(str(self._root).encode())[:8]}",
                "namespace": cluster.NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
            }
        actor: Any = self._ray.remote(Actor).options(**options).remote()
        self._actors[identity] = actor
        asked = actor.start.remote(str(self._root), node["NodeManagerAddress"], key)

        def report_start() -> None:
            try:
                port, its_key = self._ray.get(asked)
            except Exception as error:  # noqa: BLE001 - a node that cannot start is a node less
                why = f"its agent did not start: {format_error(error)}"
                self._came(AbsentNode(identity, name, why))
                return
            place = Endpoint("http", node["NodeManagerAddress"], port)
            self._came(Node(identity, name, place, its_key, zone))

        threading.Thread(target=report_start, name=f"start-{identity[:6]}", daemon=True).start()
