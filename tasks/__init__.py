"""One step each, as Prefect sees it: retries, limits, progress, reports."""

import logging


def should_log(record: logging.LogRecord) -> bool:
    """Leave out Prefect's line for each task that has completed: the run's page has all states."""
    return record.levelno > logging.INFO or not record.getMessage().startswith("Finished in state")


logging.getLogger("prefect.task_runs").addFilter(should_log)
