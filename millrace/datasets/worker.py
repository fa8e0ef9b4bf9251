"""A worker process: cuts the splits that its driver names, and says how it goes.

It is started with a pipe each way, and speaks lines of JSON: nothing is unpickled, credentials
stand neither in its arguments nor in its environment.
Every event waits until the driver has acknowledged it. When the driver's end of the pipe closes,
for whatever reason, the worker is gone at once: what it leaves behind is good for a resume.
"""

import os
import signal
import sys
import threading
from itertools import count
from typing import IO, Any

import orjson
from pydantic import BaseModel, ConfigDict

from millrace import errors
from millrace.datasets.partition import run_split
from millrace.datasets.sources import open_source
from millrace.keys import DatasetKeys
from millrace.progress import Event, Progress
from millrace.schemas.dataset import ShardLayout, SourceRecord, Split, SplitEnd
from millrace.storage import StoreSpec, open_store


class Job(BaseModel):
    """Settings and records that a worker needs to cut one split."""

    model_config = ConfigDict(frozen=True)

    dataset: str
    plan: str
    layout: ShardLayout
    source: SourceRecord
    source_store: StoreSpec
    store: StoreSpec
    split: Split
    uploads: int

    def reveal(self) -> dict[str, Any]:
        """Return the job as plain JSON values, secrets included, for the pipe to a worker."""
        data = self.model_dump(mode="json")
        data["store"] = self.store.reveal()
        data["source_store"] = self.source_store.reveal()
        return data


def run_job(job: Job, progress: Progress) -> SplitEnd:
    """Cut one split."""
    store = open_store(job.store)
    source = open_source(job.source, open_store(job.source_store, make_folder=False), store)
    keys = DatasetKeys(job.dataset)
    return run_split(
        store,
        source,
        keys,
        job.layout,
        job.split,
        plan=job.plan,
        uploads=job.uploads,
        progress=progress,
    )


class _Line:
    """The worker's end of the pipes."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._writing = threading.Lock()
        self._numbers = count()
        self._waiting: dict[int, threading.Event] = {}
        self.jobs: list[Job] = []
        self.ready = threading.Semaphore(0)

    def listen(self) -> None:
        """Take what the driver says, until it says no more."""
        try:
            for line in self._incoming:
                message = orjson.loads(line)
                if "acknowledged" in message:
                    self._waiting.pop(message["acknowledged"]).set()
                else:
                    self.jobs.append(Job.model_validate(message["job"]))
                    self.ready.release()
        finally:
            os._exit(0)  # no clean-up: threads may be uploading for somebody who is gone

    def say(self, message: dict[str, Any]) -> None:
        with self._writing:
            self._outgoing.write(orjson.dumps(message) + b"\n")
            self._outgoing.flush()

    def report(self, event: Event) -> None:
        number, heard = next(self._numbers), threading.Event()
        self._waiting[number] = heard
        figures = dict(event.figures)
        self.say({"event": [number, event.name, event.subject, figures]})
        heard.wait()


def main() -> None:
    """Serve a driver until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver, who ends us
    outgoing = os.fdopen(int(sys.argv[1]), "wb")  # not stdout, where any library may print
    line = _Line(sys.stdin.buffer, outgoing)
    threading.Thread(target=line.listen, name="listen", daemon=True).start()
    while True:
        line.ready.acquire()
        try:
            end = run_job(line.jobs.pop(0), line.report)
        except errors.MillraceError as error:
            line.say({"failed": [type(error).__name__, str(error)]})
        except Exception as error:  # noqa: BLE001 - the driver raises it, with its type
            line.say({"failed": ["WorkerError", f"{type(error).__name__}: {error}"]})
        else:
            line.say({"ended": end.model_dump(mode="json")})
