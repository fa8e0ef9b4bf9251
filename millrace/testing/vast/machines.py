"""Hosts and rented machines: offers, states and costs."""

import base64
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOUR = 3600.0


@dataclass
class StandInMachine:
    """Host, with its hardware and prices."""

    id: int
    gpu: str
    gpus: int
    memory: float
    dph: float
    storage: float  # dollars per GB and month
    down_cost: float
    up_cost: float
    place: str
    reliability: float
    loading: float
    rented: bool = False
    fate: str = ""

    def make_offer(self, ask: int, disk: float) -> dict[str, Any]:
        """Return the offer of the host, with the fields of an answer to a search."""
        return {
            "id": ask,
            "ask_contract_id": ask,
            "machine_id": self.id,
            "gpu_name": self.gpu,
            "num_gpus": self.gpus,
            "gpu_ram": self.memory * 1000,
            "dph_base": self.dph,
            "dph_total": self.compute_price(disk),
            "min_bid": round(self.dph * 0.6, 4),
            "storage_cost": self.storage,
            "inet_down": 800.0,
            "inet_up": 400.0,
            "inet_down_cost": self.down_cost,
            "inet_up_cost": self.up_cost,
            "disk_space": 500.0,
            "duration": 30 * 24 * HOUR,
            "direct_port_count": 20,
            "reliability": self.reliability,
            "reliability2": self.reliability,
            "geolocation": self.place,
            "verified": True,
            "verification": "verified",
            "rentable": not self.rented,
            "rented": self.rented,
            "external": False,
            "hosting_type": 0,
            "score": self.reliability * 100,
        }

    def compute_price(self, disk: float) -> float:
        """Return the price in dollars per hour, with a disk of a size in GB."""
        return self.dph + self.storage * disk / 730


@dataclass
class StandInInstance:
    """Rented machine.

    Attributes:
        fate: Fault of the machine: ``exited``, ``offline``, ``unknown``, ``oci``, ``stuck``,
            ``outbid``, ``silent`` (runs without reports), ``failing`` (the program fails),
            ``broken`` (the installation fails), ``raised`` (costs 1.5 times the offered price),
            ``dearer`` (costs ten times as much after a minute), ``vanished``, ``lying`` (reports
            too much traffic), ``lying late`` (reports no traffic for an hour, then four times the
            possible amount); empty for none.
        lag: Seconds after the creation before the machine is listed.
    """

    id: int
    key: str
    machine: StandInMachine
    body: dict[str, Any]
    created: float
    hourly: float
    storage_hourly: float
    fate: str = ""
    lag: float = 0.0
    account: int = 1
    stopped: bool = False
    running: float | None = None
    destroyed: float | None = None
    by: str = ""
    cost: float = 0.0
    billed: float = 0.0
    beats: int = 0
    ended: bool = False
    process: "subprocess.Popen[bytes] | None" = None
    home: Path | None = None
    port: int = 0

    @property
    def ports(self) -> list[int]:
        """Ports of the request (``-p 8080:8080``)."""
        found = (re.fullmatch(r"-p (\d+):\1", name) for name in self.body.get("env", {}))
        return [int(match[1]) for match in found if match]

    @property
    def label(self) -> str:
        """Label of the machine; empty without one."""
        return self.body.get("label") or ""

    @property
    def order(self) -> dict[str, Any] | None:
        """Settings that Millrace gave to the machine; None without any."""
        text = self.body.get("env", {}).get("MILLRACE_CONFIG")
        return json.loads(base64.b64decode(text)) if text else None

    def bill(self, now: float) -> None:
        """Add the cost since the last call."""
        end = now if self.destroyed is None else min(now, self.destroyed)
        hours = max(0.0, end - self.billed) / HOUR
        running = self.running is not None and not self.stopped
        self.cost += hours * (self.hourly if running else self.storage_hourly)
        self.billed = end

    def make_row(self, now: float) -> dict[str, Any]:
        """Return the row of the machine in a listing. Fields without a value yet are null."""
        status, message = self.describe_status(now)
        state = "stopped" if self.stopped else "running"
        up = status == "running"
        return {
            "id": self.id,
            "label": self.label or None,
            "machine_id": self.machine.id,
            "actual_status": status,
            "cur_state": state,
            "intended_status": state,
            "next_state": state,
            "status_msg": message,
            "dph_total": self.hourly,
            "is_bid": self.body.get("price") is not None,
            "min_bid": round(self.machine.dph * 0.6, 4),
            "image_uuid": self.body.get("image"),
            "extra_env": [[name, value] for name, value in self.body.get("env", {}).items()],
            "start_date": self.running,
            "end_date": None,
            "public_ipaddr": "127.0.0.1" if up else None,
            "ports": self._map_ports() if up else None,
            "ssh_host": "127.0.0.1",
            "ssh_port": 40022,
        }

    def _map_ports(self) -> dict[str, Any]:
        """Map the ports. A requested port of 70000 or more becomes one free port on both sides."""
        outside = {22: 40022} | {port: 40000 + port % 1000 for port in self.ports if port < 70000}
        if max(self.ports, default=0) >= 70000:
            outside[self.port] = self.port
        return {
            f"{inside}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(port)}]
            for inside, port in outside.items()
        }

    def describe_status(self, now: float) -> tuple[str | None, str | None]:
        """Return the status of the machine and its message; both None at first."""
        if self.stopped:
            return "exited", "stopped"
        if self.fate in {"exited", "offline", "unknown"}:
            return self.fate, f"Error: the container is {self.fate}"
        if self.fate == "oci":
            return "created", "Error response from daemon: OCI runtime create failed: runc"
        if self.running is not None:
            return "running", "success, running python:3.11"
        age = now - self.created
        return (None, None) if age < 5 else ("loading", "Pulling from library/python ")
