"""A campaign in a process of its own, that says at which boundary it is, and waits there.

``python -m tests.support.flows.campaign_child PLAN.json GRACE``: before and after each stage, and
at each of some events within, it prints a line of JSON, and goes on when it has read a line. After
a kill, the monitor of the machines waits ``GRACE`` seconds for a next leader.
"""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from flows import campaign, campaign_epochs, campaign_machines
from flows.campaign_plan import CampaignPlan
from millrace.datasets.progress_events import ShardCommitted
from millrace.gradients.progress_events import WindowMerged
from millrace.progress import Event
from millrace.rentals import supervisor
from millrace.rentals.owner_monitor import OwnerMonitor
from millrace.rentals.progress_events import MachineReady, MachineRented
from tasks import renting
from tasks.progress import LiveProgress

STAGES = (
    "shard_dataset", "await_machines", "prewarm", "aggregate_gradients", "run_cooldown",
    "release_machines", "save_checkpoint", "clean_bucket",
)  # fmt: skip
EVENTS = (ShardCommitted, MachineRented, MachineReady, WindowMerged)
_one = threading.Lock()
_seen: Counter[str] = Counter()


def announce_stage(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
    """A stage that says when it begins, and when it has ended."""

    @wraps(stage)
    def run(*args: Any, **options: Any) -> Any:
        announce_boundary(f"before {name}")
        done = stage(*args, **options)
        announce_boundary(f"after {name}")
        return done

    return run


def announce_boundary(where: str) -> None:
    """Say it, and wait to be let on."""
    with _one:
        say({"at": where})
        sys.stdin.readline()


def say(what: dict[str, Any]) -> None:
    assert sys.__stdout__ is not None
    sys.__stdout__.write(json.dumps(what) + "\n")
    sys.__stdout__.flush()


def make_listener(listen: Callable[..., None]) -> Callable[..., None]:
    """A listener to the engine that says at which event it is."""

    @wraps(listen)
    def hear(self: LiveProgress, event: Event) -> None:
        listen(self, event)
        if isinstance(event, EVENTS):
            _seen[event.kind] += 1
            announce_boundary(f"{event.kind} {_seen[event.kind]}")

    return hear


def main() -> None:
    """Run it to its end."""
    for module in (campaign, campaign_epochs, campaign_machines):
        for name in {*STAGES}.intersection(vars(module)):
            setattr(module, name, announce_stage(name, getattr(module, name)))
    LiveProgress.__call__ = make_listener(LiveProgress.__call__)
    monitor = partial(OwnerMonitor, grace_period=float(sys.argv[2]))
    for module in (renting, supervisor):
        module.__dict__["OwnerMonitor"] = monitor
    plan = CampaignPlan.model_validate_json(Path(sys.argv[1]).read_text())
    found = campaign.run_campaign(plan)
    say({"done": found.windows})


if __name__ == "__main__":
    main()
