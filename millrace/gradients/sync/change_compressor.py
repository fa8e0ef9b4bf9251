"""Compression of the change of a worker's model over a window."""

from typing import Any

import numpy as np
import torch
from safetensors.numpy import save as pack

from millrace import errors
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.ranks import RankedWeights
from millrace.gradients.codec.compress import ErrorFeedback, GradientEncoder
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.settings import RunSettings
from millrace.gradients.sync.model_tensors import ModelTensors, gather_tensor


class ChangeCompressor:
    """Compressor of the tensors of one rank, with their residuals.

    Args:
        settings: Settings of the run.
        weights: Weights of the run at the begin of the window.
        ranks: Group of the worker's ranks.
        tensors: Access to the model's tensors.
        threads: Number of threads; by default one per processor.

    Attributes:
        feedback: Error feedback with the residuals.
    """

    def __init__(
        self,
        settings: RunSettings,
        weights: RankedWeights,
        ranks: RankGroup,
        tensors: ModelTensors,
        *,
        threads: int | None = None,
    ) -> None:
        self._settings, self._weights = settings, weights
        self._ranks, self._tensors, self._threads = ranks, tensors, threads
        self.feedback = ErrorFeedback(
            settings.codec, residual_factor=settings.residual_factor, threads=threads
        )

    def compress(self, model: torch.nn.Module, window: int) -> bytes:
        """Compress this rank's tensors of the gradient, and pack them into a safetensors file.

        All ranks call this method together.

        Args:
            model: Model after its steps.
            window: Number of the window.

        Raises:
            ConfigurationError: A value is not finite, or the model differs from that of the run.
        """
        mask = Mask(self._settings.name, window)
        bodies: dict[str, Any] = {}
        failed: list[Exception] = []
        for name, weight in self._tensors.select(model).items():
            whole = gather_tensor(weight)  # a collective: also called after a failure
            if name in self._weights.held.weights and not failed:
                try:
                    if self._settings.codec.is_buffer(name):
                        body = self._encode_buffer(name, whole)
                    else:
                        body = self.feedback.compress(name, self._compute_change(name, whole), mask)
                    bodies[name] = np.frombuffer(body, np.uint8)
                except Exception as error:  # noqa: BLE001 - raised after the collectives
                    failed.append(error)

        def end() -> bytes:
            if failed:
                raise failed.pop()  # `failed` must not keep the traceback alive
            return pack(bodies)

        return self._ranks.run_on_each(end)

    def _encode_buffer(self, name: str, buffer: torch.Tensor) -> bytes:
        """Compress the values of a buffer."""
        values = buffer.cpu().float()
        if not torch.isfinite(values).all():
            raise errors.ConfigurationError(
                f"The buffer {name} has values that are not finite: leave this window out."
            )
        return GradientEncoder(self._settings.codec.select_for_tensor(name), self._threads).encode(
            values
        )

    def _compute_change(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return how a weight has changed; 0 for equal values, also if these are infinite.

        Raises:
            ConfigurationError: A change is not finite.
        """
        whole = torch.from_numpy(self._weights.held.weights[name])  # pyright: ignore[reportUnknownMemberType]
        before = whole.to(weight.dtype).float()  # rounded as the model received it
        after = weight.detach().cpu().float()
        change = before - after
        if not torch.isfinite(change.sum()):  # without memory for a mask, as is usual
            change.masked_fill_(before == after, 0.0)  # such as -inf in an attention mask
            if not torch.isfinite(change).all():
                raise errors.ConfigurationError(
                    f"The change of {name} has values that are not finite: leave this step out."
                )
        return change
