"""Retries by huggingface_hub end with the time for retries of Millrace."""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from httpx2 import Request, Response
from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError

from millrace import errors
from millrace.hub import HubSpec
from millrace.hub.backoff import BackoffLimit, BackoffTimeoutError
from millrace.hub.client import HubClient

REQUEST = Request("GET", "http://127.0.0.1:1/api")


@contextmanager
def serve_busy(**headers: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a server that answers each request with status 429, and the requests."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(429)
            for name, value in {**headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "3600"},
        {"ratelimit": '"api";r=0;t=3600', "ratelimit-policy": '"fixed window";"api";q=5;w=3600'},
    ],
    ids=["Retry-After", "ratelimit"],
)
def test_a_pause_beyond_the_time_for_retries_is_not_waited_for(headers):
    with serve_busy(**headers) as (url, seen):
        spec = HubSpec(repo="person/repo", endpoint=url, retry_timeout=timedelta(milliseconds=10))
        client = HubClient(spec)
        with pytest.raises(errors.UnavailableError, match="the Hub failed") as found:
            client.list_tree("folder/", "0" * 40, recursive=False)
    assert found.value.status == 429
    assert len(seen) == 1


def test_requests_of_others_are_not_touched():
    with serve_busy(**{"Retry-After": "3600"}) as (url, _), BackoffLimit(1.0).apply():
        with pytest.raises(HfHubHTTPError):
            get_session().get(url)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(get_session().get, url).result().status_code == 429
    with serve_busy(**{"Retry-After": "3600"}) as (url, _):
        assert get_session().get(url).status_code == 429


def test_the_hooks_are_added_once():
    for _ in range(3):
        with BackoffLimit(1.0).apply():
            pass
    assert all(len(set(hooks)) == len(hooks) for hooks in get_session().event_hooks.values())


def answer(status: int) -> Response:
    return Response(status, request=REQUEST)


def test_the_time_begins_with_the_first_failure_and_ends_with_a_success():
    limit = BackoffLimit(10.0)
    limit.check_request(REQUEST, 100.0)
    limit.check_response(answer(503), 101.0)
    limit.check_request(REQUEST, 109.0)
    limit.check_response(answer(503), 110.0)
    assert limit.deadline == 111.0
    limit.check_response(answer(404), 110.5)  # an answer, after which nothing is repeated
    assert limit.deadline == math.inf
    limit.check_response(answer(503), 200.0)
    with pytest.raises(BackoffTimeoutError):
        limit.check_request(REQUEST, 210.5)
    with pytest.raises(HfHubHTTPError):
        limit.check_response(answer(503), 210.5)


def test_a_request_without_an_answer_counts_as_a_failure_when_it_is_repeated():
    limit = BackoffLimit(10.0)
    limit.check_request(REQUEST, 100.0)
    limit.check_request(Request("GET", "http://127.0.0.1:1/other"), 150.0)
    assert limit.deadline == math.inf
    limit.check_request(Request("GET", "http://127.0.0.1:1/other"), 160.0)
    assert limit.deadline == 170.0


def test_a_success_within_a_repeated_call_gives_no_more_time():
    limit = BackoffLimit(10.0)
    limit.check_response(answer(503), 100.0)
    assert limit.fail_try(105.0) == 100.0
    with limit.apply():
        limit.check_response(answer(200), 106.0)
        assert limit.deadline == 110.0
        assert limit.fail_try(107.0) == 107.0
    limit.restart(time.monotonic())
    assert limit.deadline > 0
