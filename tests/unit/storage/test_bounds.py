"""A store is never read beyond what was asked for, whatever it sends."""

import ast
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeGuard

import pytest

import millrace
from millrace import errors
from millrace.gradients import Codec, Expected, PayloadError, Refusal
from millrace.gradients.codec.payload import read_header
from millrace.keys.checkpoints import CheckpointKeys
from millrace.records import commit_once, fetch
from millrace.schemas.checkpoint import EpochRecord
from millrace.storage import (
    Credentials,
    Stat,
    Store,
    StoreSpec,
    open_store,
    put,
    read,
    read_into,
    read_range,
)

ANNOUNCED = 10**12
MODEST = 64 << 20  # bytes that may be on their way when the reader hangs up


class Endless:
    """An S3 endpoint that answers each request with a terabyte.

    Attributes:
        url: Its address.
        sent: Bytes that were taken off it.
        status: The answer's first line.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = 0
        self.announced = ANNOUNCED
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += connection.recv(65536)
            ranged = b"\r\nrange:" in asked.lower()
            lines = [
                "HTTP/1.1 206 Partial Content" if ranged else "HTTP/1.1 200 OK",
                f"Content-Length: {self.announced}",
                'ETag: "x"',
                "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT",
            ]
            if ranged:
                lines.append(f"Content-Range: bytes 0-36999/{ANNOUNCED}")
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            while self.sent < 4 * MODEST:
                connection.sendall(bytes(65536))
                self.sent += 65536


@pytest.fixture
def endless() -> Iterator[Endless]:
    server = Endless()
    yield server
    server.close()


def store_of(server: Endless) -> Store:
    return open_store(
        StoreSpec(
            url="s3://bucket",
            endpoint=server.url,
            credentials=Credentials(access_key_id="a", secret_access_key="b"),
            retry_timeout=timedelta(seconds=5),
        )
    )


def test_a_range_is_no_longer_than_it_was_asked_for(endless: Endless) -> None:
    with pytest.raises(errors.CorruptError, match="more than the 37000 bytes that are allowed"):
        read_range(store_of(endless), "worker/gradient", 0, 37_000)
    assert endless.sent < MODEST


def test_a_bucket_that_sends_more_of_a_gradient_than_was_asked_for_is_named(
    endless: Endless,
) -> None:
    expected = Expected(run="r", uid="a", window=1, base=0, codec=Codec(), shapes={"w": (64, 64)})
    stat = Stat("r/a/gradient", expected.size, "x", datetime.now(UTC))
    with pytest.raises(PayloadError, match="Its bucket gives an invalid answer") as caught:
        read_header(store_of(endless), stat, expected)
    assert caught.value.reason is Refusal.UNAVAILABLE


def test_a_record_is_no_larger_than_its_kind_may_be(endless: Endless) -> None:
    with pytest.raises(errors.CorruptError, match="more than the 1048576 that are allowed"):
        fetch(store_of(endless), CheckpointKeys("job").epoch(0), EpochRecord)
    assert endless.sent < MODEST


def test_a_body_that_is_announced_to_be_too_large_is_not_read(endless: Endless) -> None:
    with pytest.raises(errors.CorruptError, match="It was not read"):
        read(store_of(endless), "plan.json", max_size=256 << 20)
    assert endless.sent < MODEST


def test_every_whole_object_that_is_read_has_a_bound() -> None:
    found: dict[str, int] = {}
    unbounded: list[str] = []
    for path in sorted(Path(millrace.__file__).parent.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if is_read(node)]
        found[path.name] = len(calls)
        unbounded += [
            f"{path}:{call.lineno}"
            for call in calls
            if "max_size" not in {keyword.arg for keyword in call.keywords}
        ]
    assert sum(found.values()) >= 10
    assert not unbounded


def is_read(node: ast.AST) -> TypeGuard[ast.Call]:
    """Decide whether a node of a program calls `millrace.storage.read`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "read"


def test_a_buffer_is_not_overrun(endless: Endless) -> None:
    assert read_into(store_of(endless), "part", memoryview(bytearray(1000))) == ANNOUNCED
    assert endless.sent < MODEST


def test_a_record_in_the_way_that_is_too_large_is_named(tmp_path) -> None:
    store = open_store(tmp_path.as_uri())
    key = CheckpointKeys("job").epoch(0)
    put(store, key, bytes((1 << 20) + 1))
    for act in (
        lambda: fetch(store, key, EpochRecord),
        lambda: commit_once(store, key, EpochRecord(job="job", epoch=0, step=1, root=None)),
    ):
        with pytest.raises(errors.CorruptError, match=r"epochs/000000\.json has 1048577 bytes"):
            act()
    assert read(store, key, max_size=(1 << 20) + 1) == bytes((1 << 20) + 1)
    assert read_range(store, key, 1 << 20, 1 << 21) == b"\0"
    assert read_range(store, key, 0, 9 << 20) == bytes((1 << 20) + 1)
