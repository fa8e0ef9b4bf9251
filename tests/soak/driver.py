"""A driver that announces every event and waits to be told to go on, or is killed waiting.

``python -m tests.soak.driver`` reads its settings from the first line of its standard input, writes
a line of JSON for each event, and then reads one byte: the go-ahead. Its last line says how it
ended.
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


class Gate:
    """Announces events, one at a time, also where several threads report."""

    def __init__(self) -> None:
        self._outgoing = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # what a library prints must not look like an event
        self._one = threading.Lock()

    def __call__(self, event: Event) -> None:
        partition, pid = "", os.getpid()
        match event:
            case PartitionEvent():
                partition, pid = event.partition, event.pid
            case WorkerLost():
                pid = event.pid
            case _:
                pass
        with self._one:
            self.say({"kind": event.kind, "partition": partition, "pid": pid})
            if not os.read(0, 1):
                os._exit(3)  # the soak itself is gone

    def say(self, message: dict[str, Any]) -> None:
        self._outgoing.write(json.dumps(message).encode() + b"\n")


def _settings() -> dict[str, Any]:
    """The first line, and no byte more: what follows is for the gate."""
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(0, 1)
    return json.loads(line)


def main() -> int:
    settings = _settings()
    gate = Gate()
    config = PipelineSettings.model_validate(settings["config"])
    if settings["do"] == "collect":
        store = open_store(config.store)
        done = delete_garbage(store, plan_garbage(store, config.dataset, min_age=timedelta(0)))
        deleted = done.deletion.deleted_objects
        gate.say({"done": {"deleted": deleted, "failures": len(done.failures)}})
        return 0
    report = shard_dataset(config, progress=gate)
    gate.say({"done": {"made": report.new_shards, "samples": report.samples}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
