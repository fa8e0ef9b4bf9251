"""Rented machine, as Vast.ai describes it.

Source: https://docs.vast.ai/api-reference/instances (fields may be null at any time).
"""

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.formatting import clean_text

IDENTITY_PORT = 70_000
"""Lowest number that requests an identity port: a random port, equal inside and outside."""
_SSH_PORT = 22
_MAX_MESSAGE_LENGTH = 1000  # characters of a host's message that are kept
_FAILED_STATUSES = {"exited", "unknown", "offline"}  # a machine with these never starts
_FATAL_MESSAGE = re.compile(
    r"OCI runtime create failed|Error response from daemon|failed to (?:pull|register) "
    r"|manifest (?:unknown|for .* not found)|no space left on device",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Instance:
    """Machine of the account.

    Attributes:
        id: Number of the contract.
        label: Label of the machine.
        machine_id: Number of the host that has the machine, under the name that Vast.ai gives it.
        status: ``created``, ``loading``, ``running``, ``exited``, ...; ``created`` while null.
        states: Current, intended and next state.
        message: Message of the host.
        dollars_per_hour: Dollars an hour.
        is_interruptible: Whether a higher bid can take the machine.
        address: Public IP address; empty while there is none.
        ports: Public ports by the container's ports, such as ``8080/tcp``.
    """

    id: int
    label: str
    machine_id: int
    status: str
    states: tuple[str, str, str]
    message: str
    dollars_per_hour: float
    is_interruptible: bool
    address: str
    ports: Mapping[str, int]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Instance":
        """Read a row of the listing. Its number is required; other invalid fields get defaults.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: The row has no valid number.
        """
        return cls(
            id=int(row["id"]),
            label=str(row.get("label") or ""),
            machine_id=int(_parse_number(row.get("machine_id"))),
            status=clean_text(str(row.get("actual_status") or "created")),
            states=(
                str(row.get("cur_state") or ""),
                str(row.get("intended_status") or ""),
                str(row.get("next_state") or ""),
            ),
            message=clean_text(str(row.get("status_msg") or ""), _MAX_MESSAGE_LENGTH),
            dollars_per_hour=_parse_number(row.get("dph_total")),
            is_interruptible=bool(row.get("is_bid")),
            address=str(row.get("public_ipaddr") or "").strip(),
            ports=_parse_ports(row["ports"] if isinstance(row.get("ports"), Mapping) else {}),
        )

    @property
    def is_running(self) -> bool:
        """True if the container runs."""
        return self.status == "running"

    @property
    def is_stopped(self) -> bool:
        """True if the provider stopped the machine, for a higher bid or for missing credit."""
        return set(self.states) == {"stopped"}

    @property
    def is_outbid(self) -> bool:
        """True if another client pays more."""
        return self.is_interruptible and self.is_stopped

    def find_address(self, port: int) -> str:
        """Return the ``host:port`` at which a port of the container is reached; empty if none.

        Args:
            port: Port that the machine was rented with. From 70000 on, it stands for an identity
                port, whose number the container finds in ``VAST_TCP_PORT_…``.
        """
        if port < IDENTITY_PORT:
            public_port = self.ports.get(f"{port}/tcp")
        else:
            identity_ports = [
                out for name, out in self.ports.items() if name == f"{out}/tcp" and out != _SSH_PORT
            ]
            public_port = identity_ports[0] if len(identity_ports) == 1 else None
        return f"{self.address}:{public_port}" if self.address and public_port else ""

    @property
    def failure(self) -> str:
        """Reason why the machine will never start; empty while it may start."""
        suffix = f": {self.message}" if self.message else ""
        if self.status in _FAILED_STATUSES:
            return f"the machine is {self.status}{suffix}"
        if self.is_stopped:
            return f"the machine was stopped{suffix}"
        if not self.is_running and _FATAL_MESSAGE.search(self.message):
            return f"the machine could not start the image{suffix}"
        return ""


def _parse_ports(ports: Mapping[str, Any]) -> dict[str, int]:
    """Parse ports such as ``{"8080/tcp": [{"HostIp": …, "HostPort": "40001"}]}``."""
    found: dict[str, int] = {}
    for name, hosts in ports.items():
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
            found[name] = int(hosts[0]["HostPort"])
    return found


def _parse_number(value: Any) -> float:
    """Return a number; 0 if it is invalid, so that one field does not make the list unreadable."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return 0.0
    return number if math.isfinite(number) else 0.0
