"""Progress as a Prefect server shows it."""

import threading
from typing import Any, cast
from uuid import UUID

import pytest
from prefect import flow
from prefect.artifacts import create_progress_artifact
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.runtime import flow_run

from millrace.errors import UnavailableError
from tasks import progress as module
from tasks.progress import ShardProgress
from tests.prefect_server import PrefectServer
from tests.unit.tasks.test_progress import PLAN, commit, end


def test_a_dataset_that_is_finished_is_shown_as_finished(prefect_api: PrefectServer) -> None:
    @flow(name="shows")
    def shows() -> str:
        with ShardProgress("progress-shows") as live:
            live(PLAN)
            live(end("train-00000"))
        return str(flow_run.id)

    run = shows()
    assert prefect_api.read_artifacts(run) == {"progress-shows": 100.0}


def test_a_run_that_failed_ends_its_artifact_with_the_error(prefect_api: PrefectServer) -> None:
    runs: list[str] = []

    @flow(name="fails")
    def fails() -> None:
        runs.append(str(flow_run.id))
        with ShardProgress("progress-fails") as live:
            live(PLAN)
            raise UnavailableError("The bucket <b> does not answer.")

    with pytest.raises(UnavailableError):
        fails()
    with prefect_api.make_client() as client:
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(runs[0])])
            )
        )
    (artifact,) = [each for each in artifacts if each.key == "progress-fails"]
    assert artifact.data == 0.0
    assert artifact.description is not None
    assert artifact.description.endswith(r"Failed: The bucket \<b\> does not answer.")


def test_a_server_that_does_not_answer_holds_up_nothing(
    prefect_api: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's answer is withheld until the engine is through, which does not wait for it."""
    through = threading.Event()

    def late(*_: object) -> None:
        assert through.wait(60)
        raise ConnectionError

    monkeypatch.setattr(module, "create_progress_artifact", late)

    @flow(name="goes-on")
    def goes_on() -> float:
        with ShardProgress("progress-late") as live:
            live(PLAN)
            for number in range(1000):
                live(commit(number))
            through.set()
        return float(sum(live.bytes_by_second.values()))

    assert goes_on() == sum(range(1000))


def test_the_end_is_shown_after_a_request_that_failed(
    prefect_api: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy SQLite answers 503 to some requests for minutes."""
    failed = threading.Event()

    def fail_once(*arguments: Any) -> UUID:
        if not failed.is_set():
            failed.set()
            raise ConnectionError
        return cast("UUID", create_progress_artifact(*arguments))

    monkeypatch.setattr(module, "create_progress_artifact", fail_once)

    @flow(name="shows-late")
    def shows() -> str:
        with ShardProgress("progress-shows-late") as live:
            live(PLAN)
            assert failed.wait(60)
            live(end("train-00000"))
        return str(flow_run.id)

    assert prefect_api.read_artifacts(UUID(shows())) == {"progress-shows-late": 100.0}
