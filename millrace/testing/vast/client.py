"""Handle of the server process, for tests."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from millrace.testing.process import Child, ask, start_module
from millrace.testing.vast.clock import ClockFile
from millrace.testing.vast.faults import CONTROL


class VastServer:
    """Running server, started by `VastServer.start`. As a context manager, it stops at the exit.

    Attributes:
        url: URL of the server, ``http://127.0.0.1:PORT``.
    """

    def __init__(self, child: Child, port: int, folder: Path) -> None:
        """Represent a server that is already running. Use `start` to start one."""
        self.url = f"http://127.0.0.1:{port}"
        self._child = child
        self._clock = ClockFile(folder)

    @classmethod
    def start(cls, folder: Path) -> Self:
        """Start a server, and return when it accepts requests."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "vast.log"
        child = start_module("millrace.testing.vast", "--folder", str(folder), log=log)
        return cls(child, child.read_announcement()["port"], folder)

    def reset(self, **world: Any) -> str:
        """Start with a new world, and return the account's API key.

        Args:
            world: Attributes of the `World`.
        """
        return self.ask("reset", world)["key"]

    def read_time(self) -> float:
        """Return the time by the server's clock, in seconds since 1970."""
        return self._clock.read()

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self.ask("advance", {"seconds": seconds})

    def list_machines(self) -> list[dict[str, Any]]:
        """Return all machines that were ever rented, with their times and costs."""
        return self.ask("books", {})["instances"]

    def list_alive(self) -> list[dict[str, Any]]:
        """Return the machines that are not destroyed."""
        return [one for one in self.list_machines() if one["destroyed"] is None]

    def list_requests(self) -> list[dict[str, Any]]:
        """Return all requests since `reset`, each with its body, fault and status."""
        return self.ask("requests", {})["requests"]

    def count_fired(self) -> Counter[str]:
        """Return the number of injections of each fault."""
        return Counter(self.ask("fired", {}))

    def fail_next(self, count: int, fault: str, call: str = "") -> None:
        """Fail the next requests with a fault.

        Args:
            count: Number of requests.
            fault: Fault, from `FAULTS`.
            call: Kind of the requests, such as ``create``; empty for any.
        """
        self.ask("fail", {"count": count, "fault": fault, "call": call})

    def befall(self, instance: int, fate: str) -> None:
        """Set the fate of a machine. See `StandInInstance.fate`."""
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
    """Clock of the server, for a client that rents from it. Sleeping advances the server's time.

    Args:
        server: Server with the clock.
    """

    def __init__(self, server: VastServer) -> None:
        self._server = server

    def now(self) -> datetime:
        """Return the time."""
        return datetime.fromtimestamp(self._server.read_time(), UTC)

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self._server.read_time()

    def sleep(self, seconds: float) -> None:
        """Advance the time of the server, without waiting."""
        self._server.advance(seconds)
