"""Client of the server: runs it, and asks it what no client of the API can."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from millrace.testing.process import Child, ask, start_module
from millrace.testing.vast.clock import ClockFile
from millrace.testing.vast.faults import CONTROL


class VastServer:
    """A running server. Made by `VastServer.start`; a context manager that stops it.

    Attributes:
        url: ``http://127.0.0.1:PORT``.
    """

    def __init__(self, child: Child, port: int, folder: Path) -> None:
        """Describe a server that runs already; `start` runs it."""
        self.url = f"http://127.0.0.1:{port}"
        self._child = child
        self._clock = ClockFile(folder)

    @classmethod
    def start(cls, folder: Path) -> Self:
        """Start a server; it serves when this returns."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "vast.log"
        child = start_module("millrace.testing.vast", "--folder", str(folder), log=log)
        return cls(child, child.read_announcement()["port"], folder)

    def reset(self, **world: Any) -> str:
        """Begin anew, and return the account's API key. See `World` for what may be said."""
        return self.ask("reset", world)["key"]

    def read_time(self) -> float:
        """Return the time by the server's clock, in seconds since 1970."""
        return self._clock.read()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.ask("advance", {"seconds": seconds})

    def list_machines(self) -> list[dict[str, Any]]:
        """Return every machine that was ever rented: account, times and cost."""
        return self.ask("books", {})["instances"]

    def list_alive(self) -> list[dict[str, Any]]:
        """Return the machines that are not destroyed."""
        return [one for one in self.list_machines() if one["destroyed"] is None]

    def list_requests(self) -> list[dict[str, Any]]:
        """Return every request since `reset`, with its body and its answer."""
        return self.ask("requests", {})["requests"]

    def count_fired(self) -> Counter[str]:
        """Return how often each fault was injected."""
        return Counter(self.ask("fired", {}))

    def fail_next(self, count: int, fault: str, call: str = "") -> None:
        """Have the next requests (of one kind) fail so."""
        self.ask("fail", {"count": count, "fault": fault, "call": call})

    def befall(self, instance: int, fate: str) -> None:
        """Have something happen to a machine: see `StandInInstance.fate`."""
        self.ask("befall", {"instance": instance, "fate": fate})

    def open_account(self) -> str:
        """Open another account, and return its key."""
        return self.ask("account", {})["key"]

    def plant(self, label: str) -> int:
        """Rent a machine as another client of the same account, and return its number."""
        return self.ask("plant", {"label": label})["id"]

    def ask(self, verb: str, body: dict[str, Any]) -> Any:
        """Send a request that no client of the API can send, and return the answer."""
        return ask(f"{self.url}{CONTROL}{verb}", body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()
        self._clock.close()


class StandInClock:
    """The server's clock, for a client that rents by it: waiting lets its time pass."""

    def __init__(self, server: VastServer) -> None:
        self._server = server

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._server.read_time(), UTC)

    def monotonic(self) -> float:
        return self._server.read_time()

    def sleep(self, seconds: float) -> None:
        self._server.advance(seconds)
