"""Samples of one stream: its rows, repeated, or transformed and packed.

A position is exact within the outputs of a row, and within the tokens of an output. So it is a few
integers, and no tokens: the rest of a packed sequence is read again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt

from millrace.datasets.field_names import KEY
from millrace.datasets.loader.readers.base import LoadedSample
from millrace.datasets.sample import explain_result
from millrace.errors import ConfigurationError
from millrace.formatting import format_count

Transform = Callable[[LoadedSample], Mapping[str, Any] | Iterable[Mapping[str, Any]] | None]
"""Function that makes none, one or several samples of a sample. It gives the same every time."""


@dataclass(slots=True)
class StreamPosition:
    """Position in a stream: what was received, and where the next sample begins.

    Attributes:
        outputs: Number of samples that were received.
        row: Index of the row with which the next sample begins.
        part: Number of the row's outputs before the next sample.
        token: Number of the output's tokens before the next sample.
    """

    outputs: int = 0
    row: int = 0
    part: int = 0
    token: int = 0

    def list_numbers(self) -> list[int]:
        """Return the four numbers."""
        return [self.outputs, self.row, self.part, self.token]


class StreamSteps(NamedTuple):
    """Steps between the rows of a dataset and the samples of a trainer.

    Attributes:
        transform: Function of the user; None without one.
        pack: Number of tokens of a sequence; None without packing.
        field: Field with the tokens to pack.
    """

    transform: Transform | None = None
    pack: int | None = None
    field: str = "tokens"

    def __bool__(self) -> bool:
        return self.transform is not None or self.pack is not None


def repeat_last(
    rows: Iterator[LoadedSample], copies: int, *, skip_first: bool
) -> Iterator[LoadedSample]:
    """Yield the rows of a stream, and then copies of the last one.

    A trainer may change what it receives, also in place. So the last row is copied before that.

    Args:
        rows: Rows of the stream.
        copies: Number of copies.
        skip_first: Whether the first row was received before.
    """
    last = next(rows)
    for row in rows:
        yield last
        last = row
    for _ in range(copies if skip_first else copies + 1):
        yield deepcopy(last)


def iterate_transformed(
    rows: Iterator[LoadedSample], position: StreamPosition, steps: StreamSteps
) -> Iterator[LoadedSample]:
    """Yield the transformed and packed samples of a stream, and move the position with each.

    Args:
        rows: Rows of the stream from that of the position on.
        position: Position from which samples are received.
        steps: Steps that are done with each row.

    Raises:
        ConfigurationError: The position is behind more than the steps make of its row.
    """
    outputs = _transform_rows(rows, position, steps.transform)
    if steps.pack is not None:
        yield from _pack_outputs(outputs, position, steps.field, steps.pack)
        return
    for output in outputs:
        position.outputs += 1
        position.row, position.part = output.next_row, output.next_part
        yield output.sample


class _RowOutput(NamedTuple):
    """One output of a row.

    Attributes:
        sample: The output.
        key: Key of the row.
        row: Index of the row.
        part: Number of the outputs of the row before this one.
        next_row: Row of the next output.
        next_part: Number of that row's outputs before the next output.
    """

    sample: dict[str, Any]
    key: str
    row: int
    part: int
    next_row: int
    next_part: int


def _transform_rows(
    rows: Iterator[LoadedSample], position: StreamPosition, transform: Transform | None
) -> Iterator[_RowOutput]:
    skipped = position.part
    is_within_row = bool(position.part or position.token)
    for number, row in enumerate(rows, position.row):
        key = row.get(KEY, "")
        outputs = [row] if transform is None else _apply(transform, row)
        if is_within_row and skipped >= len(outputs):
            _raise_changed_steps(key, format_count(len(outputs), "sample"), skipped + 1)
        is_within_row = False
        last = len(outputs) - 1
        for part in range(skipped, len(outputs)):
            after = (number, part + 1) if part < last else (number + 1, 0)
            yield _RowOutput(outputs[part], key, number, part, *after)
        skipped = 0


def _apply(transform: Transform, row: LoadedSample) -> list[LoadedSample]:
    key = row.get(KEY, "")
    try:
        made: Any = transform(row)
        if made is None:
            return []
        is_single = isinstance(made, Mapping | str | bytes) or not isinstance(made, Iterable)
        parts: list[Any] = [made] if is_single else list(cast("Iterable[Any]", made))
    except Exception as error:
        error.add_note(f"`transform` failed for the sample {key!r}.")
        raise
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping):
            reason = explain_result("`transform`", part, None if is_single else number)
            raise ConfigurationError(f"For the sample {key!r}, {reason}.")
    return [dict(part) for part in parts]


def _pack_outputs(
    outputs: Iterator[_RowOutput], position: StreamPosition, field: str, length: int
) -> Iterator[LoadedSample]:
    """Yield sequences of equal length. Tokens at the end that make no sequence are left out."""
    pieces: deque[tuple[_RowOutput, npt.NDArray[Any]]] = deque()
    offset, available = position.token, -position.token
    for output in outputs:
        tokens = _get_tokens(output.sample, field)
        if available < 0 and len(tokens) <= offset:
            _raise_changed_steps(output.key, format_count(len(tokens), "token"), offset + 1)
        pieces.append((output, tokens))
        available += len(tokens)
        while available >= length:
            sequence, offset = _take_sequence(pieces, offset, length)
            available -= length
            first = pieces[0][0] if pieces else None
            if first is None:
                position.row, position.part = output.next_row, output.next_part
            else:
                position.row, position.part = first.row, first.part
            position.token = offset
            position.outputs += 1
            yield {field: sequence[0], f"{field}_ends": sequence[1]}


def _take_sequence(
    pieces: deque[tuple[_RowOutput, npt.NDArray[Any]]], offset: int, length: int
) -> tuple[tuple[npt.NDArray[Any], npt.NDArray[np.int64]], int]:
    """Remove a sequence from the front of pieces.

    Returns:
        The tokens, the end of each output within them, and the offset in the piece that is left.
    """
    parts: list[npt.NDArray[Any]] = []
    ends: list[int] = []
    taken = 0
    while taken < length:
        tokens = pieces[0][1]
        part = tokens[offset : offset + length - taken]
        if len(part):  # the type of an empty list is float64
            parts.append(part)
        taken += len(part)
        offset += len(part)
        if offset == len(tokens):
            pieces.popleft()
            ends.append(taken)
            offset = 0
    return (np.concatenate(parts), np.array(ends, np.int64)), offset


def _raise_changed_steps(key: str, made: str, least: int) -> NoReturn:
    raise ConfigurationError(
        f"The sample {key!r} gives {made}, and at least {least} when the state of the loader was "
        "saved. `transform`, `pack_field` or the tokenizer is another one, or does not give the "
        "same every time. Open the loader as it was when the state was saved, or begin a new epoch."
    )


def _get_tokens(sample: Mapping[str, Any], field: str) -> npt.NDArray[Any]:
    tokens = sample.get(field)
    if tokens is None:
        raise ConfigurationError(
            f"`pack` needs the field {field!r}, and a sample has the fields {sorted(sample)}. Name "
            "the field with the tokens in `pack_field`, or make tokens in `transform`."
        )
    found = np.asarray(tokens)
    if found.ndim != 1:
        raise ConfigurationError(
            f"`pack` needs a list of tokens in the field {field!r}, and that of a sample is a "
            f"{type(tokens).__name__} of {found.ndim} dimensions. Correct `pack_field`, or make "
            "tokens in `transform`."
        )
    if found.size and found.dtype.kind not in "iu":
        raise ConfigurationError(
            f"`pack` needs integers in the field {field!r}, and that of a sample has values of the "
            f"type {found.dtype}. Correct `pack_field`, or make tokens in `transform`."
        )
    return found
