"""Changes on the server that `millrace deploy` keeps."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule

from blocks.deploy import keep_changes, merge_parameters, warn_of_deletions

NIGHTLY = CronSchedule(cron="7 2 * * *", timezone="UTC")


def make_schedule(
    slug: str | None, *, active: bool = True, timing: Any = NIGHTLY, **parameters: Any
) -> DeploymentSchedule:
    return DeploymentSchedule(slug=slug, active=active, schedule=timing, parameters=parameters)


def keep(
    wanted: dict[str, Any], *schedules: DeploymentSchedule, paused: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the deployment of prefect.yaml as it is deployed, and the lines."""
    wanted = {"name": "clean", **wanted}
    existing = DeploymentResponse(
        name="clean", flow_id=uuid4(), paused=paused, schedules=list(schedules)
    )
    lines = list(keep_changes(wanted, existing))
    return wanted, lines


def test_a_paused_deployment_stays_paused() -> None:
    assert keep({}, paused=True) == ({"name": "clean", "paused": True}, ["clean: stays paused"])
    assert keep({"paused": False}, paused=True) == ({"name": "clean", "paused": False}, [])
    assert keep({}) == ({"name": "clean"}, [])


def test_a_schedule_that_was_switched_off_stays_off() -> None:
    nightly = {"cron": NIGHTLY.cron, "slug": "nightly"}
    wanted, lines = keep({"schedules": [dict(nightly)]}, make_schedule("nightly", active=False))
    assert wanted["schedules"] == [{**nightly, "active": False}]
    assert lines == ["clean: its schedule nightly stays off"]
    wanted, lines = keep({"schedules": [dict(nightly)]}, make_schedule("nightly"))
    assert (wanted["schedules"], lines) == ([nightly], [])


def test_prefect_yaml_switches_schedules_on_and_off() -> None:
    on, off = ({"cron": "0 0 * * *", "slug": "a", "active": active} for active in (True, False))
    wanted, lines = keep({"schedules": [dict(on)]}, make_schedule("a", active=False))
    assert (wanted["schedules"], lines) == ([on], [])
    wanted, lines = keep({"schedules": [dict(off)]}, make_schedule("a"))
    assert wanted["schedules"] == [off]
    assert lines == ["clean: its schedule a is switched off, as in prefect.yaml"]
    assert keep({"schedules": [dict(off)]}, make_schedule("a", active=False))[1] == []


def test_a_schedule_that_starts_is_named() -> None:
    assert keep({"schedules": [{"cron": "0 0 * * *", "slug": "a"}]})[1] == [
        "clean: its schedule a is new"
    ]


@pytest.mark.parametrize(
    ("timing", "shown"),
    [
        (CronSchedule(cron="1 1 1 * 1", timezone="Europe/Berlin", day_or=False), "1 1 1 * 1"),
        (
            IntervalSchedule(
                interval=timedelta(minutes=5),
                anchor_date=datetime(2026, 1, 1, 3, tzinfo=UTC),  # pyright: ignore[reportArgumentType]
                timezone="UTC",
            ),
            "every 0:05:00",
        ),
        (
            RRuleSchedule(rrule="DTSTART:20200101T000000\nFREQ=DAILY;COUNT=3", timezone="UTC"),
            "DTSTART:20200101T000000 FREQ=DAILY;COUNT=3",
        ),
    ],
)
@pytest.mark.parametrize("slug", [None, "second-bucket"])
def test_a_schedule_of_somebody_is_left_to_the_server(
    timing: Any, shown: str, slug: str | None
) -> None:
    own = make_schedule(slug, active=False, timing=timing, bucket="aggregator")
    a = {"cron": "0 0 * * *", "slug": "a"}
    wanted, lines = keep({"schedules": [dict(a)]}, own)
    assert wanted["schedules"] == [a]
    assert lines[0] == f"clean: keeps its schedule {slug or shown}"


def test_without_schedules_in_prefect_yaml_prefect_changes_none() -> None:
    assert keep({}, make_schedule(None)) == ({"name": "clean"}, [])


def test_new_schedules_that_delete_are_named() -> None:
    cron: dict[str, Any] = {"cron": "7 2 * * *"}
    schedules = [
        {**cron, "slug": "a", "parameters": {"dry_run": False}},
        {**cron, "slug": "b", "parameters": {"dry_run": True}},
        {**cron, "slug": "c", "parameters": {"dry_run": False}, "active": False},
        {**cron, "slug": "d", "parameters": {"dry_run": False}},
        {**cron, "slug": "e", "parameters": None},
    ]
    wanted = {"name": "clean", "tags": ["millrace", "cleaning"], "schedules": schedules}
    existing = DeploymentResponse(name="clean", flow_id=uuid4(), schedules=[make_schedule("d")])
    (line,) = warn_of_deletions(wanted, None)
    assert "clean: will delete by its new schedules: a (7 2 * * *), d (7 2 * * *)." in line
    (line,) = warn_of_deletions(wanted, existing)
    assert "schedules: a (7 2 * * *)." in line
    (line,) = warn_of_deletions({**wanted, "parameters": {"dry_run": False}}, existing)
    assert "schedules: a (7 2 * * *), e (7 2 * * *)." in line
    for other in ({"paused": True}, {"tags": ["millrace"]}, {"schedules": schedules[1:3]}):
        assert not list(warn_of_deletions({**wanted, **other}, None))


def test_parameters_of_people_are_kept_beside_those_of_prefect_yaml() -> None:
    block = {"$ref": {"block_document_id": str(uuid4())}}
    before = {"bucket": "mine", "pins": ["a"], "rules": block, "renamed": 1, "dry_run": True}
    parameters, lines = merge_parameters(
        before, {"bucket": "gradients", "dry_run": True}, {"bucket", "dry_run", "pins", "rules"}
    )
    assert parameters == {"bucket": "gradients", "dry_run": True, "pins": ["a"], "rules": block}
    assert lines == [
        "its parameter bucket is set as in prefect.yaml",
        "keeps its parameter pins",
        "keeps its parameter rules",
        "its flow has no parameter renamed any more",
    ]
