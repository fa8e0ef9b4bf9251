"""A store is never read beyond what was asked for, whatever it sends."""

import ast
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeGuard

import pytest

import millrace
from millrace import errors
from millrace.gradients import (
    Codec,
    ExclusionReason,
    ExpectedGradient,
    GradientError,
    Sender,
    gather,
)
from millrace.gradients.codec.gradient_object import read_header
from millrace.keys.checkpoints import CheckpointKeys
from millrace.records import commit_once, fetch
from millrace.schemas.checkpoint import EpochRecord
from millrace.storage import (
    Credentials,
    Stat,
    Store,
    StoreSpec,
    list_folders,
    list_objects,
    open_store,
    put,
    read,
    read_and_hash,
    read_range,
)
from millrace.storage.clients import MAX_ANSWER_SIZE
from millrace.threads import DaemonThreadPool
from tests.unit.gradients.test_gather import OPEN, QUICK, send

ANNOUNCED = 10**12
MODEST = 64 << 20  # bytes that may be on their way when the reader hangs up


class Endless:
    """An S3 endpoint that answers each request with a terabyte.

    Attributes:
        url: Its address.
        sent: Bytes that were taken off it.
        answers: Number of its answers.
        most: Number of answers of a terabyte, before all others refuse the request.
        announced: Length that it announces; None sends the body in chunks.
        status: Status of its answers; 0 is 200, or 206 for a range.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = self.answers = 0
        self.most = 1_000_000
        self.announced: int | None = ANNOUNCED
        self.status = 0
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
            self.answers += 1
            if self.answers > self.most:
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                return
            ranged = b"\r\nrange:" in asked.lower() and not self.status
            length = f"Content-Length: {self.announced}"
            lines = [
                "HTTP/1.1 206 Partial Content" if ranged else f"HTTP/1.1 {self.status or 200} OK",
                "Transfer-Encoding: chunked" if self.announced is None else length,
                'ETag: "x"',
                "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT",
            ]
            if ranged:
                lines.append(f"Content-Range: bytes 0-36999/{ANNOUNCED}")
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            block = bytes(65536)
            chunk = b"10000\r\n" + block + b"\r\n"
            while self.sent < 16 * MODEST:
                connection.sendall(chunk if self.announced is None else block)
                self.sent += 65536


@pytest.fixture
def endless() -> Iterator[Endless]:
    server = Endless()
    yield server
    server.close()


def store_of(server: "Endless | Pages", *, is_foreign: bool = False) -> Store:
    return store_at(server.url, is_foreign=is_foreign)


def store_at(endpoint: str, *, is_foreign: bool) -> Store:
    spec = StoreSpec(
        url="s3://bucket",
        endpoint=endpoint,
        credentials=Credentials(access_key_id="a", secret_access_key="b"),
        retry_timeout=timedelta(seconds=0.5) if is_foreign else timedelta(seconds=5),
    )
    return open_store(spec, is_foreign=is_foreign)


VERBS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: list(list_objects(store, "a/")),
    "folders": lambda store: list_folders(store, "a/"),
    "range": lambda store: read_range(store, "a/b", 0, 1000),
}


@pytest.mark.parametrize("announced", [ANNOUNCED, None], ids=["announced", "chunked"])
@pytest.mark.parametrize("status", [0, 403, 404, 500])
@pytest.mark.parametrize("verb", VERBS)
def test_no_answer_of_a_foreign_endpoint_is_read_beyond_a_limit(
    endless: Endless, verb: str, status: int, announced: int | None
) -> None:
    """obstore ends the process here: it allocates what a listing or an error announces.

    An answer that is too long is taken for a fault of the way, and requested again.
    """
    endless.status, endless.announced, endless.most = status, announced, 1
    is_range = verb == "range" and not status
    expected = errors.CorruptError if is_range else errors.DeniedError
    store = store_of(endless, is_foreign=True).with_retry_timeout(timedelta(minutes=1))
    with pytest.raises(expected):
        VERBS[verb](store)
    assert endless.answers == (1 if is_range else 2)
    assert 0 < endless.sent < MODEST + (1000 if is_range else MAX_ANSWER_SIZE)


PAGE = (
    "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a/b</Key>"
    "<Size>1</Size><LastModified>2024-01-01T00:00:00Z</LastModified></Contents></ListBucketResult>"
)


class Pages:
    """An S3 endpoint that answers each request with the same body.

    Args:
        body: Body of the answers.
        is_slow: Whether it then sends single spaces without end.
    """

    def __init__(self, body: str, *, is_slow: bool = False) -> None:
        self._is_slow, self._stop = is_slow, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._body = body.encode()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    asked = b""
                    while b"\r\n\r\n" not in asked:
                        asked += connection.recv(65536)
                    size = ANNOUNCED if self._is_slow else len(self._body)
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n"
                    connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + self._body)
                    while self._is_slow and not self._stop.wait(0.02):
                        connection.sendall(b" ")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("<Key>a/b</Key>", ""),
        ("<Size>1</Size>", "<Size>x</Size>"),
        ("<Size>1</Size>", "<Size>-1</Size>"),
        ("2024-01-01T00:00:00Z", "yesterday"),
        ("2024-01-01T00:00:00Z", "2024-01-01T00:00:00"),
        ("</ListBucketResult>", ""),
        ("ListBucketResult", "Error"),
        ("<IsTruncated>false", "<IsTruncated>true"),  # without the token of the next page
    ],
)
def test_a_listing_of_nonsense_is_an_unavailable_store(right: str, wrong: str) -> None:
    pages = Pages(PAGE)
    try:
        patient = store_of(pages, is_foreign=True).with_retry_timeout(timedelta(minutes=1))
        (found,) = list_objects(patient, exact=True)
        assert (found.key, found.size) == ("a/b", 1)
    finally:
        pages.close()
    pages = Pages(PAGE.replace(right, wrong))
    try:
        with pytest.raises(errors.UnavailableError):
            list(list_objects(store_of(pages, is_foreign=True), exact=True))
    finally:
        pages.close()


@pytest.mark.parametrize("verb", VERBS)
def test_an_answer_of_a_foreign_endpoint_that_trickles_without_end_is_given_up(verb: str) -> None:
    pages = Pages(PAGE, is_slow=True)
    try:
        with pytest.raises(errors.UnavailableError):
            VERBS[verb](store_of(pages, is_foreign=True))
    finally:
        pages.close()


@pytest.mark.parametrize("contents", [True, False], ids=["objects", "empty"])
@pytest.mark.parametrize("verb", ["list", "folders"])
def test_a_listing_of_a_foreign_endpoint_whose_pages_do_not_end_is_given_up(
    verb: str, contents: bool
) -> None:
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"
    body = PAGE.replace("<IsTruncated>false</IsTruncated>", more)
    if not contents:
        body = body[: body.index("<Contents>")] + "</ListBucketResult>"
    pages = Pages(body)
    try:
        with pytest.raises(errors.UnavailableError):
            VERBS[verb](store_of(pages, is_foreign=True))
    finally:
        pages.close()


def test_few_requests_wait_for_the_answers_of_a_foreign_endpoint() -> None:
    """An endpoint that never ends its headers holds a thread for each request."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        store = store_at(f"http://127.0.0.1:{silent.getsockname()[1]}", is_foreign=True)
        pool = DaemonThreadPool(8, "hanging")
        for _ in range(8):
            pool.submit(read_range, store, "a/b", 0, 1000)
        held = [silent.accept()[0] for _ in range(8)]
        with pytest.raises(errors.UnavailableError, match="too slowly or without end"):
            read_range(store, "a/b", 0, 1000)
        for connection in held:
            connection.close()


def test_a_foreign_store_stays_foreign_on_another_machine(endless: Endless) -> None:
    store = store_of(endless, is_foreign=True)
    assert pickle.loads(pickle.dumps(store)).is_foreign
    assert store.with_retry_timeout(timedelta(0)).is_foreign


def test_a_worker_whose_bucket_announces_a_terabyte_costs_only_itself(
    endless: Endless, tmp_path: Path
) -> None:
    shared = open_store(tmp_path.as_uri())
    for uid in "01":
        send(shared, uid)
    senders = [Sender("0", shared), Sender("1", shared)]
    senders.append(Sender("2", store_of(endless, is_foreign=True)))
    found = gather(replace(OPEN, closes=datetime.now(UTC)), senders, QUICK)
    assert sorted(found.taken) == ["0", "1"]
    assert found.excluded["2"].reason is ExclusionReason.UNAVAILABLE


def test_a_range_is_no_longer_than_it_was_asked_for(endless: Endless) -> None:
    with pytest.raises(errors.CorruptError, match="more than the 37000 bytes that are allowed"):
        read_range(store_of(endless), "worker/gradient", 0, 37_000)
    assert endless.sent < MODEST


def test_a_bucket_that_sends_more_of_a_gradient_than_was_asked_for_is_named(
    endless: Endless,
) -> None:
    expected = ExpectedGradient(
        run="r", uid="a", window=1, base=0, codec=Codec(), shapes={"w": (64, 64)}
    )
    stat = Stat("r/a/gradient", expected.size, "x", datetime.now(UTC))
    with pytest.raises(GradientError, match="Its bucket gives an invalid answer") as caught:
        read_header(store_of(endless), stat, expected)
    assert caught.value.reason is ExclusionReason.UNAVAILABLE


def test_a_record_is_no_larger_than_its_kind_may_be(endless: Endless) -> None:
    with pytest.raises(errors.CorruptError, match="more than the 1048576 that are allowed"):
        fetch(store_of(endless), CheckpointKeys("job").make_epoch_key(0), EpochRecord)
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
    buffer = memoryview(bytearray(1000))
    assert read_and_hash(store_of(endless), "part", [buffer], size=1000) == b""
    with pytest.raises(errors.MillraceError):
        read_and_hash(store_of(endless), "part", [buffer], size=ANNOUNCED)
    assert endless.sent < MODEST


def test_a_record_in_the_way_that_is_too_large_is_named(tmp_path) -> None:
    store = open_store(tmp_path.as_uri())
    key = CheckpointKeys("job").make_epoch_key(0)
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
