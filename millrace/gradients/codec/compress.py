"""Compress tensors, and keep what was not sent for the next time."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from millrace import errors
from millrace.gradients.codec import kernels
from millrace.gradients.codec.device import fill_dense_on_device, select_on_device
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.codec.tensors import (
    Sparse,
    decode_values,
    fill_dense,
    pack_tensor,
    select_values,
    unpack_tensor,
)
from millrace.gradients.codec.transform import backward, forward
from millrace.schemas.gradient import Codec, Transform

_FLOATS = {torch.float32, torch.float16, torch.bfloat16}


class _Scratch:
    """Memory that is kept from one tensor to the next, as new memory costs most."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of(self, size: int, device: torch.device) -> torch.Tensor:
        """So many float32, with anything in them."""
        if self._memory.numel() < size or self._memory.device != device:
            self._memory = torch.empty(size, device=device)
        return self._memory[:size]


class GradientEncoder:
    """Compresses tensors. Memory: one copy of the largest, kept from one to the next.

    Equal tensors make equal bytes, on a GPU as on the processor. With `Transform.DCT` that holds on
    one kind of each, as the coefficients of two may differ in their last places: by less than 1e-6
    of the largest of their tile, so that another value is sent only where two are as near as that.

    Args:
        codec: How.
        threads: How many work side by side; by default one a processor.
    """

    def __init__(self, codec: Codec, threads: int | None = None) -> None:
        self.codec = codec
        self.threads = threads or _count_processors()
        self._scratch = _Scratch()

    def encode(self, tensor: torch.Tensor, mask: Mask | None = None) -> bytes:
        """Compress a tensor.

        Args:
            tensor: Of any shape; float32, bfloat16 or float16; finite; on any device.
            mask: Of the window, if all workers send the same places.

        Raises:
            ConfigurationError: It is of another type, or not finite, or the mask is missing.
        """
        return pack_tensor(self.select(_float32(tensor, tensor.device), mask)[1], self.codec)

    def select(
        self, tensor: torch.Tensor, mask: Mask | None = None
    ) -> tuple[torch.Tensor, tuple[Sparse, ...]]:
        """Return a tensor's values in the order of its chunks, and those of them that are sent.

        Args:
            tensor: float32, contiguous; on any device, where the values are too.
            mask: As of `encode`.

        Returns:
            The first are memory of the tensor's or of the encoder's.

        Raises:
            ConfigurationError: It is not finite, or the mask is missing.
        """
        plain = self.codec.transform is Transform.NONE
        scratch = None if plain else self._scratch.of(tensor.numel(), tensor.device)
        values = forward(tensor, self.codec.transform, scratch)
        shape = tuple(tensor.shape)
        if tensor.is_cpu:
            return values, select_values(values.numpy(), shape, self.codec, self.threads, mask)
        return values, select_on_device(values, shape, self.codec, self.threads, mask)


def encode(tensor: torch.Tensor, codec: Codec) -> bytes:
    """Compress one tensor: `GradientEncoder` does many."""
    return GradientEncoder(codec).encode(tensor)


class Decoder:
    """Decompresses tensors. Memory: with a transform a copy of the largest, kept for the next.

    Args:
        codec: How they were compressed.
        threads: How many work side by side; by default one a processor.
    """

    def __init__(self, codec: Codec, threads: int | None = None) -> None:
        self.codec = codec
        self.threads = threads or _count_processors()
        self._scratch = _Scratch()

    def decode(
        self,
        body: bytes | memoryview,
        shape: tuple[int, ...],
        out: torch.Tensor | None = None,
        mask: Mask | None = None,
    ) -> torch.Tensor:
        """Decode compressed bytes into a tensor.

        Args:
            body: Of a `GradientEncoder`, or of whom one does not trust: all of it is checked.
            shape: Of the tensor.
            out: A tensor of the shape, float32, contiguous, on any device, to be filled; by default
                a new one on the processor.
            mask: Of the window, if all workers send the same places.

        Raises:
            CodeError: They are no compressed tensor of this shape.
        """
        runs = unpack_tensor(body, shape, self.codec, self.threads, mask)
        if out is None:
            out = torch.empty(shape)
        plain = self.codec.transform is Transform.NONE
        values = out.view(-1) if plain else self._scratch.of(out.numel(), out.device)
        if out.is_cpu:
            fill_dense(runs, self.codec, values.numpy(), self.threads)
        else:
            fill_dense_on_device(runs, self.codec, values)
        return out if plain else backward(values, shape, self.codec.transform, out)


def decode(body: bytes | memoryview, shape: tuple[int, ...], codec: Codec) -> torch.Tensor:
    """Decompress one tensor: `Decoder` does many."""
    return Decoder(codec).decode(body, shape)


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
        self._encoder = GradientEncoder(codec, threads)
        self._kept: dict[str, torch.Tensor] = {}
        self._sent: dict[str, bytes] = {}
        self._mask: Mask | None = None

    def compress(self, name: str, change: torch.Tensor, mask: Mask | None = None) -> bytes:
        """Add a change to what is kept of a tensor, and send some of it.

        Args:
            name: The tensor's name.
            change: What is to be sent of it now, as of `encode`.
            mask: Of the window, if all workers send the same places; the same for all tensors.

        Raises:
            ConfigurationError: It is not finite, or of another shape than before, or the mask is
                missing: what was kept is as it was.
        """
        change = _float32(change)
        shape = tuple(change.shape)
        before = self._kept.get(name)
        if before is not None and tuple(before.shape) != shape:
            raise errors.ConfigurationError(
                f"{name} has the shape {list(shape)}, and before it had {list(before.shape)}."
            )
        total = change.clone() if before is None else change.add(before, alpha=self.decay)
        values, runs = self._encoder.select(total, mask)
        for run in runs:
            _subtract_sent(values.numpy(), run, self.codec)
        if self.codec.transform is not Transform.NONE:  # whose values are the tensor's memory
            backward(values, shape, self.codec.transform, total)
        self._kept[name], self._sent[name] = total, pack_tensor(runs, self.codec)
        self._mask = mask
        return self._sent[name]

    def give_back(self) -> None:
        """Keep what was sent last of each tensor: nobody has taken it."""
        decoder = Decoder(self.codec, self._encoder.threads)
        for name, body in self._sent.items():
            kept = self._kept[name]
            self._kept[name] = kept + decoder.decode(body, tuple(kept.shape), mask=self._mask)
        self._sent = {}

    @contextmanager
    def restore_on_error(self) -> Generator[None]:
        """Restore the kept values if the block raises."""
        kept, sent = dict(self._kept), dict(self._sent)  # tensors in them are never changed
        mask = self._mask
        try:
            yield
        except BaseException:
            self._kept, self._sent, self._mask = kept, sent, mask
            raise

    def read_residual(self, name: str) -> torch.Tensor:
        """Return the values of a tensor that were not sent yet.

        Raises:
            NotFoundError: Nothing was ever sent of it.
        """
        try:
            return self._kept[name]
        except KeyError:
            raise errors.NotFoundError(f"Nothing was sent of {name} yet.") from None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        mask = None if self._mask is None else {"run": self._mask.run, "window": self._mask.window}
        return {"kept": dict(self._kept), "sent": dict(self._sent), "mask": mask}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._kept = {name: _float32(tensor).clone() for name, tensor in state["kept"].items()}
        self._sent = dict(state["sent"])
        self._mask = None if state["mask"] is None else Mask(**state["mask"])


def _subtract_sent(values: np.ndarray[Any, Any], run: Sparse, codec: Codec) -> None:
    chunks = run.chunks
    table = values[chunks.first : chunks.first + chunks.values]
    kernels.subtract(
        table.reshape(chunks.count, chunks.size), run.places, decode_values(run, codec)
    )


def _float32(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    if tensor.dtype not in _FLOATS:
        raise errors.ConfigurationError(
            f"A gradient is {tensor.dtype}: give float32, bfloat16 or float16."
        )
    return tensor.detach().to(device=device, dtype=torch.float32).contiguous()


def _count_processors() -> int:
    return len(os.sched_getaffinity(0))
