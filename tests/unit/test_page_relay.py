"""The relay of the benchmark of pages counts bytes, and ends with open connections."""

import gc
import logging
import socket
import threading

import pytest

from benchmarks.loader_pages import relay


def test_the_relay_counts_what_the_server_sends_and_ends_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: send_and_wait(server))
        thread.start()
        with (
            caplog.at_level(logging.DEBUG, "asyncio"),
            relay("127.0.0.1", server.getsockname()[1]) as (port, counted),
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            client.sendall(b"question")
            assert client.recv(6, socket.MSG_WAITALL) == b"answer"
            assert counted == [6]
            caplog.clear()
        thread.join()
    gc.collect()
    assert [record.message for record in caplog.records if record.levelno > logging.DEBUG] == []


def send_and_wait(server: socket.socket) -> None:
    """Answer, and read until the other side closes the connection."""
    connection, _ = server.accept()
    with connection:
        assert connection.recv(8, socket.MSG_WAITALL) == b"question"
        connection.sendall(b"answer")
        connection.recv(1)
