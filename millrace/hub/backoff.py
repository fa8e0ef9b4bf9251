"""Limit the time for which `huggingface_hub` repeats a request.

The library repeats most requests up to five times. It waits as long as the Hub asks, and no setting
limits that. `BackoffLimit.apply` adds event hooks to the library's HTTP client, which its function
`get_session` returns. The hooks end a request whose time is over, or that would be repeated later.

The hooks only act on the thread that has called `apply`. So other users of the library in this
process keep its behaviour. Two cases keep the library's pauses, of 23 seconds in all: parts of a
file that the library uploads in its own threads, and a Hub that refuses connections, after which
the library makes another client.
"""

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from httpx2 import Request, Response, TransportError
from huggingface_hub import get_session
from huggingface_hub.utils import hf_raise_for_status, parse_ratelimit_headers

from millrace.retry_after import parse_retry_after


class BackoffTimeoutError(TransportError):
    """The time for retries of a request is over."""


class BackoffLimit:
    """Limit on the time for retries of a call, which may send many requests.

    The time begins with the first failure. A request that succeeds ends the time, unless an earlier
    try of the whole call has failed.

    Args:
        timeout: Seconds for retries.

    Attributes:
        failed_at: Time of the first failure of the current try, by `time.monotonic`; None before.
        deadline: Time at which retries end; infinite without a failure.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._is_repeated = False
        self._unanswered: tuple[str, str] | None = None
        self.failed_at: float | None = None
        self.deadline = math.inf

    @contextmanager
    def apply(self) -> Generator[None]:
        """Apply the limit to the requests of this thread within the block: one try of a call."""
        self.failed_at = self._unanswered = None
        hooks = get_session().event_hooks
        if _check_request not in hooks["request"]:
            hooks["request"].append(_check_request)
            hooks["response"].append(_check_response)
        token = _limit.set(self)
        try:
            yield
        finally:
            _limit.reset(token)

    def fail_try(self, now: float) -> float:
        """Note that a try has failed, and return the time of its first failure."""
        self._is_repeated = True
        return self._note_failure(now)

    def restart(self, now: float) -> None:
        """Begin the time for retries again."""
        self.deadline = now + self._timeout

    def check_request(self, request: Request, now: float) -> None:
        """Note a request that is sent. The same request again means that it had no answer.

        Raises:
            BackoffTimeoutError: The time for retries is over.
        """
        sent = (request.method, str(request.url))
        if sent == self._unanswered:
            self._note_failure(now)
        self._unanswered = sent
        if now > self.deadline:
            raise BackoffTimeoutError("The time for retries is over", request=request)

    def check_response(self, response: Response, now: float) -> None:
        """Note an answer.

        Raises:
            HfHubHTTPError: The request failed, and the library would repeat it after the deadline.
        """
        self._unanswered = None
        if response.status_code not in {408, 429} and response.status_code < 500:
            self.failed_at = None
            if not self._is_repeated:
                self.deadline = math.inf
            return
        self._note_failure(now)
        if now + find_pause(response) > self.deadline:
            response.read()  # the error has the Hub's message
            hf_raise_for_status(response)

    def _note_failure(self, now: float) -> float:
        if self.failed_at is None:
            self.failed_at = now
            self.deadline = min(self.deadline, now + self._timeout)
        return self.failed_at


_limit: ContextVar[BackoffLimit | None] = ContextVar("limit", default=None)


def _check_request(request: Request) -> None:
    if limit := _limit.get():
        limit.check_request(request, time.monotonic())


def _check_response(response: Response) -> None:
    if limit := _limit.get():
        limit.check_response(response, time.monotonic())


def find_pause(response: Response) -> float:
    """Return the seconds that the Hub asks to wait before a request is repeated, or 0."""
    rate = parse_ratelimit_headers(response.headers) if response.status_code == 429 else None
    if rate is not None and rate.remaining == 0:
        return rate.reset_in_seconds
    return parse_retry_after(response.headers.get("Retry-After", ""))
