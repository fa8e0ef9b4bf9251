"""Encoders and decoders of tensors, and error feedback."""

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
    SparseChunks,
    decode_tensor,
    decode_values,
    pack_tensor,
    select_values,
    unpack_tensor,
)
from millrace.gradients.codec.transform import backward, forward
from millrace.schemas.gradient import Codec, Transform
from millrace.threads import count_processors

_FLOATS = {torch.float32, torch.float16, torch.bfloat16}


class _Scratch:
    """Memory that is reused for the next tensor, since new memory is slow."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """Return ``size`` float32 values with arbitrary content."""
        if self._memory.numel() < size or self._memory.device != device:
            self._memory = torch.empty(size, dtype=torch.float32, device=device)
        return self._memory[:size]


class GradientEncoder:
    """Encoder of tensors. Memory: one copy of the largest tensor, which is reused.

    Equal tensors give equal bytes, on a GPU and on the processor. With `Transform.DCT` this holds
    only for devices of one type. Between two types, coefficients may differ by less than 1e-6 of
    the largest of their tile, so values with such small differences may be selected differently.

    Args:
        codec: Settings of the compression.
        threads: Number of threads; by default one per processor.
    """

    def __init__(self, codec: Codec, threads: int | None = None) -> None:
        self.codec = codec
        self.threads = threads or count_processors()
        self._scratch = _Scratch()

    def encode(self, tensor: torch.Tensor, mask: Mask | None = None) -> bytes:
        """Compress a tensor.

        Args:
            tensor: Finite values of any shape in float32, bfloat16 or float16, on any device.
            mask: Mask of the window, if all workers send the same indices.

        Raises:
            ConfigurationError: A value is not finite, the type is another one, or the mask is
                missing.
        """
        _, groups = self.select(_to_float32(tensor, tensor.device), mask)
        return pack_tensor(groups, self.codec, self.threads)

    def select(
        self, tensor: torch.Tensor, mask: Mask | None = None
    ) -> tuple[torch.Tensor, tuple[SparseChunks, ...]]:
        """Return a tensor's values in the order of its chunks, and the selected values.

        Args:
            tensor: Contiguous float32 values on any device.
            mask: Mask of the window, as for `encode`.

        Returns:
            All values, in memory of the tensor or of the encoder, and the selected values.

        Raises:
            ConfigurationError: A value is not finite, or the mask is missing.
        """
        plain = self.codec.transform is Transform.NONE
        scratch = None if plain else self._scratch.take(tensor.numel(), tensor.device)
        values = forward(tensor, self.codec.transform, scratch)
        shape = tuple(tensor.shape)
        if tensor.is_cpu:
            return values, select_values(values.numpy(), shape, self.codec, self.threads, mask)
        return values, select_on_device(values, shape, self.codec, self.threads, mask)


def encode(tensor: torch.Tensor, codec: Codec) -> bytes:
    """Compress one tensor. Use `GradientEncoder` for several."""
    return GradientEncoder(codec).encode(tensor)


class Decoder:
    """Decoder of tensors. Memory: with a transform, one copy of the largest, which is reused.

    Args:
        codec: Settings of the compression.
        threads: Number of threads; by default one per processor.
    """

    def __init__(self, codec: Codec, threads: int | None = None) -> None:
        self.codec = codec
        self.threads = threads or count_processors()
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
            body: Compressed bytes from any source. All of them are checked.
            shape: Shape of the tensor.
            out: Contiguous float32 tensor of this shape on any device, which is filled. By default
                a new one on the processor. After an error, its values are arbitrary.
            mask: Mask of the window, if all workers send the same indices.

        Raises:
            CodeError: The bytes are not a compressed tensor of this shape.
        """
        if out is None:
            out = torch.empty(shape, dtype=torch.float32)
        plain = self.codec.transform is Transform.NONE
        values = out.view(-1) if plain else self._scratch.take(out.numel(), out.device)
        if out.is_cpu:
            decode_tensor(body, shape, self.codec, values.numpy(), self.threads, mask)
        else:
            groups = unpack_tensor(body, shape, self.codec, self.threads, mask)
            fill_dense_on_device(groups, self.codec, values)
        return out if plain else backward(values, shape, self.codec.transform, out)


def decode(body: bytes | memoryview, shape: tuple[int, ...], codec: Codec) -> torch.Tensor:
    """Decompress one tensor. Use `Decoder` for several."""
    return Decoder(codec).decode(body, shape)


class ErrorFeedback:
    """Error feedback of a sender: values that were not sent are added to the next change.

    With a `residual_factor` of 1, every value is sent at some time.

    Source: SparseLoCo (arXiv 2508.15706, §3) and DeMo (arXiv 2411.19870, §3).

    Args:
        codec: Settings of the compression.
        residual_factor: Factor of a residual before the next change is added.
        threads: Number of threads; by default one per processor.
    """

    def __init__(
        self, codec: Codec, *, residual_factor: float = 1.0, threads: int | None = None
    ) -> None:
        if not 0 <= residual_factor <= 1:
            raise errors.ConfigurationError(
                f"The factor {residual_factor} of the residuals is not between 0 and 1."
            )
        self.codec, self.residual_factor = codec, residual_factor
        self._encoder = GradientEncoder(codec, threads)
        self._kept: dict[str, torch.Tensor] = {}
        self._sent: dict[str, bytes] = {}
        self._mask: Mask | None = None

    def compress(self, name: str, change: torch.Tensor, mask: Mask | None = None) -> bytes:
        """Add a change to the residual of a tensor, and compress the selected values.

        Args:
            name: Name of the tensor.
            change: Change to send, as for `encode`.
            mask: Mask of the window, if all workers send the same indices. It is the same for all
                tensors.

        Raises:
            ConfigurationError: A value is not finite, the shape has changed, or the mask is
                missing. The residual is unchanged.
        """
        change = _to_float32(change)
        shape = tuple(change.shape)
        before = self._kept.get(name)
        if before is not None and tuple(before.shape) != shape:
            raise errors.ConfigurationError(
                f"{name} has the shape {list(shape)}, and before it had {list(before.shape)}."
            )
        total = change.clone() if before is None else change.add(before, alpha=self.residual_factor)
        values, groups = self._encoder.select(total, mask)
        for sparse in groups:
            _subtract_sent(values.numpy(), sparse, self.codec)
        if self.codec.transform is not Transform.NONE:  # otherwise `values` is memory of `total`
            backward(values, shape, self.codec.transform, total)
        self._kept[name] = total
        self._sent[name] = pack_tensor(groups, self.codec, self._encoder.threads)
        self._mask = mask
        return self._sent[name]

    def restore_sent(self) -> None:
        """Add the last sent values to the residuals again, as no worker has received them."""
        decoder = Decoder(self.codec, self._encoder.threads)
        for name, body in self._sent.items():
            kept = self._kept[name]
            self._kept[name] = kept + decoder.decode(body, tuple(kept.shape), mask=self._mask)
        self._sent = {}

    def clear(self) -> bool:
        """Drop the residuals and the last sent values, and return whether there were any."""
        found = bool(self._kept)
        self._kept, self._sent = {}, {}
        return found

    @contextmanager
    def restore_on_error(self) -> Generator[None]:
        """Restore the residuals if the block raises an error."""
        kept, sent = dict(self._kept), dict(self._sent)  # the tensors in them are never changed
        mask = self._mask
        try:
            yield
        except BaseException:
            self._kept, self._sent, self._mask = kept, sent, mask
            raise

    def read_residual(self, name: str) -> torch.Tensor:
        """Return the residual of a tensor: the values that were not sent.

        Raises:
            NotFoundError: The tensor was never compressed.
        """
        try:
            return self._kept[name]
        except KeyError:
            raise errors.NotFoundError(f"Nothing was sent of {name} yet.") from None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which `torch.load` reads without arbitrary code."""
        sent = {
            name: torch.from_numpy(np.frombuffer(body, np.uint8).copy())  # pyright: ignore[reportUnknownMemberType]
            for name, body in self._sent.items()
        }
        mask = None if self._mask is None else {"run": self._mask.run, "window": self._mask.window}
        return {"kept": dict(self._kept), "sent": sent, "mask": mask}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self._kept = {name: _to_float32(tensor).clone() for name, tensor in state["kept"].items()}
        self._sent = {
            name: body if isinstance(body, bytes) else body.cpu().numpy().tobytes()
            for name, body in state["sent"].items()  # an earlier version saved bytes
        }
        self._mask = None if state["mask"] is None else Mask(**state["mask"])


def _subtract_sent(values: np.ndarray[Any, Any], sparse: SparseChunks, codec: Codec) -> None:
    chunks = sparse.chunks
    table = values[chunks.first : chunks.first + chunks.values]
    kernels.subtract(
        table.reshape(chunks.count, chunks.size), sparse.indices, decode_values(sparse, codec)
    )


def _to_float32(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    if tensor.dtype not in _FLOATS:
        raise errors.ConfigurationError(
            f"A gradient is {tensor.dtype}: give float32, bfloat16 or float16."
        )
    return tensor.detach().to(device=device, dtype=torch.float32).contiguous()
