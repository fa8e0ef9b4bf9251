"""Keys of cleanup plans and their outcomes."""

CLEANING = "_clean"
"""Folder of cleanup plans. No dataset, job or run can have this name."""


def make_cleaning_plan_key(name: str) -> str:
    """Return the key of a cleanup plan: one line per object to delete."""
    return f"{CLEANING}/{name}/plan.jsonl"


def make_cleaning_outcome_key(name: str) -> str:
    """Return the key of the outcome of a cleanup plan."""
    return f"{CLEANING}/{name}/outcome.json"
