"""``millrace deploy``: deploy the flows to a Prefect server, with the objects that they need.

Prefect looks for the work pool first, so `prefect deploy --all` alone ends with an error on a
server that was not set up. It also resumes paused deployments and schedules that were switched off,
removes parameters that prefect.yaml does not name, and may delete such schedules. `millrace deploy`
keeps all of these.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from blocks.bucket import Bucket, BucketRole
from blocks.server_names import TAG, WORK_POOL
from blocks.setup import SetupOutcome, connect, make_essentials, register_types, report_errors
from millrace import errors
from millrace.terminal import echo, echo_text

_DEPLOYMENTS_FILE = Path("prefect.yaml")
_CLEANING = "cleaning"  # tag of the deployments that delete
_DEPLOYED = re.compile(r"Deployment '(.+)' successfully created")


@dataclass(frozen=True, slots=True)
class DeployResult:
    """Result of deploying the flows of prefect.yaml.

    Attributes:
        deployed: Deployments that Prefect has made, as FLOW/NAME.
        is_complete: Whether these are all deployments of prefect.yaml.
        objects: Outcome of each object that all flows need, such as the work pool.
        changes: Sentences about parameters and schedules that are kept, changed or new.
        not_in_file: Scheduled deployments of the server that prefect.yaml does not have.
        missing_blocks: Blocks that the server does not have.
    """

    deployed: tuple[str, ...]
    is_complete: bool
    objects: dict[str, SetupOutcome]
    changes: tuple[str, ...]
    not_in_file: tuple[str, ...]
    missing_blocks: tuple[str, ...]


def deploy_flows() -> DeployResult:
    """Deploy all flows of prefect.yaml, after the objects that they need. Print the changes."""
    with report_errors():
        project = _read_project()
        with connect() as client:
            register_types()
            objects = dict(make_essentials(client))
            for item, outcome in objects.items():
                if outcome is not SetupOutcome.UNCHANGED:
                    echo(f"{item}: {outcome}")
            missing = _find_missing_blocks(client)
            existing = _list_deployments(client)
            pairs = _match_deployments(project, existing)
            matched = {found.id: found for _, found in pairs}
            others = sorted(
                f"{client.read_flow(one.flow_id).name}/{one.name}"
                for one in existing
                if TAG in one.tags
                and one.id not in matched
                and not one.paused
                and any(schedule.active for schedule in one.schedules)
            )
            for wanted, found in pairs:
                if wanted.get("schedules"):
                    _give_slugs(client, found)
            changes = [line for wanted, found in pairs for line in keep_changes(wanted, found)]
            known = {id(wanted): found for wanted, found in pairs}
            for wanted in project["deployments"]:
                changes += warn_of_deletions(wanted, known.get(id(wanted)))
            deployed, is_complete = _deploy_and_restore(client, project, matched, changes)
    result = DeployResult(
        deployed, is_complete, objects, tuple(changes), tuple(others), tuple(missing)
    )
    if not is_complete:
        echo("Some flows were not deployed: see the errors of Prefect above.", err=True)
        return result
    for line in changes:
        echo(line)
    if others:
        echo(
            f"Not in prefect.yaml, and still scheduled: {', '.join(others)}. Delete those "
            "that you do not need: prefect deployment delete FLOW/NAME"
        )
    if missing:
        echo(
            f"Missing blocks: {', '.join(missing)}. Runs that need them say so and do nothing, or "
            "fail. `millrace setup` makes them from the variables of .env.example."
        )
    echo("Next: prefect worker start --pool " + WORK_POOL)
    return result


def _read_project() -> dict[str, Any]:
    """Return the content of prefect.yaml.

    Raises:
        ConfigurationError: There is no such file here, or it cannot be read.
    """
    try:
        project = yaml.safe_load(_DEPLOYMENTS_FILE.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise errors.ConfigurationError(
            f"There is no {_DEPLOYMENTS_FILE} in {Path.cwd()}. Run this command in the clone of "
            "Millrace."
        ) from None
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise errors.ConfigurationError(f"{_DEPLOYMENTS_FILE} cannot be read: {error}.") from None
    if not isinstance(project, dict) or not project.get("deployments"):
        raise errors.ConfigurationError(f"{_DEPLOYMENTS_FILE} has no `deployments`: add some.")
    return project


def _list_deployments(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Return all deployments on the server."""
    found: list[DeploymentResponse] = []
    while page := client.read_deployments(offset=len(found)):
        found += page
    return found


def _match_deployments(
    project: dict[str, Any], existing: list[DeploymentResponse]
) -> list[tuple[dict[str, Any], DeploymentResponse]]:
    """Return each deployment of prefect.yaml that is on the server, with the one there."""
    pairs: list[tuple[dict[str, Any], DeploymentResponse]] = []
    for wanted in project["deployments"]:
        named = [one for one in existing if one.name == wanted.get("name")]
        same = [one for one in named if one.entrypoint == wanted.get("entrypoint")]
        if found := same or [one for one in named if TAG in one.tags]:
            pairs.append((wanted, found[0]))
    return pairs


def keep_changes(wanted: dict[str, Any], existing: DeploymentResponse) -> Iterator[str]:
    """Write what people have changed on the server into a deployment of prefect.yaml.

    Prefect then deploys it with these changes, so that nothing that was stopped runs in between.

    Args:
        wanted: Deployment of prefect.yaml, which is changed.
        existing: The same deployment on the server.

    Yields:
        A line for each change that is kept, and for each schedule that starts or stops.
    """
    name = wanted["name"]
    if existing.paused and "paused" not in wanted:
        wanted["paused"] = True
        yield f"{name}: stays paused"
    schedules = wanted.get("schedules")
    if not schedules:
        return  # Prefect leaves those on the server as they are
    by_slug = {schedule["slug"]: schedule for schedule in schedules if "slug" in schedule}
    for found in existing.schedules:
        same = by_slug.pop(found.slug, None) if found.slug else None
        if same is None:
            yield f"{name}: keeps its schedule {found.slug or _format_timing(found)}"
        elif not found.active and "active" not in same:
            same["active"] = False
            yield f"{name}: its schedule {found.slug} stays off"
        elif found.active and same.get("active") is False:
            yield f"{name}: its schedule {found.slug} is switched off, as in prefect.yaml"
    for slug in by_slug:
        yield f"{name}: its schedule {slug} is new"


def warn_of_deletions(wanted: dict[str, Any], existing: DeploymentResponse | None) -> Iterator[str]:
    """Describe the new schedules of a deployment whose runs delete.

    Args:
        wanted: Deployment of prefect.yaml, as it is to be deployed.
        existing: The same deployment on the server; None if there is none.

    Yields:
        A line, if there are such schedules.
    """
    if wanted.get("paused") or _CLEANING not in (wanted.get("tags") or ()):
        return
    known = {schedule.slug for schedule in existing.schedules} if existing else set[str | None]()
    usual = wanted.get("parameters") or {}
    deleting = [
        f"{schedule.get('slug')} ({schedule.get('cron')})"
        for schedule in wanted.get("schedules") or ()
        if schedule.get("slug") not in known
        and schedule.get("active", True)
        and {**usual, **(schedule.get("parameters") or {})}.get("dry_run") is False
    ]
    if deleting:
        yield (
            f"{wanted['name']}: will delete by its new schedules: {', '.join(deleting)}. Switch "
            "those off in the UI that you do not want: they stay off."
        )


def merge_parameters(
    before: Mapping[str, Any], after: Mapping[str, Any], known: Container[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters of prefect.yaml, and those of people beside.

    Args:
        before: Parameters of a deployment or a schedule before Prefect has deployed it.
        after: Its parameters of prefect.yaml.
        known: Names of the parameters that the flow has.

    Returns:
        The parameters, and a line for each that is kept, replaced or dropped.
    """
    merged, lines = dict(after), list[str]()
    for parameter, value in before.items():
        if parameter not in after and parameter in known:
            merged[parameter] = value
            lines.append(f"keeps its parameter {parameter}")
        elif parameter not in known:
            lines.append(f"its flow has no parameter {parameter} any more")
        elif value != after[parameter]:
            lines.append(f"its parameter {parameter} is set as in prefect.yaml")
    return merged, lines


def _deploy_and_restore(
    client: SyncPrefectClient,
    project: dict[str, Any],
    existing: Mapping[UUID, DeploymentResponse],
    changes: list[str],
) -> tuple[tuple[str, ...], bool]:
    """Deploy the flows, and restore the parameters that Prefect has removed, also after a Ctrl-C.

    Args:
        client: Client of the server.
        project: Content of prefect.yaml, as it is to be deployed.
        existing: Deployments as they were before, by their ids.
        changes: List that gets a line for each change.

    Returns:
        The deployments that Prefect has made, and whether these are all.
    """
    deployed: list[str] = []

    def finish(name: str) -> None:
        deployed.append(name)
        after = client.read_deployment_by_name(name)
        if after.id in existing:
            changes.extend(_restore_parameters(client, existing[after.id], after))

    is_complete = False
    try:
        is_complete = _deploy_all(project, finish)
    finally:
        if not is_complete:  # Prefect may have made some that it has not named
            for before in existing.values():
                _restore_parameters(client, before, client.read_deployment(before.id))
    return tuple(deployed), is_complete


def _restore_parameters(
    client: SyncPrefectClient, before: DeploymentResponse, after: DeploymentResponse
) -> list[str]:
    """Restore the parameters that prefect.yaml does not name, and that Prefect has removed.

    They are those of the deployment and those of its schedules. They do not go through Prefect's
    command, which would replace blocks by their secrets.

    Args:
        client: Client of the server.
        before: Deployment before Prefect has deployed it.
        after: The same deployment now.

    Returns:
        A line for each change.
    """
    known = (after.parameter_openapi_schema or {}).get("properties", {})
    merged, lines = merge_parameters(before.parameters, after.parameters, known)
    if merged != after.parameters:
        try:
            client.update_deployment(after.id, DeploymentUpdate(parameters=merged))
        except PrefectHTTPStatusError:  # such as for a value that the flow takes no more
            names = ", ".join(sorted(merged.keys() - after.parameters))
            lines = [f"the server refused its parameters {names}: set them again"]
    schedules = {schedule.id: schedule for schedule in before.schedules}
    for now in after.schedules:
        if (was := schedules.get(now.id)) is None:
            continue
        if _format_timing(was) != _format_timing(now):
            lines.append(
                f"its schedule {now.slug} is set as in prefect.yaml: {_format_timing(now)}"
            )
        if was.parameters != now.parameters:
            merged, changes = merge_parameters(was.parameters, now.parameters, known)
            lines += [f"{line} (schedule {now.slug})" for line in changes]
            if merged != now.parameters:
                client.update_deployment_schedule(after.id, now.id, parameters=merged)
    return [f"{after.name}: {line}" for line in lines]


def _give_slugs(client: SyncPrefectClient, deployment: DeploymentResponse) -> None:
    """Give a slug to each schedule of people that has none.

    Prefect leaves schedules with other slugs than those of prefect.yaml as they are. It would
    delete one without a slug. They do not go through Prefect's command either.
    """
    for found in deployment.schedules:
        if not found.slug:
            client.update_deployment_schedule(
                deployment.id,
                found.id,
                slug=f"own-{found.id.hex[:12]}",
                parameters=found.parameters,  # the server removes parameters that are left out
            )


def _format_timing(schedule: DeploymentSchedule) -> str:
    match schedule.schedule:
        case CronSchedule(cron=cron):
            return cron
        case IntervalSchedule(interval=interval):
            return f"every {interval}"
        case RRuleSchedule(rrule=rrule):
            return " ".join(rrule.split())
        case _:
            return "none"


def _deploy_all(project: dict[str, Any], finish: Callable[[str], None]) -> bool:
    """Deploy the flows with Prefect's command, and print a line for each.

    Prefect prints twenty lines for each, which are shown if it fails.

    Args:
        project: Content of prefect.yaml, as it is to be deployed.
        finish: Function that is called with the name of each deployment after Prefect has made it.

    Returns:
        Whether Prefect has deployed all.
    """
    wide = os.environ | {"COLUMNS": "500"}  # no line is broken
    shown: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / _DEPLOYMENTS_FILE
        file.write_text(yaml.safe_dump(project), encoding="utf-8")
        command = [
            sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all",
            "--prefect-file", str(file),
        ]  # fmt: skip
        with subprocess.Popen(
            command, env=wide, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    shown.append(line)
                    if found := _DEPLOYED.search(line):
                        finish(found[1])
                        echo(f"{found[1]}: deployed")
            except BaseException:  # such as a Ctrl-C: nothing more is deployed
                process.terminate()
                process.wait()
                raise
    if process.returncode:
        echo_text("".join(shown))
    return not process.returncode


def _find_missing_blocks(client: SyncPrefectClient) -> list[str]:
    """Return the blocks of buckets that prefect.yaml names and the server does not have."""
    slug, missing = Bucket.get_block_type_slug(), list[str]()
    for role in BucketRole:
        try:
            client.read_block_document_by_name(role.value, slug, include_secrets=False)
        except ObjectNotFound:
            missing.append(f"{slug}/{role.value}")
    return missing
