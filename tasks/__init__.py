"""One step each, as Prefect sees it: retries, limits, progress, reports."""
