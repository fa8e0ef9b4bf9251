"""Vast.ai's API through its own SDK, at a pace that it allows, and with errors that say what to do.

The SDK sends each request once: it would also send again what may have rented a machine, and waits
less between tries than the API asks for. What may be sent again is sent again here.

Sources: https://docs.vast.ai/api-reference, and what the API was seen to answer.
"""

import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import SecretStr

from millrace import errors
from millrace.digest import sha256
from millrace.rentals.clock import Clock, SystemClock
from millrace.rentals.vast.instances import Instance

if TYPE_CHECKING:
    from vastai import VastAI  # pyright: ignore[reportMissingTypeStubs]

T = TypeVar("T")

_PATIENCE = timedelta(minutes=2)
_TIMEOUT = 60.0  # seconds without an answer
_DESTROY_TIMEOUT = 20.0  # the same of a destroy: whoever gives many back goes on with the next
_PARTLY = 5.0  # seconds until a list that came in part is asked for again
_CREDIT = re.compile(r"credit|billing|balance", re.IGNORECASE)


class Call(StrEnum):
    """Kind of a request to the API, for its pace."""

    SEARCH = "search"
    CREATE = "create"
    LIST = "list"
    DESTROY = "destroy"
    USER = "user"


_INTERVALS = {  # seconds between two requests, by the API's thresholds
    Call.SEARCH: 6.0,
    Call.CREATE: 4.5,
    Call.LIST: 1.0,
    Call.DESTROY: 3.0,
    Call.USER: 1.0,
}


@dataclass(frozen=True, slots=True)
class Created:
    """Result of a create.

    Attributes:
        instance: The number of the machine that there is now, and that is billed.
        refused: Why it will never run, though there is one: a bid that is too low.
    """

    instance: int
    refused: str = ""


@dataclass(slots=True)
class _Pace:
    """Times at which each kind of request may be sent next."""

    clock: Clock
    free: dict[Call, float] = field(default_factory=dict[Call, float])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, call: Call) -> None:
        with self.lock:
            now = self.clock.elapsed()
            at = max(now, self.free.get(call, now))
            self.free[call] = at + _INTERVALS[call]
        if at > now:
            self.clock.sleep(at - now)

    def push(self, call: Call, seconds: float) -> None:
        """Nobody asks this for a while: we were told that it is too often."""
        with self.lock:
            self.free[call] = max(self.free.get(call, 0.0), self.clock.elapsed() + seconds)


class _Again(Exception):  # noqa: N818 - no fault: it is tried again
    """A request that failed for now.

    Args:
        said: How.
        done: Whether it may have been done.
    """

    def __init__(self, said: str, *, done: bool) -> None:
        super().__init__(said)
        self.done = done


def sdk_of(key: SecretStr, url: str | None, **options: Any) -> "VastAI":
    """Vast's own SDK, signed in.

    Args:
        key: The account's API key.
        url: Another address of the API.
        **options: As `vastai.VastAI` takes them.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        from vastai import VastAI  # pyright: ignore[reportMissingTypeStubs]  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise errors.ConfigurationError(
            "Vast's SDK is not installed here: pip install 'millrace[vast]'."
        ) from error
    return VastAI(api_key=key.get_secret_value(), server_url=url, **options)


class Vast:
    """The account that pays.

    Args:
        key: Its API key.
        url: Another address of the API.
        clock: By which requests are paced.
        patience: How long a request is tried again before its error is raised.

    Raises:
        ConfigurationError: The SDK is not installed.
    """

    def __init__(
        self,
        key: SecretStr,
        url: str | None = None,
        *,
        clock: Clock | None = None,
        patience: timedelta = _PATIENCE,
    ) -> None:
        self._key = key
        self._sdk: Any = sdk_of(key, url, retry=1, quiet=True)
        self._sdk.client.timeout = _TIMEOUT
        self._destroying: Any = sdk_of(key, url, retry=1, quiet=True)
        self._destroying.client.timeout = _DESTROY_TIMEOUT
        self._identity = ""
        self.url: str = self._sdk.client.server_url
        """The API's address, which machines ask too."""
        self.clock = clock or SystemClock()
        self._pace = _Pace(self.clock)
        self._patience = patience.total_seconds()

    def identity(self) -> str:
        """Return what tells this account from others, whichever of its keys is used.

        A key that may not read its account's number is told by its digest.

        Raises:
            UnavailableError: The API does not answer.
        """
        if not self._identity:
            try:
                user = self._patiently(Call.USER, self._sdk.show_user)
                self._identity = f"user-{int(user['id'])}"
            except (errors.ConfigurationError, errors.DeniedError, KeyError, TypeError, ValueError):
                self._identity = f"key-{sha256(self._key.get_secret_value().encode())[:16]}"
        return self._identity

    def search(
        self, filters: Mapping[str, Any], *, kind: str, disk: float, limit: int
    ) -> list[dict[str, Any]]:
        """Offers, cheapest first.

        Args:
            filters: By field, each an operator and a value: ``{"num_gpus": {"eq": 1}}``. No
                other is added.
            kind: ``on-demand`` or ``bid``.
            disk: GB that prices are to hold.
            limit: The most offers.

        Raises:
            UnavailableError: The API does not answer, or the day's searches are used up.
            DeniedError: It does not know the key.
        """

        def ask() -> list[dict[str, Any]]:
            found: Any = self._sdk.search_offers(
                query={**filters}, type=kind, order="dph_total", limit=limit, storage=disk,
                no_default=True,
            )  # fmt: skip
            return [{**row} for row in found]

        return self._patiently(Call.SEARCH, ask)

    def create(self, offer: int, **body: Any) -> Created:
        """Take an offer. Sent once: whoever gets no answer looks for the label.

        Args:
            offer: The ask's number.
            **body: As `vastai.VastAI.create_instance` takes it.

        Raises:
            NotFoundError: The offer is gone: take another.
            UnavailableError: It is not known whether there is a machine now.
            BudgetError: The account has no credit.
            ConfigurationError, DeniedError: It is refused, and always will be.
        """

        def ask() -> Created:
            import requests  # noqa: PLC0415

            try:
                answer: Any = self._sdk.create_instance(offer, cancel_unavail=True, **body)
                status = 200
            except requests.HTTPError as error:
                answer, status = _body(error), getattr(error.response, "status_code", 0)
            told: dict[str, Any] = {**answer} if isinstance(answer, dict) else {}
            number, said = told.get("new_contract"), _said(answer)
            if number is None:
                return self._refused(status, answer, said)
            fine = status == 200 and told.get("success") is True
            return Created(int(number), "" if fine else said or "it was refused")

        return self._patiently(Call.CREATE, ask, again=False)

    def instances(self) -> list[Instance]:
        """All machines of the account.

        Raises:
            UnavailableError: The list cannot be read whole: then nobody knows what is rented.
            DeniedError: The API does not know the key.
        """
        end = self.clock.elapsed() + self._patience
        while (found := self._listed()) is None:
            if self.clock.elapsed() >= end:
                raise errors.UnavailableError(
                    "Vast.ai's list of instances came in part: what is rented is not known. Ask "
                    "again."
                )
            self._pace.push(Call.LIST, _PARTLY)
        return found

    def _listed(self) -> list[Instance] | None:
        """All machines, over all pages; None if some are missing."""
        found: dict[int, Instance] = {}
        token, seen = "", set[str]()
        while token not in seen:
            seen.add(token)
            page = self._patiently(Call.LIST, lambda token=token: self._page(token))
            found |= {one.id: one for one in page["instances"]}
            token = str(page.get("next_token") or "")
            if not token:
                whole = len(found) >= page["total"]
                return list(found.values()) if whole else None
        return None  # its pages go round

    def _page(self, token: str) -> dict[str, Any]:
        query: dict[str, Any] = {
            "select_filters": {},
            "order_by": [{"col": "id", "dir": "asc"}],
            "limit": 25,
        }
        if token:
            query["after_token"] = token
        page: Any = self._sdk.show_instances_v1(query)
        if page.get("success", True) is not True:
            said = _said(page) or "it does not say why"
            raise _Again(f"the list is refused ({self._safe(said)})", done=True)
        rows, total = page["instances"], int(page["total_instances"])
        if not isinstance(rows, list) or total < 0:  # an empty object would be no rows
            raise TypeError("instances")
        instances = [Instance.of(row) for row in rows]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return {**page, "instances": instances, "total": total}

    def destroy(self, instance: int) -> None:
        """Ask once to destroy a machine. One that is gone is a success; the listing tells.

        Raises:
            UnavailableError: The API does not answer.
            DeniedError: It is not this account's.
        """

        def ask() -> None:
            answer: Any = self._destroying.destroy_instance(instance)
            if answer.get("success") is not True:
                self._refused(200, answer, _said(answer))

        try:
            self._patiently(Call.DESTROY, ask, again=False)
        except errors.NotFoundError:
            return

    def credit(self) -> float:
        """Dollars that the account has.

        Raises:
            UnavailableError, DeniedError: It cannot be asked.
        """

        def ask() -> float:
            user: Any = self._sdk.show_user()
            return float(user["credit"])

        return self._patiently(Call.USER, ask)

    def _patiently(self, call: Call, ask: Callable[[], T], *, again: bool = True) -> T:
        """Ask until there is an answer, or patience ends."""
        end = self.clock.elapsed() + self._patience
        pause = _INTERVALS[call]
        while True:
            self._pace.wait(call)
            try:
                return self._asked(ask)
            except _Again as error:
                left = end - self.clock.elapsed()
                if left <= 0 or (error.done and not again):
                    raise errors.UnavailableError(
                        f"Vast.ai does not answer to {call}: {error}."
                    ) from error.__cause__
                self._pace.push(call, min(left, pause * random.uniform(0.5, 1.0)))
                pause *= 2

    def _asked(self, ask: Callable[[], T]) -> T:
        """Ask once."""
        import requests  # noqa: PLC0415

        try:
            return ask()
        except requests.HTTPError as error:
            body = _body(error)
            self._refused(getattr(error.response, "status_code", 0), body, _said(body))
        except requests.RequestException as error:
            # Whether it is done is not known: also an answer may have been lost.
            raise _Again(self._safe(type(error).__name__), done=True) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _Again(
                f"its answer cannot be read ({type(error).__name__})", done=True
            ) from error

    def _refused(self, status: int, body: Any, said: str) -> NoReturn:
        """Raise what an answer means that is none.

        Raises:
            _Again: It may pass.
        """
        code = str(body.get("error") or "") if isinstance(body, Mapping) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        said = self._safe(said or code or f"status {status}")
        if status == 429:
            if code == "search_quota_exceeded":
                raise errors.UnavailableError(
                    "Vast.ai allows no more searches today: they begin anew at midnight UTC."
                )
            raise _Again(said, done=False)
        if status >= 500 or status == 408:
            raise _Again(f"{said} (status {status})", done=True)
        if code == "auth_error" or status == 401:
            raise errors.DeniedError(
                f"Vast.ai does not know the API key ({said}): take one of the account's page of "
                "keys."
            )
        if "no_such" in f"{code} {said}" or code == "not_found":
            raise errors.NotFoundError(f"Vast.ai has none of it any more: {said}.")
        if status == 411 or _CREDIT.search(f"{code} {said}"):
            raise errors.BudgetError(f"The Vast.ai account cannot pay ({said}): add credit.")
        if status in {0, 200} or not code:  # done or not: it does not say, or a proxy does
            raise _Again(f"{said} (status {status})", done=True)
        if status == 403:
            raise errors.DeniedError(f"Vast.ai does not allow it: {said}.")
        if status == 410:
            raise errors.ConfigurationError(
                f"Vast.ai has given this request up ({said}): install a newer vastai."
            )
        raise errors.ConfigurationError(f"Vast.ai refuses it: {said}.")

    def _safe(self, text: str) -> str:
        """Return a text in one line, without the key."""
        return " ".join(text.replace(self._key.get_secret_value(), "[key]").split())[:500]


def _body(error: Any) -> Any:
    """Return the body of an answer that the SDK has refused."""
    if error.response is None:
        return ""
    try:
        return error.response.json()
    except ValueError:
        return error.response.text


def _said(body: Any) -> str:
    """Return the text of an answer."""
    if isinstance(body, str):
        return body
    if not isinstance(body, Mapping):
        return ""
    words = [str(body[name]) for name in ("msg", "detail", "message", "error") if body.get(name)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return words[0] if words else ""
