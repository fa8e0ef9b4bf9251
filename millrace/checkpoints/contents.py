"""Content of a checkpoint before it is saved: files by their digests, and the tensors in them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import orjson

from millrace import errors
from millrace.checkpoints.find import root_of, with_digest
from millrace.digest import compute_sha256
from millrace.keys.checkpoints import CheckpointKeys
from millrace.memory import map_anonymous
from millrace.schemas.checkpoint import Checkpoint, Part, TensorRecord
from millrace.storage import Store, read_into


@dataclass(frozen=True, slots=True)
class Content:
    """A checkpoint that is not in its place yet.

    Attributes:
        parts: Its files, as they will be in the folder of its step.
        tensors: Its tensors, and where they lie in the files.
        root: The digest of both.
        body: The bytes of a file, by its place in ``parts``.
    """

    parts: tuple[Part, ...]
    tensors: Mapping[str, TensorRecord] = field(repr=False)
    root: str
    body: Callable[[int], memoryview] = field(repr=False)

    def make_metadata(self, checkpoint: Checkpoint, job: str) -> Checkpoint:
        """Return the metadata that commits this content as another job's checkpoint."""
        there = {"job": job, "parts": self.parts, "root": self.root}
        return with_digest(checkpoint.model_copy(update=there))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(part.size for part in self.parts)


def content_of(store: Store, checkpoint: Checkpoint) -> Content:
    """Return the content of a checkpoint that was saved elsewhere: its files are read one by one.

    Args:
        store: Where it is.
        checkpoint: Which.
    """

    def read_file(number: int) -> memoryview:
        part = checkpoint.parts[number]
        return read_part(store, checkpoint.job, part, memoryview(map_anonymous(part.size)))

    return make_content(checkpoint.step, checkpoint.parts, checkpoint.tensors, read_file)


def make_content(
    step: int,
    parts: tuple[Part, ...],
    tensors: Mapping[str, TensorRecord],
    body: Callable[[int], memoryview],
) -> Content:
    """Return the content to be saved at a step."""
    there = tuple(Part(step=step, sha256=part.sha256, size=part.size) for part in parts)
    return Content(there, tensors, root_of(there, tensors), body)


def normalise_json(value: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Return a value as it comes back from JSON; numpy's scalars become plain numbers.

    Args:
        value: The value; None stands for an empty one.
        what: Its name in the error message.

    Raises:
        ConfigurationError: JSON does not hold it.
    """
    whole = dict(value or {})
    try:
        json.dumps(whole, allow_nan=False, default=_convert_number)  # orjson writes NaN as null
        return orjson.loads(orjson.dumps(whole, default=_convert_number))
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.ConfigurationError(
            f"The {what} of a checkpoint is not JSON ({errors.format_error(error)}): give dicts "
            "with text as keys, lists, text, and finite numbers of at most 64 bits."
        ) from error


def _convert_number(value: object) -> Any:
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return cast("Any", value).item()
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no kind of JSON value")


def read_part(store: Store, job: str, part: Part, into: memoryview) -> memoryview:
    """Return the bytes of a file, which are those that were saved.

    Args:
        store: Where it is.
        job: Whose.
        part: Which.
        into: Where they are read to; its beginning is returned.

    Raises:
        CorruptError: They are not, or it is missing.
    """
    key = CheckpointKeys(job).part(part.step, part.sha256)
    body = into[: part.size]
    try:
        right = read_into(store, key, body) == part.size and compute_sha256(body) == part.sha256
    except errors.NotFoundError:
        raise errors.CorruptError(f"{store.make_url(key)} is missing.") from None
    if not right:
        raise errors.CorruptError(
            f"{store.make_url(key)} is not the bytes that were saved: verify the checkpoint, or "
            "load the one before it."
        )
    return body
