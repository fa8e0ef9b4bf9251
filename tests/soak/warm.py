"""Warm nodes, and tell what happens: a line of JSON an event, the report last."""

import json
import sys
from dataclasses import asdict

from millrace.errors import MillraceError
from millrace.progress import Event
from millrace.swarm import PrewarmSettings, prewarm


def tell(kind: str, **what: object) -> None:
    print(json.dumps({"kind": kind, **what}), flush=True)


def heard(event: Event) -> None:
    tell("event", name=event.kind, fields=asdict(event))


def main() -> None:
    settings = PrewarmSettings.model_validate_json(sys.stdin.readline())
    try:
        report = prewarm(settings, progress=heard)
    except MillraceError as error:
        tell("error", error=type(error).__name__, says=str(error))
    else:
        tell("report", **asdict(report))


if __name__ == "__main__":
    main()
