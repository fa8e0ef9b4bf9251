"""An answer to boto3 that ends early or stalls is requested again."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from enum import Enum, auto

import pytest

from millrace import errors
from millrace.storage import (
    Credentials,
    Store,
    clients,
    delete_versions,
    list_objects,
    list_uploads,
    list_versions,
    open_store,
)
from millrace.storage.foreign import read_foreign_range
from millrace.storage.versions import ObjectVersion

OBJECTS = (
    b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a</Key><Size>3</Size>"
    b"<LastModified>2024-01-01T00:00:00Z</LastModified></Contents></ListBucketResult>"
)
VERSIONS = (
    b"<ListVersionsResult><IsTruncated>false</IsTruncated><Version><Key>a</Key>"
    b"<VersionId>1</VersionId><IsLatest>false</IsLatest><Size>3</Size></Version>"
    b"</ListVersionsResult>"
)
UPLOADS = (
    b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated><Upload><Key>a</Key>"
    b"<UploadId>1</UploadId><Initiated>2024-01-01T00:00:00Z</Initiated></Upload>"
    b"</ListMultipartUploadsResult>"
)
REFUSED = (
    b"<DeleteResult><Error><Key>a</Key><VersionId>1</VersionId><Code>AccessDenied</Code>"
    b"<Message>no</Message></Error></DeleteResult>"
)


class Damage(Enum):
    """Fault of one answer."""

    EMPTY = auto()
    """The connection ends before the body, whose length is announced."""
    CUT = auto()
    """The connection ends in the middle of a body whose length is announced."""
    CUT_CHUNK = auto()
    """The connection ends in the middle of a body in chunks."""
    CUT_UNMEASURED = auto()
    """The connection ends in the middle of a body without an announced length."""
    STALL = auto()
    """No further byte comes after the middle of the body."""


class Server:
    """S3 endpoint with one answer, of which the first ones are damaged.

    Attributes:
        url: URL of the endpoint.
        body: Body of each answer.
        damage: Fault of the damaged answers.
        damaged: Number of answers that are still to be damaged.
        requests: Number of requests.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.body = b""
        self.damage = Damage.CUT
        self.damaged = 1
        self.requests = 0
        self._stalled = list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for connection in self._stalled:
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Answer one request, and close the connection unless the answer stalls."""
        _receive(connection)
        self.requests += 1
        damage = self.damage if self.damaged else None
        self.damaged -= bool(self.damaged)
        body = self.body if damage is None else self.body[: len(self.body) // 2]
        match damage:
            case Damage.CUT_CHUNK:
                head, body = b"Transfer-Encoding: chunked", b"%x\r\n%b" % (len(self.body), body)
            case Damage.CUT_UNMEASURED:
                head = b"X-Length: unknown"
            case Damage.EMPTY:
                head, body = b"Content-Length: %d" % len(self.body), b""
            case _:
                head = b"Content-Length: %d" % len(self.body)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n%b\r\n\r\n%b" % (head, body))
        if damage is Damage.STALL:
            self._stalled.append(connection)
        else:
            connection.close()


def _receive(connection: socket.socket) -> None:
    """Read one request with its body."""
    asked = b""
    while b"\r\n\r\n" not in asked:
        asked += connection.recv(65536)
    head, _, body = asked.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            left = int(value) - len(body)
            while left > 0:
                left -= len(connection.recv(65536))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(clients, "READ_TIMEOUT", timedelta(milliseconds=100))
    server = Server()
    yield server
    server.close()


def open_server(server: Server, retry_timeout: timedelta = timedelta(minutes=1)) -> Store:
    return open_store(
        "s3://bucket",
        endpoint=server.url,
        credentials=Credentials(access_key_id="a", secret_access_key="b"),
        retry_timeout=retry_timeout,
        is_foreign=True,
    )


Verb = Callable[[Store], object]
VERBS: dict[str, tuple[bytes, Verb, object]] = {
    "objects": (OBJECTS, lambda store: [one.key for one in list_objects(store)], ["a"]),
    "versions": (VERSIONS, lambda store: [one.key for one in list_versions(store)], ["a"]),
    "uploads": (UPLOADS, lambda store: [one.key for one in list_uploads(store)], ["a"]),
    "deletion": (
        REFUSED,
        lambda store: [
            one.reason for one in delete_versions(store, [ObjectVersion("a", "1", 3, False)])
        ],
        ["version 1: no"],
    ),
}


@pytest.mark.parametrize("damage", Damage)
@pytest.mark.parametrize("verb", VERBS)
def test_a_damaged_answer_is_requested_again(server: Server, verb: str, damage: Damage) -> None:
    server.body, call, expected = VERBS[verb]
    server.damage = damage
    assert call(open_server(server)) == expected
    others = verb == "versions"  # it first asks whether there may be any
    assert (server.requests, server.damaged) == (2 + others, 0)


@pytest.mark.parametrize("damage", [Damage.EMPTY, Damage.CUT, Damage.STALL])
def test_a_damaged_object_is_requested_again(server: Server, damage: Damage) -> None:
    server.body, server.damage = b"abc", damage
    assert read_foreign_range(open_server(server), "a", 0, 3) == b"abc"
    assert server.requests == 2


@pytest.mark.parametrize("damage", Damage)
def test_answers_that_are_always_damaged_are_given_up(server: Server, damage: Damage) -> None:
    server.body, server.damage, server.damaged = VERSIONS, damage, 1_000_000
    store = open_server(server, timedelta(milliseconds=300))
    with pytest.raises(errors.UnavailableError, match=r"given up after \d+ tries"):
        list(list_versions(store))


NEVER = b"<VersioningConfiguration xmlns='http://s3.amazonaws.com/doc/2006-03-01/'%b"


@pytest.mark.parametrize(
    ("answer", "requests"),
    [
        (NEVER % b"/>", 1),
        (b"<?xml version='1.0'?>\n" + NEVER % b"></VersioningConfiguration>", 1),
        (NEVER % b"><Status>Suspended</Status></VersioningConfiguration>", 2),
        (VERSIONS, 2),
        (OBJECTS, 2),
    ],
    ids=["empty", "empty, with an end", "suspended", "versions", "objects"],
)
def test_versions_are_listed_unless_the_bucket_surely_never_had_any(
    server: Server, answer: bytes, requests: int
) -> None:
    server.body, server.damaged = answer, 0
    found = [one.key for one in list_versions(open_server(server))]
    assert (found, server.requests) == (["a"] if answer == VERSIONS else [], requests)
