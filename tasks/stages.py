"""Runs of other flows that a flow run has started: its stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from tasks.formatting import format_duration
from tasks.reports import (
    Markdown,
    escape,
    format_link,
    format_markdown,
    format_table,
    join_blocks,
)

_SHOWN = 200  # stages in a report


@dataclass(frozen=True, slots=True)
class StageRun:
    """Run of a stage.

    Attributes:
        name: Name of the run.
        state: Name of its state.
        reason: Message of the state, where the run did not complete.
        seconds: Time that the run took.
        url: Page of the run in the Prefect UI; None where no UI is known.
    """

    name: str
    state: str
    reason: str
    seconds: float
    url: str | None


def list_stage_runs() -> list[StageRun]:
    """Return the stages of the current flow run that have ended, in the order of their start."""
    current = flow_run.get_id()
    if current is None:
        return []
    children = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(current)]))
    with get_client(sync_client=True) as client:
        runs: list[FlowRun] = []
        while page := client.read_flow_runs(
            flow_run_filter=children, sort=FlowRunSort.START_TIME_ASC, offset=len(runs)
        ):
            runs += page
    return [
        StageRun(
            name=run.name,
            state=run.state.name or run.state.type.value.capitalize(),
            reason="" if run.state.is_completed() else run.state.message or "",
            seconds=run.total_run_time.total_seconds(),
            url=url_for("flow-run", obj_id=run.id),
        )
        for run in runs
        if run.state is not None and run.state.is_final()
    ]


def format_stages(stages: Sequence[StageRun]) -> Markdown:
    """Return a table of the newest stages, each with a link to its run; empty without a stage."""
    if not stages:
        return Markdown()
    stages, hidden = stages[-_SHOWN:], len(stages[:-_SHOWN])
    rows = [
        (
            format_link(stage.name, stage.url) if stage.url else escape(stage.name),
            stage.state,
            format_duration(stage.seconds),
            stage.reason,
        )
        for stage in stages
    ]
    columns = ["Run", "State", ">Time", "Reason"]
    if not any(stage.reason for stage in stages):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    earlier = format_markdown("{:,} earlier runs are not shown.", hidden)
    return join_blocks(format_table(columns, rows), earlier if hidden else Markdown())
