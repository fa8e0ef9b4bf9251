"""Warm nodes, and print a line of JSON for each event. The last line is the report."""

import json
import sys
from dataclasses import asdict

from millrace.errors import MillraceError
from millrace.progress import Event
from millrace.swarm import PrewarmSettings, prewarm


def print_event(kind: str, **fields: object) -> None:
    """Print a line of JSON."""
    print(json.dumps({"kind": kind, **fields}), flush=True)


def print_progress(event: Event) -> None:
    """Print a line of JSON for an event."""
    print_event("event", name=event.kind, fields=asdict(event))


def main() -> None:
    settings = PrewarmSettings.model_validate_json(sys.stdin.readline())
    try:
        report = prewarm(settings, progress=print_progress)
    except MillraceError as error:
        print_event("error", error=type(error).__name__, says=str(error))
    else:
        print_event("report", **asdict(report))


if __name__ == "__main__":
    main()
