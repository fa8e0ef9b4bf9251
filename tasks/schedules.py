"""Check the parameters of runs that a schedule has started."""

from prefect.context import FlowRunContext

from millrace.errors import ConfigurationError


def check_schedule() -> None:
    """Refuse a scheduled run without the parameter `dry_run`, which its schedule has lost.

    Prefect 3.8 removes the parameters of a schedule when a person switches it off or on. Each run
    would then be a dry run of the deployment's bucket, also if the schedule named another one.

    Raises:
        ConfigurationError: The schedule has no such parameter.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is not None and run.auto_scheduled and "dry_run" not in run.parameters:
        raise ConfigurationError(
            "The schedule of this run does not set `dry_run`. Prefect removes the parameters of a "
            "schedule that is switched off or on. `millrace deploy` restores those of "
            "prefect.yaml. Set the parameters of another schedule in Prefect's UI."
        )
