"""Weights on a Ray cluster: the threads of its nodes."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from millrace import cluster
from millrace.gradients import AggregationSettings, AggregatorSettings, GatherSettings, RunSettings
from millrace.gradients.settings import RegistrationSettings
from millrace.gradients.sync import aggregator
from millrace.progress import ignore_event
from millrace.storage import StoreSpec

NODE = {"NodeID": "1" * 56, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 1.0}}


def count_reading_threads(settings: AggregatorSettings, monkeypatch: Any) -> int:
    """Return the number of gradients that a node of a cluster can read at once."""
    groups: dict[str, int] = {}

    def remote(*_: Any, concurrency_groups: dict[str, int] | None = None) -> Any:
        groups.update(concurrency_groups or {})
        options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: None))
        return (lambda _: options) if concurrency_groups else options

    ray = SimpleNamespace(remote=remote, nodes=lambda: [NODE | {"Alive": True}], get=lambda _: None)
    monkeypatch.setattr(cluster, "connect", lambda _: nullcontext(ray))
    with aggregator._choose_allocation(settings, ignore_event):
        (count,) = groups.values()
        return count


def test_a_node_reads_the_gradient_of_one_worker_while_those_of_all_others_stall(monkeypatch):
    run = RunSettings(
        run="runs/one",
        gather=GatherSettings(concurrency=8),
        registration=RegistrationSettings(most=300),
    )
    settings = AggregatorSettings(
        run=run,
        store=StoreSpec(url="memory://"),
        workers=tuple(f"worker-{number}" for number in range(100)),
        reserves=tuple(f"reserve-{number}" for number in range(100)),
        aggregation=AggregationSettings(ray="auto"),
    )
    assert count_reading_threads(settings, monkeypatch) >= 500 + run.gather.concurrency
