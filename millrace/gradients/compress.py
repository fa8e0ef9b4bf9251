"""Compress tensors, and keep what was not sent for the next time."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from millrace import errors
from millrace.gradients import kernels
from millrace.gradients.codec import Codec
from millrace.gradients.tensors import Sparse, chosen, dense, packed, unpacked, values_of
from millrace.gradients.transform import backward, forward

_FLOATS = {torch.float32, torch.float16, torch.bfloat16}


def encode(tensor: torch.Tensor, codec: Codec, *, threads: int | None = None) -> bytes:
    """Compress a tensor.

    Equal tensors make equal bytes. With `Transform.DCT` that holds on one kind of processor, as the
    coefficients of two may differ in their last places.

    Args:
        tensor: Of any shape; float32, bfloat16 or float16; finite; on any device.
        codec: How.
        threads: How many work side by side; by default one a processor.

    Raises:
        ConfigurationError: It is of another type, or not finite.
    """
    values = forward(_float32(tensor), codec.transform).numpy()
    return packed(chosen(values, tuple(tensor.shape), codec, threads or _processors()), codec)


def decode(
    body: bytes | memoryview,
    shape: tuple[int, ...],
    codec: Codec,
    *,
    threads: int | None = None,
) -> torch.Tensor:
    """The tensor that compressed bytes stand for, float32, on the processor.

    Args:
        body: Of `encode`, or of whom one does not trust: all of it is checked.
        shape: Of the tensor.
        codec: How it was compressed.
        threads: How many work side by side; by default one a processor.

    Raises:
        CodeError: They are no compressed tensor of this shape.
    """
    runs = unpacked(body, shape, codec)
    values = torch.from_numpy(dense(runs, shape, codec, threads or _processors()))  # pyright: ignore[reportUnknownMemberType]
    return backward(values, shape, codec.transform)


class Feedback:
    """A sender's memory: what was not sent is added to what comes next.

    Error feedback, as of SparseLoCo (arXiv 2508.15706, §3) and DeMo (arXiv 2411.19870, §3): with a
    decay of 1 nothing is ever lost, only late.

    Args:
        codec: How tensors are compressed.
        decay: By what the memory is multiplied before something is added to it.
        threads: How many work side by side; by default one a processor.
    """

    def __init__(self, codec: Codec, *, decay: float = 1.0, threads: int | None = None) -> None:
        if not 0 <= decay <= 1:
            raise errors.ConfigurationError(f"The decay {decay} is not between 0 and 1.")
        self.codec, self.decay = codec, decay
        self._threads = threads or _processors()
        self._kept: dict[str, torch.Tensor] = {}

    def compress(self, name: str, change: torch.Tensor) -> bytes:
        """Add a change to what is kept of a tensor, and send the largest of it.

        Args:
            name: The tensor's name.
            change: What is to be sent of it now, as of `encode`.

        Raises:
            ConfigurationError: It is not finite, or of another shape than before: what was kept is
                as it was.
        """
        change = _float32(change)
        shape = tuple(change.shape)
        before = self._kept.get(name)
        if before is not None and tuple(before.shape) != shape:
            raise errors.ConfigurationError(
                f"{name} has the shape {list(shape)}, and before it had {list(before.shape)}."
            )
        total = change.clone() if before is None else change.add(before, alpha=self.decay)
        values = forward(total, self.codec.transform)
        runs = chosen(values.numpy(), shape, self.codec, self._threads)
        for run in runs:
            _take_away(values.numpy(), run, self.codec)
        self._kept[name] = backward(values, shape, self.codec.transform)
        return packed(runs, self.codec)

    def kept(self, name: str) -> torch.Tensor:
        """What was not sent of a tensor yet.

        Raises:
            NotFoundError: Nothing was ever sent of it.
        """
        try:
            return self._kept[name]
        except KeyError:
            raise errors.NotFoundError(f"Nothing was sent of {name} yet.") from None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"kept": dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._kept = {name: _float32(tensor).clone() for name, tensor in state["kept"].items()}


def _take_away(values: np.ndarray[Any, Any], run: Sparse, codec: Codec) -> None:
    chunks = run.chunks
    table = values[chunks.first : chunks.first + chunks.values]
    kernels.subtract(table.reshape(chunks.count, chunks.size), run.places, values_of(run, codec))


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in _FLOATS:
        raise errors.ConfigurationError(
            f"A gradient is {tensor.dtype}: give float32, bfloat16 or float16."
        )
    return tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()


def _processors() -> int:
    return len(os.sched_getaffinity(0))
