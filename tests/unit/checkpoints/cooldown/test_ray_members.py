"""Members on the nodes of a cluster, one of which does not answer."""

import math
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from millrace import cluster, errors
from millrace.checkpoints import CooldownSettings, MemberSettings, SavedSource
from millrace.checkpoints.cooldown.ray_members import run_members_on_ray
from millrace.storage import StoreSpec

SETTINGS = MemberSettings(
    store=StoreSpec(url="memory://"),
    job="runs/one",
    epoch=0,
    source=SavedSource(url="memory://", job="runs/one"),
)


class StandIn:
    """Stand-in for Ray whose tasks end at once, but for those that are to stall.

    Attributes:
        waits: Longest wait of each question for a result, in seconds.
        canceled: Tasks that were ended by force: function and node.
    """

    exceptions = SimpleNamespace(GetTimeoutError=GetTimeoutError)

    def __init__(self, *stalled: tuple[str, str]) -> None:
        self.stalled = stalled
        self.waits: list[float] = []
        self.canceled: list[tuple[str, str]] = []

    def remote(self, function: Any) -> Any:
        def options(node: str, **_: Any) -> Any:
            return SimpleNamespace(remote=lambda *_: (function.__name__, node))

        return SimpleNamespace(options=options)

    def get(self, task: tuple[str, str], *, timeout: float | None) -> str:
        self.waits.append(math.inf if timeout is None else timeout)
        if task in self.stalled:
            raise GetTimeoutError
        return ""

    def cancel(self, task: tuple[str, str], *, force: bool) -> None:
        assert force
        self.canceled.append(task)


@pytest.fixture
def connect(monkeypatch):
    """Return a function that makes a stand-in for Ray the cluster, with the nodes a, b and c."""

    def connect(ray: StandIn) -> StandIn:
        monkeypatch.setattr(cluster, "connect", lambda _: nullcontext(ray))
        monkeypatch.setattr(cluster, "list_living_nodes", lambda _: "abc")
        monkeypatch.setattr(cluster, "make_node_name", str)
        monkeypatch.setattr(cluster, "make_node_options", lambda node: {"node": node})
        return ray

    return connect


def test_a_node_that_does_not_answer_takes_no_part(connect) -> None:
    ray = connect(StandIn(("_explain_missing", "b")))
    with run_members_on_ray(SETTINGS, None, timedelta(seconds=70)) as members:
        assert members.names == ["a", "c"]
        assert members.without.keys() == {"b"}
        assert "did not answer in 35 s" in members.without["b"]
        assert ray.canceled == [("_explain_missing", "b")]
    assert members.faults == {}
    assert max(ray.waits) <= 70


def test_the_question_for_checkpoints_takes_no_longer_than_members_wait_for_each_other(
    connect,
) -> None:
    ray = connect(StandIn(*(("_explain_missing", node) for node in "abc")))
    with (
        pytest.raises(errors.NotFoundError, match="a: It did not answer in 300 s"),
        run_members_on_ray(SETTINGS, None, timedelta(hours=2)),
    ):
        pass
    assert max(ray.waits) <= 300


def test_a_member_that_does_not_end_is_stopped_and_named(connect) -> None:
    ray = connect(StandIn(("_end_epoch", "b")))
    with run_members_on_ray(SETTINGS, None, timedelta(0)) as members:
        assert members.names == ["a", "b", "c"]
    assert ray.canceled == [("_end_epoch", "b")]
    assert members.faults.keys() == {"b"}
    assert "did not answer in 30 s" in members.faults["b"]


def test_an_upload_in_the_background_has_its_own_limit(connect) -> None:
    ray = connect(StandIn())
    settings = SETTINGS.model_copy(update={"cooldown": CooldownSettings(on_timeout="background")})
    with run_members_on_ray(settings, None, timedelta(seconds=70)):
        asked = len(ray.waits)
    assert ray.waits[asked:] == [math.inf] * 3
