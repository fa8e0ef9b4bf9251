"""Addresses of Ray clusters."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

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
        cluster.connected(address),
    ):
        pass


def test_an_address_where_another_server_listens_is_refused_at_once():
    with (
        answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address,
        pytest.raises(ConfigurationError, match="the server there is not Ray's"),
        cluster.connected(address),
    ):
        pass


def test_the_address_in_the_environment_is_checked_too(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(ConfigurationError, match="There is no Ray"), cluster.connected(None):
        pass


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://", "127.0.0.1:99999", "head:port"])
def test_what_is_no_address_is_refused_with_a_sentence(address):
    with (
        pytest.raises(ConfigurationError, match="not the address of a Ray"),
        cluster.connected(address),
    ):
        pass
