"""Keys of plans of cleaning."""

CLEANING = "_clean"
"""What plans of cleaning stand under: no dataset, job or run can be called so."""


def make_cleaning_plan_key(name: str) -> str:
    """Return the key of the list of objects to delete, one a line."""
    return f"{CLEANING}/{name}/plan.jsonl"


def make_cleaning_outcome_key(name: str) -> str:
    """Return the key of a plan's result."""
    return f"{CLEANING}/{name}/outcome.json"
