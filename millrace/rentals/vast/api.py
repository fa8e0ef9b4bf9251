"""Client of Vast.ai's API: its SDK with rate limits, safe retries and clear errors.

The SDK's own retries are off. They would repeat create requests, which may have rented a machine,
and they wait less than the API requires. This client repeats only requests that are safe to repeat.

Sources: https://docs.vast.ai/api-reference, and observed answers of the API.
"""

import math
import random
import re
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import SecretStr

from millrace import errors
from millrace.digest import compute_digest, get_hex
from millrace.formatting import clean_text
from millrace.rentals.clock import Clock, SystemClock
from millrace.rentals.vast.instances import Instance

if TYPE_CHECKING:
    from vastai import VastAI  # pyright: ignore[reportMissingTypeStubs]

T = TypeVar("T")

DESTROY_INTERVAL = timedelta(seconds=3)
"""Time from the answer to a destroy request until the next one, by the thresholds of the API."""
BRIEF_LISTING_TIME = timedelta(minutes=1)
"""Longest time of a brief listing."""
_RETRY_TIMEOUT = timedelta(minutes=2)
_REQUEST_TIMEOUT = 60.0  # seconds until a request without a complete answer fails
_BRIEF_REQUEST_TIMEOUT = 20.0  # shorter for requests that delay the release of machines
_MAX_TEXT_LENGTH = 500  # characters of an answer in an error
_MAX_PAGES = 400  # of a listing, of 25 machines each
_LISTING_TIMEOUT = 900.0  # seconds until a listing whose pages go on counts as incomplete
_PARTIAL_LIST_DELAY = 5.0  # seconds until an incomplete list is requested again
_CREDIT_PATTERN = re.compile(r"credit|billing|balance", re.IGNORECASE)


class RequestKind(StrEnum):
    """Kind of a request to the API, for its pace."""

    SEARCH = "search"
    CREATE = "create"
    LIST = "list"
    DESTROY = "destroy"
    USER = "user"


_INTERVALS = {  # seconds between two requests, by the thresholds of the API
    RequestKind.SEARCH: 6.0,
    RequestKind.CREATE: 4.5,
    RequestKind.LIST: 1.0,
    RequestKind.DESTROY: DESTROY_INTERVAL.total_seconds(),
    RequestKind.USER: 1.0,
}
_LONGEST_TURN = 30.0  # seconds that a request without an answer holds up others of its kind


@dataclass(frozen=True, slots=True)
class CreatedInstance:
    """Result of a create.

    Attributes:
        instance_id: Number of the machine, which is billed.
        refusal: Reason why the machine will never run, such as a bid that is too low.
    """

    instance_id: int
    refusal: str = ""


@dataclass(slots=True)
class _RequestPacer:
    """Times at which each kind of request may be sent next."""

    clock: Clock
    next_times: dict[RequestKind, float] = field(default_factory=dict[RequestKind, float])
    lock: threading.Lock = field(default_factory=threading.Lock)
    turns: dict[RequestKind, threading.Lock] = field(
        default_factory=lambda: {kind: threading.Lock() for kind in RequestKind}
    )

    @contextmanager
    def hold_turn(self, kind: RequestKind, end: float = math.inf) -> Generator[None]:
        """Wait until a request of a kind may be sent, and keep the interval after its answer.

        The API may receive a request just before its answer. So the next one, of any thread, waits
        for the answer, but not for longer than `_LONGEST_TURN`.

        Raises:
            UnavailableError: The request may not be sent before an end.
        """
        is_held = self.turns[kind].acquire(
            timeout=max(0.0, min(_LONGEST_TURN, end - self.clock.monotonic()))
        )
        try:
            self._wait(kind, end)
            yield
        finally:
            self.delay(kind, _INTERVALS[kind])
            if is_held:
                self.turns[kind].release()

    def _wait(self, kind: RequestKind, end: float) -> None:
        with self.lock:
            now = self.clock.monotonic()
            send_at = max(now, self.next_times.get(kind, now))
            if send_at > end:
                raise errors.UnavailableError(f"Vast.ai takes no request to {kind} before the end.")
            self.next_times[kind] = send_at + _INTERVALS[kind]
        if send_at > now:
            self.clock.sleep(send_at - now)

    def delay(self, kind: RequestKind, seconds: float) -> None:
        """Delay the next request of a kind."""
        with self.lock:
            self.next_times[kind] = max(
                self.next_times.get(kind, 0.0), self.clock.monotonic() + seconds
            )


class _RetryableError(Exception):
    """Request that failed temporarily.

    Args:
        message: Description of the failure.
        may_have_succeeded: Whether the API may have executed the request.
    """

    def __init__(self, message: str, *, may_have_succeeded: bool) -> None:
        super().__init__(message)
        self.may_have_succeeded = may_have_succeeded


def make_sdk_client(key: SecretStr, url: str | None, **options: Any) -> "VastAI":
    """Return a client of Vast's own SDK.

    Args:
        key: API key of the account.
        url: URL of the API; by default Vast's.
        **options: Options of `vastai.VastAI`.

    Raises:
        ConfigurationError: The SDK is not installed.
    """
    try:
        from vastai import VastAI  # pyright: ignore[reportMissingTypeStubs]  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise errors.ConfigurationError(
            "Vast's SDK is not installed here: pip install 'millrace[vast]'."
        ) from error
    return VastAI(api_key=key.get_secret_value(), server_url=url, **options)


def _make_bounded_sdk_client(key: SecretStr, url: str | None, timeout: float) -> Any:
    """Return an SDK client that sends each request once, with a deadline.

    Args:
        key: API key of the account.
        url: URL of the API; by default Vast's.
        timeout: Seconds after which a request without a complete answer fails.
    """
    sdk: Any = make_sdk_client(key, url, retry=1, quiet=True)
    # After the check that the SDK is installed.
    from millrace.rentals.vast.bounded_requests import BoundedSender  # noqa: PLC0415

    sdk.client._request = BoundedSender(sdk.client.server_url, timeout).send  # noqa: SLF001
    return sdk


class VastClient:
    """Client of an account at Vast.ai.

    Args:
        key: API key of the account.
        url: URL of the API; by default Vast's.
        clock: Clock that paces the requests.
        retry_timeout: Time in which a request is repeated before its error is raised.

    Raises:
        ConfigurationError: The SDK is not installed.
    """

    def __init__(
        self,
        key: SecretStr,
        url: str | None = None,
        *,
        clock: Clock | None = None,
        retry_timeout: timedelta = _RETRY_TIMEOUT,
    ) -> None:
        self._key = key
        self._sdk: Any = _make_bounded_sdk_client(key, url, _REQUEST_TIMEOUT)
        self._brief_sdk: Any = _make_bounded_sdk_client(key, url, _BRIEF_REQUEST_TIMEOUT)
        self._identity = ""
        self.url: str = self._sdk.client.server_url
        """URL of the API, which machines also use."""
        self.clock = clock or SystemClock()
        self._pacer = _RequestPacer(self.clock)
        self._retry_timeout = retry_timeout.total_seconds()

    def identify_account(self) -> str:
        """Return an identity of this account, equal for all of its keys.

        For a key that may not read the account's number, the identity is the key's digest. No
        other failure has this result, since two processes would take one account for two.

        Raises:
            UnavailableError: The API does not answer.
            ConfigurationError: The API refuses the request, whatever the key.
        """

        def send() -> int:
            user: Any = self._sdk.show_user()
            return int(user["id"])

        if not self._identity:
            try:
                self._identity = f"user-{self._send_with_retries(RequestKind.USER, send)}"
            except errors.DeniedError:
                self._identity = (
                    f"key-{get_hex(compute_digest(self._key.get_secret_value().encode()))[:16]}"
                )
        return self._identity

    def search_offers(
        self, filters: Mapping[str, Any], *, offer_type: str, disk: float, limit: int
    ) -> list[dict[str, Any]]:
        """Return offers, the cheapest first.

        Args:
            filters: Operators and values by field, such as ``{"num_gpus": {"eq": 1}}``. The SDK's
                default filters are off.
            offer_type: ``on-demand`` or ``bid``.
            disk: Size of the disk that the prices include, in GB.
            limit: Largest number of offers.

        Raises:
            UnavailableError: The API does not answer, or the day's quota of searches is used up.
            DeniedError: The API does not know the key.
        """

        def send() -> list[dict[str, Any]]:
            found: Any = self._sdk.search_offers(
                query={**filters}, type=offer_type, order="dph_total", limit=limit, storage=disk,
                no_default=True,
            )  # fmt: skip
            return [{**row} for row in found]

        return self._send_with_retries(RequestKind.SEARCH, send)

    def create_instance(self, offer: int, **body: Any) -> CreatedInstance:
        """Take an offer. The request is sent once.

        Without an answer, the machine may exist: search the listing for its label.

        Args:
            offer: Number of the offer.
            **body: Arguments of `vastai.VastAI.create_instance`.

        Raises:
            NotFoundError: The offer is gone.
            UnavailableError: There is no answer, and the machine may exist.
            BudgetError: The account has no credit.
            ConfigurationError, DeniedError: The request is refused permanently.
        """

        def send() -> CreatedInstance:
            import requests  # noqa: PLC0415

            try:
                answer: Any = self._sdk.create_instance(offer, cancel_unavail=True, **body)
                status = 200
            except requests.HTTPError as error:
                answer, status = _read_body(error), getattr(error.response, "status_code", 0)
            fields: dict[str, Any] = {**answer} if isinstance(answer, dict) else {}
            instance_id, message = fields.get("new_contract"), _extract_message(answer)
            if instance_id is None:
                return self._raise_for_answer(status, answer, message)
            is_success = status == 200 and fields.get("success") is True
            return CreatedInstance(
                int(instance_id), "" if is_success else message or "the request was refused"
            )

        return self._send_with_retries(RequestKind.CREATE, send, is_idempotent=False)

    def list_instances(self, *, is_brief: bool = False) -> list[Instance]:
        """Return all machines of the account.

        Args:
            is_brief: Whether to give up within `BRIEF_LISTING_TIME`, before a release of machines
                that does not depend on the answer.

        Raises:
            UnavailableError: The list cannot be read completely.
            DeniedError: The API does not know the key.
        """
        now = self.clock.monotonic()
        brief_end = now + BRIEF_LISTING_TIME.total_seconds() - _BRIEF_REQUEST_TIMEOUT
        end = brief_end if is_brief else now + self._retry_timeout
        while (found := self._list_pages(brief_end if is_brief else None)) is None:
            if self.clock.monotonic() >= end:
                raise errors.UnavailableError(
                    "Vast.ai's list of instances is incomplete, so the rented machines are not "
                    "known: try again."
                )
            self._pacer.delay(RequestKind.LIST, _PARTIAL_LIST_DELAY)
        return found

    def _list_pages(self, brief_end: float | None) -> list[Instance] | None:
        """Return the machines of all pages; None if some are missing, or the pages do not end.

        Args:
            brief_end: Time after which a brief listing sends no other request; None for others.
        """
        found: dict[int, Instance] = {}
        sdk = self._sdk if brief_end is None else self._brief_sdk
        end = self.clock.monotonic() + _LISTING_TIMEOUT if brief_end is None else brief_end
        token = ""
        for _ in range(_MAX_PAGES):
            known = len(found)
            try:
                page = self._send_with_retries(
                    RequestKind.LIST,
                    lambda token=token: self._fetch_page(sdk, token),
                    end=brief_end,
                )
            except (errors.BudgetError, errors.ConfigurationError, errors.NotFoundError) as error:
                # What another request would mean by such an answer is no news about the machines.
                raise errors.UnavailableError(
                    f"Vast.ai does not list the instances: {error}"
                ) from error
            found |= {one.id: one for one in page["instances"]}
            token = str(page.get("next_token") or "")
            if not token:
                is_complete = len(found) >= page["total"]
                return list(found.values()) if is_complete else None
            if len(found) == known or self.clock.monotonic() >= end:
                return None  # the pages form a cycle, or go on without machines, or for too long
        return None

    def _fetch_page(self, sdk: Any, token: str) -> dict[str, Any]:
        query: dict[str, Any] = {
            "select_filters": {},
            "order_by": [{"col": "id", "dir": "asc"}],
            "limit": 25,
        }
        if token:
            query["after_token"] = token
        page: Any = sdk.show_instances_v1(query)
        if page.get("success", True) is not True:
            message = _extract_message(page) or "without a reason"
            raise _RetryableError(
                f"the list is refused ({self._redact(message)})", may_have_succeeded=True
            )
        rows, total = page["instances"], int(page["total_instances"])
        if not isinstance(rows, list) or total < 0:  # an empty object would be no rows
            raise TypeError("instances")
        instances = [Instance.from_row(row) for row in rows]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return {**page, "instances": instances, "total": total}

    def destroy_instance(self, instance_id: int) -> None:
        """Send one request to destroy a machine. A machine that is gone is a success.

        Raises:
            UnavailableError: The API does not answer.
            DeniedError: The machine belongs to another account.
        """

        def send() -> None:
            answer: Any = self._brief_sdk.destroy_instance(instance_id)
            if answer.get("success") is not True:
                self._raise_for_answer(200, answer, _extract_message(answer))

        try:
            self._send_with_retries(RequestKind.DESTROY, send, is_idempotent=False)
        except errors.NotFoundError:
            return

    def read_credit(self) -> float:
        """Return the credit of the account, in dollars.

        Raises:
            UnavailableError: The API does not answer.
            DeniedError: The API does not know the key.
        """

        def send() -> float:
            user: Any = self._sdk.show_user()
            return float(user["credit"])

        return self._send_with_retries(RequestKind.USER, send)

    def _send_with_retries(
        self,
        kind: RequestKind,
        send: Callable[[], T],
        *,
        is_idempotent: bool = True,
        end: float | None = None,
    ) -> T:
        """Send a request until an answer arrives, or the retry timeout has passed.

        Args:
            kind: Kind of the request.
            send: Function that sends it.
            is_idempotent: Whether the request may be repeated if it may have been executed.
            end: Time from which on no request is sent; by default the retry timeout, before which a
                request only has to fail.
        """
        last_turn = math.inf if end is None else end
        if end is None:
            end = self.clock.monotonic() + self._retry_timeout
        pause = _INTERVALS[kind]
        while True:
            with self._pacer.hold_turn(kind, last_turn):
                try:
                    return self._send_once(send)
                except _RetryableError as error:
                    remaining = end - self.clock.monotonic()
                    if remaining <= 0 or (error.may_have_succeeded and not is_idempotent):
                        raise errors.UnavailableError(
                            f"Vast.ai does not answer to {kind}: {error}."
                        ) from error.__cause__
                    self._pacer.delay(kind, min(remaining, pause * random.uniform(0.5, 1.0)))
                    pause *= 2

    def _send_once(self, send: Callable[[], T]) -> T:
        """Send a request once."""
        import requests  # noqa: PLC0415

        from millrace.rentals.vast.bounded_requests import LimitExceededError  # noqa: PLC0415

        try:
            return send()
        except requests.HTTPError as error:
            body = _read_body(error)
            self._raise_for_answer(
                getattr(error.response, "status_code", 0), body, _extract_message(body)
            )
        except requests.RequestException as error:
            # The API may have executed the request, since its answer may be lost.
            message = str(error) if isinstance(error, LimitExceededError) else type(error).__name__
            raise _RetryableError(self._redact(message), may_have_succeeded=True) from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise _RetryableError(
                f"its answer cannot be read ({type(error).__name__})", may_have_succeeded=True
            ) from error

    def _raise_for_answer(self, status: int, body: Any, message: str) -> NoReturn:
        """Raise the error that an unsuccessful answer means.

        Raises:
            _RetryableError: The request can be repeated.
        """
        code = str(body.get("error") or "") if isinstance(body, Mapping) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        message = self._redact(message or code or f"status {status}")
        if status == 429:
            if code == "search_quota_exceeded":
                raise errors.UnavailableError(
                    "The day's quota of searches at Vast.ai is used up: try again after midnight "
                    "UTC."
                )
            raise _RetryableError(message, may_have_succeeded=False)
        if status >= 500 or status == 408:
            raise _RetryableError(f"{message} (status {status})", may_have_succeeded=True)
        if code == "auth_error" or status == 401:
            raise errors.DeniedError(
                f"Vast.ai does not know the API key ({message}): copy a key from the account's "
                "page of keys."
            )
        if "no_such" in f"{code} {message}" or code == "not_found":
            raise errors.NotFoundError(
                f"Vast.ai does not have this offer or machine any more: {message}."
            )
        if status == 411 or _CREDIT_PATTERN.search(f"{code} {message}"):
            raise errors.BudgetError(f"The Vast.ai account cannot pay ({message}): add credit.")
        if status in {0, 200} or not code:  # the answer is ambiguous, or comes from a proxy
            raise _RetryableError(f"{message} (status {status})", may_have_succeeded=True)
        if status == 403:
            raise errors.DeniedError(f"Vast.ai does not allow this request: {message}.")
        if status == 410:
            raise errors.ConfigurationError(
                f"Vast.ai does not support this request any more ({message}): install a newer "
                "version of the package vastai."
            )
        raise errors.ConfigurationError(f"Vast.ai refuses this request: {message}.")

    def _redact(self, text: str) -> str:
        """Return a text in one line, without the API key."""
        return clean_text(text.replace(self._key.get_secret_value(), "[key]"), _MAX_TEXT_LENGTH)


def _read_body(error: Any) -> Any:
    """Return the body of an answer for which the SDK raised an error."""
    if error.response is None:
        return ""
    try:
        return error.response.json()
    except (RecursionError, ValueError):
        return error.response.text


def _extract_message(body: Any) -> str:
    """Return the message in the body of an answer; empty if there is none."""
    if isinstance(body, str):
        return body
    if not isinstance(body, Mapping):
        return ""
    messages = [str(body[name]) for name in ("msg", "detail", "message", "error") if body.get(name)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return messages[0] if messages else ""
