"""The stages of a flow run, of which a server lists 200 at once."""

from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from prefect import flow, task
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from tasks.stages import StageRun, list_stage_runs
from tests.prefect_server import PrefectServer


@flow(name="stage")
def stage() -> None:
    """Do nothing."""


@task
def start_stage() -> None:
    """Do nothing."""


def test_the_newest_stages_of_many_are_listed(prefect_api: PrefectServer) -> None:
    @flow
    def run_stages() -> list[StageRun]:
        current = flow_run.get_id()
        assert current is not None
        with prefect_api.make_client() as client:
            parent = client.create_task_run(start_stage, UUID(current), dynamic_key="0").id

            def start(name: str, state: State[None]) -> None:
                client.create_flow_run(stage, name=name, parent_task_run_id=parent, state=state)

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(start, [f"window-{n}" for n in range(200)], [Completed()] * 200))
            start("the-last", Failed(message="no space"))
        return list_stage_runs()

    found = run_stages()
    assert len({one.name for one in found}) == 201
    assert (found[-1].name, found[-1].reason) == ("the-last", "no space")
