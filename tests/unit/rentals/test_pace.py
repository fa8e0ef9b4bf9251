"""Intervals between requests to the API of Vast.ai."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from pydantic import SecretStr

from millrace import errors
from millrace.rentals.vast.api import RequestKind, VastClient, _RequestPacer
from tests.support.rentals.parts import ManualClock


def test_the_interval_counts_from_the_answer_since_a_request_may_arrive_late() -> None:
    clock, delays, arrivals = ManualClock(), [5.0, 0.0], list[float]()

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            clock.elapsed += delays.pop(0)
            arrivals.append(clock.elapsed)
            body = b'{"credit": 1.5}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            client = VastClient(
                SecretStr("key"), f"http://127.0.0.1:{server.server_port}", clock=clock
            )
            assert [client.read_credit() for _ in range(2)] == [1.5, 1.5]
        finally:
            server.shutdown()
            thread.join()
    assert arrivals == [1005.0, 1006.0]


def test_a_request_that_may_only_be_sent_after_its_end_is_not_sent() -> None:
    clock = ManualClock()
    pacer = _RequestPacer(clock)
    pacer.delay(RequestKind.LIST, 57.0)
    with (
        pytest.raises(errors.UnavailableError, match="takes no request to list before"),
        pacer.hold_turn(RequestKind.LIST, clock.elapsed + 40.0),
    ):
        pass
    assert clock.elapsed == 1000.0
    with pacer.hold_turn(RequestKind.LIST, clock.elapsed + 58.0):
        assert clock.elapsed == 1057.0


def test_the_next_request_of_another_thread_waits_for_the_answer() -> None:
    clock, sent = ManualClock(), list[float]()
    pacer = _RequestPacer(clock)

    def send() -> None:
        with pacer.hold_turn(RequestKind.LIST):
            sent.append(clock.elapsed)

    with pacer.hold_turn(RequestKind.LIST):
        other = threading.Thread(target=send)
        other.start()
        with pacer.hold_turn(RequestKind.DESTROY):  # another kind waits for nothing
            clock.elapsed += 5
    other.join()
    assert sent == [1006.0]
