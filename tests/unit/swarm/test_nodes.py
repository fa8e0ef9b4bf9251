"""Agents that stay on the nodes of a Ray cluster after a run."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from millrace import cluster
from millrace.swarm import RayNodes, nodes
from millrace.swarm.actor import Actor
from millrace.swarm.nodes import AbsentNode, Node, connect_agents
from tests.unit.swarm.test_messages import make_body

NODE = {"NodeID": "ab" * 28, "NodeManagerAddress": "127.0.0.1", "Alive": True}


class StandIn:
    """Stand-in for Ray with one node, whose actors are objects of this process.

    Attributes:
        actors: Living actors by their names.
    """

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.util = SimpleNamespace(list_named_actors=self._list_named_actors)

    def nodes(self) -> list[dict[str, Any]]:
        return [NODE]

    def remote(self, made: Callable[[], Actor]) -> Any:
        def start(name: str) -> Any:
            if name not in self.actors:
                self.actors[name] = made()
            return self.get_actor(name, cluster.NAMESPACE)

        def options(name: str, **_: Any) -> Any:
            return SimpleNamespace(remote=lambda: start(name))

        return SimpleNamespace(options=options)

    def get_actor(self, name: str, _: str) -> Any:
        actor = self.actors[name]
        start, is_idle = (SimpleNamespace(remote=one) for one in (actor.start, actor.is_idle))
        return SimpleNamespace(name=name, start=start, is_idle=is_idle)

    def get(self, result: Any, *, timeout: float | None = None) -> Any:
        return result

    def kill(self, actor: Any) -> None:
        agent = self.actors.pop(actor.name)._agent
        assert agent
        agent.close()

    def _list_named_actors(self, *, all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        return [{"namespace": cluster.NAMESPACE, "name": name} for name in self.actors]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    ray = StandIn()
    monkeypatch.setattr(cluster, "connect", lambda _: nullcontext(ray))
    yield ray
    for actor in ray.actors.values():
        if actor._agent:
            actor._agent.close()


def find_agent(root: Path) -> int:
    """Return the port of the agent that a run with `keep` gets."""
    found: SimpleQueue[Node | AbsentNode] = SimpleQueue()
    with connect_agents(RayNodes(keep=True), root, found.put):
        node = found.get(timeout=60)
    assert isinstance(node, Node)
    return node.endpoint.port


def test_an_agent_that_is_kept_is_used_again(ray: StandIn, tmp_path: Path) -> None:
    assert find_agent(tmp_path) == find_agent(tmp_path)


def test_a_run_of_another_version_has_its_own_agents_and_ends_idle_ones(
    ray: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = find_agent(tmp_path)
    find_agent(tmp_path / "other")
    before = set(ray.actors)
    monkeypatch.setattr(nodes, "_digest_code", lambda: "0" * 8)
    assert find_agent(tmp_path) != port
    assert len(before - set(ray.actors)) == 1
    assert len(ray.actors) == 2


def test_an_agent_of_another_version_stays_as_long_as_a_run_uses_it(
    ray: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_agent(tmp_path)
    before = set(ray.actors)
    (actor,) = ray.actors.values()
    assert actor._agent
    actor._agent.start_run("run", make_body())
    monkeypatch.setattr(nodes, "_digest_code", lambda: "0" * 8)
    find_agent(tmp_path)
    assert before < set(ray.actors)
