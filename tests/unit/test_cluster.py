"""Addresses of Ray clusters."""

import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
from ray import exceptions

from millrace import cluster
from millrace.errors import ConfigurationError


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """A server that says this to its first client; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client, suppress(ConnectionResetError):  # the other end need not read it all
                client.sendall(data)
                while client.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_an_address_where_nobody_listens_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with (
        pytest.raises(ConfigurationError, match=f"There is no Ray cluster at {address}"),
        cluster.connect(address),
    ):
        pass


def test_an_address_where_another_server_listens_is_refused_at_once():
    with (
        answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address,
        pytest.raises(ConfigurationError, match="the server there is not Ray's"),
        cluster.connect(address),
    ):
        pass


def test_the_address_in_the_environment_is_checked_too(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(ConfigurationError, match="There is no Ray"), cluster.connect(None):
        pass


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The file in which Ray keeps the address of this machine's cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(
        "ray._private.services.find_gcs_addresses", lru_cache(set)
    )  # of other tests
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_a_cluster_of_this_machine_that_has_ended_is_refused_at_once(kept):
    """Ray would try its address for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    kept.write_text(address)
    said = f"There is no Ray cluster at {address}"
    with pytest.raises(ConfigurationError, match=said), cluster.connect(None):
        pass
    with pytest.raises(ConfigurationError, match=said):
        cluster.check_reachable("auto")


def test_a_machine_that_is_in_no_cluster_is_refused_at_once(kept):
    assert not kept.exists()
    with pytest.raises(ConfigurationError, match="There is no Ray cluster on this machine"):
        cluster.check_reachable(None)


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://", "127.0.0.1:99999", "head:port"])
def test_what_is_no_address_is_refused_with_a_sentence(address):
    with (
        pytest.raises(ConfigurationError, match="not the address of a Ray"),
        cluster.connect(address),
    ):
        pass


def take_over_sigterm(**_: Any) -> None:
    """Replace the handler of SIGTERM, as `ray.init` does."""
    signal.signal(signal.SIGTERM, lambda number, _: None)


def test_a_connection_leaves_the_handler_of_sigterm_as_it_was(monkeypatch):
    worker = SimpleNamespace(print_to_stdstream=None)
    ray = SimpleNamespace(
        init=take_over_sigterm,
        is_initialized=lambda: False,
        shutdown=lambda: None,
        _private=SimpleNamespace(worker=worker),
    )
    monkeypatch.setattr(cluster, "_import_ray", lambda: ray)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with cluster.connect("local"):
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


NODES = [{"NodeID": digit * 56, "NodeManagerAddress": f"10.0.0.{digit}"} for digit in "123"]


def ask_all(answers: dict[str, Exception]) -> list[dict[str, Any]]:
    """Ask the nodes, of which some fail, and return those that answer."""

    def get(node_id: str) -> None:
        if node_id[0] in answers:
            raise answers[node_id[0]]

    def options(**options: Any) -> Any:
        return SimpleNamespace(remote=lambda: options["scheduling_strategy"].node_id)

    ray = SimpleNamespace(
        remote=lambda _: SimpleNamespace(options=options),
        get=get,
        exceptions=exceptions,
    )
    return cluster.list_answering_nodes(ray, NODES, lambda: None)


@pytest.mark.parametrize(
    "loss", [exceptions.NodeDiedError("lost"), exceptions.TaskUnschedulableError("lost")]
)
def test_a_node_that_is_lost_is_left_out(loss):
    assert ask_all({"2": loss}) == [NODES[0], NODES[2]]


def test_a_node_without_millrace_is_named(caplog):
    cause = RuntimeError(
        "The remote function failed to import on the worker.\n\nTraceback (most recent call "
        "last):\n  ...\nModuleNotFoundError: No module named 'millrace'"
    )
    error = exceptions.RayTaskError("f", f"Traceback\n{cause}\n", cause, "ray::f", 1, "10.0.0.2")
    said = (
        r"The node 10\.0\.0\.2-222222 of the Ray cluster cannot run Millrace "
        r"\(ModuleNotFoundError: No module named 'millrace'\): install the driver's version"
    )
    assert ask_all({"2": error}) == [NODES[0], NODES[2]]
    (record,) = caplog.records
    assert re.match(said, record.message)
    with pytest.raises(ConfigurationError, match=said.replace("2-222222", "1-111111")):
        ask_all(dict.fromkeys("123", error))
