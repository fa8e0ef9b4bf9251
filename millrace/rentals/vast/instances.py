"""A rented machine, as Vast.ai describes it.

Source: https://docs.vast.ai/api-reference/instances (fields may be null at any time).
"""

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IDENTITY = 70_000
"""From this on, a port that is asked for is drawn, and the same inside and outside."""
_SSH = 22
_DEAD = {"exited", "unknown", "offline"}  # while it comes up: from none of them it ever does
_FATAL = re.compile(
    r"OCI runtime create failed|Error response from daemon|failed to (?:pull|register) "
    r"|manifest (?:unknown|for .* not found)|no space left on device",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine of the account's.

    Attributes:
        id: Its number: that of the contract.
        label: As it was rented under.
        machine: The host behind it.
        status: ``created``, ``loading``, ``running``, ``exited``, ...; ``created`` while null.
        states: What it is, is meant to be, and will be.
        message: What the host says.
        dph: Dollars an hour.
        is_bid: Whether it goes to whoever pays more.
        address: Its public IP address, if it has one by now.
        ports: By what the container listens on (``8080/tcp``): the port that others reach.
    """

    id: int
    label: str
    machine: int
    status: str
    states: tuple[str, str, str]
    message: str
    dph: float
    is_bid: bool
    address: str
    ports: Mapping[str, int]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Instance":
        """Read a row of the listing: strictly its number, the rest as far as it can be read.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: It is none.
        """
        return cls(
            id=int(row["id"]),
            label=str(row.get("label") or ""),
            machine=int(_number(row.get("machine_id"))),
            status=str(row.get("actual_status") or "created"),
            states=(
                str(row.get("cur_state") or ""),
                str(row.get("intended_status") or ""),
                str(row.get("next_state") or ""),
            ),
            message=str(row.get("status_msg") or "").strip(),
            dph=_number(row.get("dph_total")),
            is_bid=bool(row.get("is_bid")),
            address=str(row.get("public_ipaddr") or "").strip(),
            ports=_ports(row["ports"] if isinstance(row.get("ports"), Mapping) else {}),
        )

    @property
    def running(self) -> bool:
        """True if its container runs."""
        return self.status == "running"

    @property
    def stopped(self) -> bool:
        """True if it was stopped by another: outbid, or the account has no credit left."""
        return set(self.states) == {"stopped"}

    @property
    def outbid(self) -> bool:
        """True if another client pays more."""
        return self.is_bid and self.stopped

    def reached_at(self, port: int) -> str:
        """Return ``host:port`` at which others reach what the container listens on.

        Empty if there is none.

        Args:
            port: That it was rented with; from 70000 on it stands for one that is the same inside
                and outside, which the container finds in ``VAST_TCP_PORT_…``.
        """
        if port < IDENTITY:
            outside = self.ports.get(f"{port}/tcp")
        else:
            same = [out for name, out in self.ports.items() if name == f"{out}/tcp" and out != _SSH]
            outside = same[0] if len(same) == 1 else None
        return f"{self.address}:{outside}" if self.address and outside else ""

    @property
    def dead(self) -> str:
        """Reason why it will never come up; empty while it may."""
        said = f": {self.message}" if self.message else ""
        if self.status in _DEAD:
            return f"the machine is {self.status}{said}"
        if self.stopped:
            return f"the machine was stopped{said}"
        if not self.running and _FATAL.search(self.message):
            return f"the machine could not start the image{said}"
        return ""


def _ports(ports: Mapping[str, Any]) -> dict[str, int]:
    """``{"8080/tcp": [{"HostIp": …, "HostPort": "40001"}]}``, each by its first."""
    found: dict[str, int] = {}
    for name, hosts in ports.items():
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
            found[name] = int(hosts[0]["HostPort"])
    return found


def _number(value: Any) -> float:
    """Return a number; 0 for what is none: one field must not make all the list unreadable."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return 0.0
    return number if math.isfinite(number) else 0.0
