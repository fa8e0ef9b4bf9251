"""Run a driver that announces every event, and continues when its parent process allows it.

``python -m tests.soak.driver`` reads its settings from the first line of standard input. For each
event, it writes a line of JSON and then reads one byte of standard input. Its last line is a
report.
"""

import json
import os
import sys
import threading
from datetime import timedelta
from typing import Any

from millrace.datasets import PipelineSettings, delete_garbage, plan_garbage, shard_dataset
from millrace.datasets.progress_events import PartitionEvent, WorkerLost
from millrace.progress import Event
from millrace.storage import open_store


class EventGate:
    """Announce events from any thread, one at a time, and wait after each."""

    def __init__(self) -> None:
        self._outgoing = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # keeps the output of libraries apart from the events
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        partition, pid = "", os.getpid()
        match event:
            case PartitionEvent():
                partition, pid = event.partition, event.pid
            case WorkerLost():
                pid = event.pid
            case _:
                pass
        with self._lock:
            self.send({"kind": event.kind, "partition": partition, "pid": pid})
            if not os.read(0, 1):
                os._exit(3)  # the parent process has ended

    def send(self, message: dict[str, Any]) -> None:
        """Write a message as a line of JSON."""
        self._outgoing.write(json.dumps(message).encode() + b"\n")


def _read_settings() -> dict[str, Any]:
    """Read the settings from the first line, and no further byte: the gate reads the others."""
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(0, 1)
    return json.loads(line)


def main() -> int:
    settings = _read_settings()
    gate = EventGate()
    config = PipelineSettings.model_validate(settings["config"])
    if settings["do"] == "collect":
        store = open_store(config.store)
        outcome = delete_garbage(store, plan_garbage(store, config.dataset, min_age=timedelta(0)))
        deleted = outcome.deletion.deleted_objects
        gate.send({"done": {"deleted": deleted, "failures": len(outcome.failures)}})
        return 0
    report = shard_dataset(config, progress=gate)
    gate.send({"done": {"made": report.new_shards, "samples": report.samples}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
