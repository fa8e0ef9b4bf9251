"""Names of flow runs. A name has the work of the run and the buckets, for lists of runs."""

from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any, cast

from prefect.runtime import flow_run

from blocks import Bucket

_SHOWN = 3  # buckets in a name


def make_name(verb: str, subject: str = "bucket") -> Callable[[], str]:
    """Return a function that names a run ``VERB-BUCKET``, or ``VERB-BUCKET-dry-run``.

    Args:
        verb: Work of the flow.
        subject: Parameter with the bucket, or the buckets.
    """

    def make_run_name() -> str:
        parameters: dict[str, Any] = flow_run.parameters or {}
        found = parameters.get(subject)
        places = cast("Sequence[Any]", found) if isinstance(found, list | tuple) else [found]
        names = [_name_bucket(getattr(one, subject.rstrip("s"), one)) for one in places]
        more = [f"{len(names) - _SHOWN}-more"] if len(names) > _SHOWN else []
        dry = ["dry-run"] if parameters.get("dry_run") else []
        return "-".join([verb, *names[:_SHOWN], *more, *dry])

    return make_run_name


def make_field_name(verb: str, parameter: str, field: str, fallback: str) -> Callable[[], str]:
    """Return a function that names a run ``VERB-VALUE``, by a field of a parameter.

    Args:
        verb: Work of the flow.
        parameter: Parameter with the field: a model, or the dict of a form that was not validated.
        field: Field with the value.
        fallback: Text instead of a value that is missing.
    """

    def make_run_name() -> str:
        parameters: dict[str, Any] = flow_run.parameters or {}
        found = parameters.get(parameter)
        value = found.get(field) if isinstance(found, dict) else getattr(found, field, None)
        return f"{verb}-{value or fallback}"

    return make_run_name


def _name_bucket(location: Any) -> str:
    """Return the name of a bucket's block, or the last part of its URL."""
    if isinstance(location, Bucket):
        location = location._block_document_name or location.url  # noqa: SLF001
    text = str(location or "bucket").rstrip("/")
    return PurePosixPath(text.partition("://")[2] or text).name or "bucket"
