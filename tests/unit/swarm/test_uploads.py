"""Uploads of an agent to nodes that read slowly, and the signatures that it keeps."""

import socket
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from millrace.swarm import protocol, server
from millrace.swarm.protocol import SignatureChecker, SignatureError, sign
from millrace.swarm.uploads import UploadLimiter


def test_over_the_limit_the_address_with_most_uploads_loses_its_oldest():
    limiter = UploadLimiter(8)
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(6)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(closing(end))
        addresses = ("honest", "slow", "slow", "slow", "other", "slow")
        for (ours, _), address in zip(pairs, addresses, strict=True):
            stack.enter_context(limiter.track(ours, address, 1))
        ended: list[int] = []
        for number, (_, theirs) in enumerate(pairs):
            theirs.setblocking(False)
            try:
                assert theirs.recv(1) == b""
                ended.append(number)
            except BlockingIOError:
                continue
        assert ended == [1, 2]


def test_an_upload_that_has_ended_counts_no_longer():
    limiter = UploadLimiter(4)
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        for _ in range(10):
            with limiter.track(ours, "a", 3):
                ours.sendall(b"x")
                assert theirs.recv(1) == b"x"


def test_a_reader_that_is_too_slow_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "_GRACE", 0.0)
    monkeypatch.setattr(protocol, "_LEAST_RATE", 1e15)
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    ours, theirs = socket.socketpair()

    def read() -> None:
        while theirs.recv(4096):
            pass

    reader = threading.Thread(target=read)
    with closing(theirs), path.open("rb") as file:
        reader.start()
        ours.settimeout(60.0)
        with closing(ours), pytest.raises(TimeoutError, match="too slow"):
            server._send_file(ours, file.fileno(), 0, 64 << 20)
        reader.join(60.0)


def test_a_flood_of_signatures_is_kept_only_in_part():
    checker, key = SignatureChecker("agent", 3), b"key"
    headers = [sign(key, "GET", f"/{number}", to="agent") for number in range(10)]
    for number, header in enumerate(headers):
        checker.check(key, header, "GET", f"/{number}")
        assert len(checker._seen) + len(checker._older) <= 6
    for number in (7, 8, 9):
        with pytest.raises(SignatureError, match="used before"):
            checker.check(key, headers[number], "GET", f"/{number}")
