"""The actor that copies needed files: one run serves all nodes, and errors are not repeated."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from millrace.errors import ConfigurationError, UnavailableError, WorkerError
from millrace.swarm import (
    NodeReport,
    PrewarmReport,
    PrewarmSettings,
    Request,
    needed_files,
    needs_files,
)
from millrace.swarm.needed_files import NodeWarmer

SETTINGS = PrewarmSettings(
    requests=(Request(prefix=""),), stores={"s": {"url": "memory://s"}}, root=Path("/root")
)


def report(**reasons: str) -> PrewarmReport:
    """The report of a run, with the reason of each node; empty for a node that is ready."""
    nodes = [
        NodeReport(
            name=node, ready=not reason, reason=reason, cached=0, from_store=0, from_peers=0,
            failures=0, seconds=0.0, trusted=True, id=node,
        )
        for node, reason in reasons.items()
    ]  # fmt: skip
    return PrewarmReport(
        files=1, size=1, unverified=0, unconfirmed=0, driver_bytes=0, seconds=1.0, startup=0.0,
        nodes=tuple(nodes), direct="", curve=(),
    )  # fmt: skip


@pytest.fixture
def warmer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[NodeWarmer, list[Path]]]:
    """An actor whose runs end as given, and the runs."""

    def make(
        *ends: PrewarmReport | Exception, file: Path | None = None
    ) -> tuple[NodeWarmer, list[Path]]:
        runs: list[Path] = []

        def run(settings: PrewarmSettings) -> PrewarmReport:
            end = ends[len(runs)]
            runs.append(settings.root or Path())
            if isinstance(end, Exception):
                raise end
            return end

        monkeypatch.setattr(needed_files, "prewarm", run)
        return NodeWarmer(SETTINGS, {}, file), runs

    return make


def test_one_run_serves_all_nodes_and_one_more_a_node_that_has_joined(warmer):
    actor, runs = warmer(report(a="", b=""), report(a="", b="", c=""))
    assert [actor.warm(node) for node in "abab"] == ["/root"] * 4
    assert len(runs) == 1
    assert actor.warm("c") == "/root"
    assert len(runs) == 2


def test_a_node_that_did_not_get_its_files_says_why_and_is_tried_again(warmer):
    actor, runs = warmer(report(a="", b="its disk is full"), report(a="", b=""))
    with pytest.raises(WorkerError, match="did not get its files: its disk is full"):
        actor.warm("b")
    assert actor.warm("a") == "/root"
    assert len(runs) == 1
    assert actor.warm("b") == "/root"
    with pytest.raises(IndexError):
        actor.warm("d")  # not in the cluster: a third run


def test_calls_that_wait_for_a_run_get_its_error(warmer, monkeypatch):
    actor, runs = warmer(UnavailableError("The store does not answer."), report(a="", b="", c=""))
    begun, run = threading.Event(), needed_files.prewarm
    entered = threading.Semaphore(0)

    def run_slowly(settings: PrewarmSettings) -> PrewarmReport:
        begun.set()
        for _ in range(2):
            assert entered.acquire(timeout=60)
        return run(settings)

    class Lock:
        """A lock that tells of each call that waits for it."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if begun.is_set():
                entered.release()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    monkeypatch.setattr(needed_files, "prewarm", run_slowly)
    monkeypatch.setattr(actor, "_lock", Lock())
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(actor.warm, "a")
        assert begun.wait(60)
        others = [pool.submit(actor.warm, node) for node in "bc"]
        for one in (first, *others):
            with pytest.raises(UnavailableError, match="does not answer"):
                one.result()
    assert len(runs) == 1
    monkeypatch.setattr(needed_files, "prewarm", run)
    assert actor.warm("b") == "/root"


def test_a_node_whose_files_are_gone_gets_them_again(warmer):
    actor, runs = warmer(report(a="", b=""), report(a="", b=""))
    assert actor.warm("a") == actor.warm("a") == "/root"
    assert actor.warm("a", is_gone=True) == "/root"
    assert len(runs) == 2


def test_settings_that_were_corrected_are_read_again(warmer, tmp_path):
    file = tmp_path / "prewarm.yaml"
    file.write_text("wrong")
    actor, runs = warmer(UnavailableError("There is no object."), report(a=""), file=file)
    with pytest.raises(UnavailableError):
        actor.warm("a")
    file.write_text(
        "{requests: [{prefix: other/}], stores: {s: {url: 'memory://s'}}, root: /other}"
    )
    assert actor.warm("a") == "/other"
    assert runs == [Path("/root"), Path("/other")]


def test_decorators_in_another_form_are_refused():
    needed = needs_files(SETTINGS)
    with pytest.raises(ConfigurationError, match=r'write @needs_files\("prewarm.yaml"\) below'):
        needs_files(lambda: None)

    class Reader:
        pass

    for remote in (ray.remote(lambda: None), ray.remote(Reader)):
        with pytest.raises(ConfigurationError, match=r"write @ray\.remote in the line above it"):
            needed(remote)

    async def run() -> None:
        pass

    with pytest.raises(ConfigurationError, match="leave out `async`"):
        needed(run)


def test_a_class_without_an_init_is_one_of_actors():
    class Plain:
        def read(self) -> int:
            return 1

    made = needs_files(SETTINGS)(Plain)
    ray.remote(made)
    with pytest.raises(ConfigurationError, match=r"call `ray\.init`"):
        made()
